"""What each kind of normalisation makes of a lone sample, of a batch, and of the state."""

import pytest
import torch

from fclmodels.backbones.layers.norms import BatchNorm, depends_on_batch, list_counters, list_statistics, make_norm
from fclmodels.backbones.model.network import build_network
from fclmodels.backbones.model.spec import ModelSpec

NORMS = ["batch", "batch-no-stats", "group", "none"]


def network(backbone="resnet18", **settings):
    spec = ModelSpec({"backbone": backbone, **settings}, (3, 32, 32), "growing", ((0, 1, 2),))
    return build_network(spec, torch.Generator().manual_seed(0))


def normal(*size, seed=0):
    return torch.randn(size, generator=torch.Generator().manual_seed(seed))


def logits_depend_on_batch(net):
    x = normal(4, 3, 32, 32)
    with torch.no_grad():
        return not torch.allclose(net.eval()(x)[:2], net(torch.cat([x[:2], 3 * x[2:] + 1]))[:2], atol=1e-5)


@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize("stem", ["imagenet", "cifar"])
def test_says_whether_a_resnets_logits_depend_on_their_batch(norm, stem):
    net = network(width=4, norm=norm, stem=stem)
    assert depends_on_batch(net) == logits_depend_on_batch(net) == (norm == "batch-no-stats")


@pytest.mark.parametrize("backbone", ["mlp", "cnn", "alexnet"])
def test_networks_without_norm_do_not_depend_on_the_batch(backbone):
    net = network(backbone)
    assert not depends_on_batch(net)
    assert not logits_depend_on_batch(net)
    assert list_statistics(net) | list_counters(net) == set()


def test_names_of_statistics_and_counters():
    net = network(width=4)
    state = net.state_dict()
    norms = [name.removesuffix("running_mean") for name in state if name.endswith("running_mean")]
    assert len(norms) == 20
    assert list_statistics(net) == {norm + kind for norm in norms for kind in ("running_mean", "running_var")}
    assert list_counters(net) == {name for name, value in state.items() if value.dtype == torch.int64}


@pytest.mark.parametrize("norm", NORMS[1:])
def test_without_running_statistics_there_are_no_buffers(norm):
    assert not list(network(width=4, norm=norm).buffers())


@pytest.mark.parametrize(("channels", "groups"), [(64, 4), (512, 32), (20, 5), (160, 10), (32, 2)])
def test_groups_have_sixteen_channels_or_what_a_narrow_network_allows(channels, groups):
    assert make_norm("group", channels).num_groups == groups


@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize("training", [True, False])
def test_a_lone_sample_on_a_1x1_map_goes_through(norm, training):
    net = network(width=4, norm=norm).train(training)
    net(normal(1, 3, 32, 32)).square().sum().backward()
    assert all(p.grad is None or p.grad.isfinite().all() for p in net.parameters())
    assert all(b.isfinite().all() for b in net.buffers())


def test_a_lone_value_is_normalised_by_the_running_statistics_and_does_not_move_them():
    layer = BatchNorm(5)
    layer(normal(9, 5, 2, 2) * 3 + 1)
    before = {name: tensor.clone() for name, tensor in layer.state_dict().items()}
    x = normal(1, 5, 1, 1, seed=1)
    expected = (x.flatten() - before["running_mean"]) / (before["running_var"] + layer.eps).sqrt()
    torch.testing.assert_close(layer.train()(x).flatten(), expected)
    torch.testing.assert_close(layer.eval()(x).flatten(), expected)
    assert all(torch.equal(layer.state_dict()[name], before[name]) for name in before)


def test_without_statistics_a_lone_value_leaves_the_bias():
    layer = BatchNorm(5, track_running_stats=False)
    layer.bias.data.copy_(torch.arange(5.0))
    for training in (True, False):
        out = layer.train(training)(normal(1, 5, 1, 1)).flatten()
        torch.testing.assert_close(out, torch.arange(5.0), atol=1e-3, rtol=0)


@pytest.mark.parametrize("size", [(2, 5, 1, 1), (1, 5, 2, 1), (3, 5, 4, 4)])
@pytest.mark.parametrize("track", [True, False])
def test_any_other_batch_is_torchs_own(size, track):
    ours, theirs = BatchNorm(5, track_running_stats=track), torch.nn.BatchNorm2d(5, track_running_stats=track)
    for training in (True, False):
        x = normal(*size)
        assert torch.equal(ours.train(training)(x), theirs.train(training)(x))
    assert all(torch.equal(a, b) for a, b in zip(ours.buffers(), theirs.buffers(), strict=True))
