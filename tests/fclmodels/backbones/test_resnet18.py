"""ResNet-18: torchvision's names and outputs, FOT's reduced networks, and the convolution that skips padding."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.nn import functional as F

from fclmodels.backbones.layers.residual import Conv3x3
from fclmodels.backbones.resnet18 import ResNet18
from fclmodels.errors import UserError
from fclmodels.optional.torchvision import import_torchvision


def resnet18(shape=(3, 32, 32), **settings):
    return ResNet18(ResNet18.Settings(**settings)).build(shape)


def parameters(network):
    return sum(p.numel() for p in network.parameters())


@pytest.fixture(scope="module")
def reference():
    with torch.random.fork_rng():
        torch.manual_seed(1)
        network = import_torchvision().models.resnet18()
    network.fc = torch.nn.Identity()
    # Running statistics and affine parameters that are not 0 and 1, so that none can be forgotten.
    generator = torch.Generator().manual_seed(2)
    for module in network.modules():
        if isinstance(module, torch.nn.BatchNorm2d):
            for tensor in (module.weight, module.bias, module.running_mean, module.running_var):
                tensor.data.uniform_(0.5, 1.0, generator=generator)
    return network


def test_has_torchvisions_names_and_shapes_in_its_order(reference):
    ours, theirs = resnet18().state_dict(), reference.state_dict()
    assert list(ours) == list(theirs)
    assert all(ours[name].shape == theirs[name].shape and ours[name].dtype == theirs[name].dtype for name in theirs)
    assert parameters(resnet18()) == 11_176_512


@pytest.mark.parametrize("size", [32, 40, 64])
def test_computes_what_torchvision_computes(reference, size):
    network = resnet18((3, size, size))
    network.load_state_dict(reference.state_dict())
    x = torch.randn(4, 3, size, size, generator=torch.Generator().manual_seed(3))
    with torch.no_grad():
        torch.testing.assert_close(network.eval()(x), reference.eval()(x), atol=1e-5, rtol=1e-5)


def test_a_training_step_is_torchvisions(reference):
    state = {name: tensor.clone() for name, tensor in reference.state_dict().items()}
    network = resnet18()
    network.load_state_dict(state)
    x = torch.randn(8, 3, 32, 32, generator=torch.Generator().manual_seed(3))
    for model in (network, reference):
        model.train().zero_grad()
        model(x).square().mean().backward()
    theirs = dict(reference.named_parameters())
    for name, ours in network.named_parameters():
        torch.testing.assert_close(ours.grad, theirs[name].grad, atol=1e-5, rtol=1e-3)
    for name, buffer in reference.named_buffers():
        torch.testing.assert_close(network.get_buffer(name), buffer, atol=1e-5, rtol=1e-4)
    reference.load_state_dict(state)


def test_fots_network_for_five_datasets():
    network = resnet18(stem="cifar", width=20, norm="none", grid=2)
    layers = [4 * 20 * 20] + [n * 2 * n + 3 * 4 * n * n for n in (20, 40, 80)]
    assert parameters(network) == 9 * (3 * 20 + sum(layers)) + 2 * (20**2 + 40**2 + 80**2) == 1_090_140
    assert network.features == 640


def test_fots_network_for_mini_imagenet_averages_windows_of_two():
    network = resnet18((3, 84, 84), stem="cifar", stem_stride=2, width=4, norm="batch-no-stats", grid=3)
    maps = []
    network.layer4.register_forward_hook(lambda module, inputs, output: maps.append(output))
    features = network(torch.randn(2, 3, 84, 84, generator=torch.Generator().manual_seed(0)))
    assert maps[0].shape == (2, 32, 6, 6)
    torch.testing.assert_close(features, F.avg_pool2d(maps[0], 2).flatten(1))
    assert features.shape[1] == network.features


def test_without_norm_the_signal_neither_dies_nor_explodes():
    with torch.random.fork_rng():
        torch.manual_seed(0)
        network = resnet18(stem="cifar", width=20, norm="none", grid=2)
        features = network(torch.randn(16, 3, 32, 32))
    assert 1e-3 < features.std() < 10


@pytest.mark.parametrize(("stem", "stride", "fits"), [("imagenet", 1, 1), ("cifar", 1, 4), ("cifar", 2, 2)])
def test_refuses_a_grid_finer_than_the_last_map(stem, stride, fits):
    settings = {"stem": stem, "stem_stride": stride, "width": 1}
    assert resnet18((3, 32, 32), **settings, grid=fits).features == 8 * fits**2
    with pytest.raises(UserError, match=f"model.grid: 32x64 .* Use model.grid: {fits}"):
        resnet18((3, 32, 64), **settings, grid=fits + 1)


@given(
    height=st.integers(1, 5),
    width=st.integers(1, 5),
    stride=st.sampled_from([1, 2]),
    inputs=st.integers(1, 3),
    seed=st.integers(0, 99),
)
def test_skipping_the_padding_changes_neither_output_nor_gradients(height, width, stride, inputs, seed):
    generator = torch.Generator().manual_seed(seed)
    conv = Conv3x3(inputs, 4, stride)
    x = torch.randn(2, inputs, height, width, generator=generator, requires_grad=True)
    plain = F.conv2d(x, conv.weight, stride=stride, padding=1)
    towards = torch.randn(plain.shape, generator=generator)
    ours = conv(x)
    torch.testing.assert_close(ours, plain)
    of = (x, conv.weight)
    for ours_grad, plain_grad in zip(
        torch.autograd.grad(ours, of, towards), torch.autograd.grad(plain, of, towards), strict=True
    ):
        torch.testing.assert_close(ours_grad, plain_grad, atol=1e-5, rtol=1e-5)
