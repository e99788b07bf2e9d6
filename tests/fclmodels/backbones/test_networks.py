"""Every network: what it returns for which images, and FOT F.3's two by their figures and their order of layers."""

import numpy as np
import pytest
import torch
from sklearn.datasets import load_digits
from torch.nn import functional as F

from fclmodels.backbones.alexnet import AlexNet
from fclmodels.backbones.cnn import Cnn
from fclmodels.backbones.mlp import Mlp
from fclmodels.backbones.model.network import build_network
from fclmodels.backbones.model.spec import ModelSpec
from fclmodels.backbones.resnet18 import ResNet18
from fclmodels.errors import UserError

SHAPES = [(1, 8, 8), (1, 28, 28), (3, 32, 32), (3, 64, 64)]


def parameters(network):
    return sum(p.numel() for p in network.parameters())


def images(*size, seed=0):
    return torch.randn(size, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize(
    ("kind", "shape"),
    [(kind, shape) for kind in (Mlp, AlexNet, Cnn, ResNet18) for shape in SHAPES[kind is AlexNet :]],
)
def test_maps_images_to_its_features_and_leaves_them_alone(kind, shape):
    narrow = {"width": 4} if kind is ResNet18 else {}
    network = kind(kind.Settings(**narrow)).build(shape)
    x = images(3, *shape)
    before = x.clone()
    features = network(x)
    features.square().sum().backward()
    assert features.shape == (3, network.features)
    assert all(p.grad.isfinite().all() and p.grad.any() for p in network.parameters())
    assert torch.equal(x, before)


@pytest.mark.parametrize("kind", [Mlp, AlexNet, Cnn, ResNet18])
def test_blocks_are_the_children_with_parameters_in_the_order_of_the_forward_pass(kind):
    network = kind(kind.Settings()).build((3, 32, 32))
    order = []
    for name in network.blocks:
        network.get_submodule(name).register_forward_hook(lambda *_, name=name: order.append(name))
    network.eval()(images(1, 3, 32, 32))
    assert tuple(order) == network.blocks
    assert {name.split(".")[0] for name, _ in network.named_parameters()} == set(network.blocks)


@pytest.mark.parametrize(
    ("kind", "shape", "least"),
    [(AlexNet, (3, 18, 40), "19x19"), (AlexNet, (1, 8, 8), "19x19"), (Cnn, (1, 5, 3), "4x4")],
)
def test_refuses_images_that_would_vanish(kind, shape, least):
    with pytest.raises(UserError, match=f"at least {least}.*{shape[1]}x{shape[2]}"):
        kind(kind.Settings()).build(shape)


def test_alexnet_takes_its_smallest_images():
    assert AlexNet(AlexNet.Settings()).build((1, 19, 20)).eval()(images(1, 1, 19, 20)).shape == (1, 2048)


def test_mlp_has_the_size_of_the_paper():
    # 784-400-400-400 with biases; with a head of 10 it is FOT's 4-layer network.
    assert parameters(Mlp(Mlp.Settings()).build((1, 28, 28))) == 784 * 400 + 2 * 400 * 400 + 3 * 400
    spec = ModelSpec({"backbone": "mlp"}, (1, 28, 28), "growing", (tuple(range(10)),))
    assert parameters(build_network(spec, torch.Generator())) == 638_810


def test_alexnet_has_the_size_of_the_paper():
    # 32 -> 29 -> 14 -> 12 -> 6 -> 5 -> 2, so 256 * 4 inputs of the first wide layer; no biases.
    counted = 64 * 3 * 16 + 128 * 64 * 9 + 256 * 128 * 4 + 2048 * 1024 + 2048 * 2048
    assert parameters(AlexNet(AlexNet.Settings()).build((3, 32, 32))) == counted == 6_499_328


def test_mlp_computes_relu_layers():
    network = Mlp(Mlp.Settings(hidden=5)).build((1, 2, 3)).eval()
    x = images(4, 1, 2, 3)
    expected = x.numpy().reshape(4, 6)
    for layer in (network.fc1, network.fc2, network.fc3):
        expected = np.maximum(expected @ layer.weight.detach().numpy().T + layer.bias.detach().numpy(), 0)
    np.testing.assert_allclose(network(x).detach(), expected, atol=1e-6)


def shares_of_zeros(network, shape, names):
    """What dropout alone sets to 0: the share in the input of each named layer, and in the features."""
    for parameter in network.parameters():
        torch.nn.init.constant_(parameter, 1 / parameter[0].numel())
    shares = []
    for name in names:
        module = network.get_submodule(name)
        module.register_forward_pre_hook(lambda _, inputs: shares.append((inputs[0] == 0).float().mean().item()))
    with torch.random.fork_rng():
        torch.manual_seed(0)
        features = network.train()(torch.ones(64, *shape))
    return [*shares, (features == 0).float().mean().item()]


def test_mlp_drops_as_the_paper_says():
    shares = shares_of_zeros(Mlp(Mlp.Settings()).build((1, 8, 8)), (1, 8, 8), ["fc2", "fc3"])
    assert shares == pytest.approx([0.2, 0.5, 0.5], abs=0.01)


def test_alexnet_drops_before_it_pools():
    # Of a window of four, all must be dropped for its maximum to be 0.
    names = ["conv2", "conv3", "fc1", "fc2"]
    shares = shares_of_zeros(AlexNet(AlexNet.Settings()).build((3, 32, 32)), (3, 32, 32), names)
    assert shares == pytest.approx([0.2**4, 0.2**4, 0.5**4, 0.5, 0.5], rel=0.1)


@pytest.mark.parametrize("kind", [Mlp, AlexNet])
def test_dropout_is_off_in_evaluation_and_by_setting(kind):
    x = images(2, 3, 32, 32)
    network = kind(kind.Settings()).build((3, 32, 32))
    without = kind(kind.Settings(dropout=(0, 0))).build((3, 32, 32))
    without.load_state_dict(network.state_dict())
    assert torch.equal(without.train()(x), network.eval()(x))


def test_cnn_has_the_same_layers_for_images_of_any_size_from_16_pixels_on():
    shapes = {
        side: [p.shape for p in Cnn(Cnn.Settings()).build((3, side, side)).parameters()] for side in (16, 30, 64, 225)
    }
    assert shapes[64][4] == (128, 1024)
    assert all(of_side == shapes[64] for of_side in shapes.values())


def test_cnn_averages_the_second_map_and_leaves_a_small_one_as_it_is():
    x = images(2, 3, 64, 32)
    network = Cnn(Cnn.Settings()).build((3, 64, 32))
    first = F.relu(F.max_pool2d(network.conv1(x), 2))
    second = F.relu(F.max_pool2d(network.conv2(first), 2))
    fields = second.reshape(2, 64, 4, 4, 4, 2).mean((3, 5))
    torch.testing.assert_close(network(x), F.relu(network.fc1(fields.flatten(1))))
    small = images(2, 1, 12, 8)
    narrow, wide = (Cnn(Cnn.Settings(grid=grid)).build((1, 12, 8)) for grid in (4, 9))
    wide.load_state_dict(narrow.state_dict())
    assert torch.equal(narrow(small), wide(small))


def test_cnn_learns_the_digits_in_a_second():
    digits = load_digits()
    x = torch.tensor(digits.images[:, None] / 8 - 1, dtype=torch.float32)
    y = torch.tensor(digits.target)
    spec = ModelSpec({"backbone": "cnn"}, (1, 8, 8), "growing", (tuple(range(10)),))
    network = build_network(spec, torch.Generator().manual_seed(0))
    optimizer = torch.optim.SGD(network.parameters(), lr=0.1)
    for epoch in range(6):
        order = torch.randperm(1400, generator=torch.Generator().manual_seed(epoch))
        for batch in order.split(32):
            optimizer.zero_grad()
            F.cross_entropy(network(x[batch]), y[batch]).backward()
            optimizer.step()
    with torch.no_grad():
        assert (network(x[1400:]).argmax(1) == y[1400:]).float().mean() > 0.93
