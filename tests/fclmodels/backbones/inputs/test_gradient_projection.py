"""Projected training: whichever way is taken, the plain formula G - G Phi Phi^T on autograd's gradients."""

import numpy as np
import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st
from torch import nn

from fclmodels.backbones.inputs.gradient_projection import Projection, split_by_width
from fclmodels.backbones.inputs.layer_capture import find_layers
from fclmodels.backbones.layers.residual import Conv3x3
from fclmodels.backbones.resnet18 import ResNet18

EXACT = 1e-10


def random(seed):
    return torch.Generator().manual_seed(seed)


def orthonormal(d, r, seed=0, dtype=torch.float64):
    return torch.linalg.qr(torch.randn(d, d, generator=random(seed), dtype=dtype)).Q[:, :r].contiguous()


def bases_for(layers, share):
    return {
        name: orthonormal(layer.width, round(share * layer.width), i) for i, (name, layer) in enumerate(layers.items())
    }


def data(batch, *shape, seed=1):
    return torch.randn(batch, *shape, generator=random(seed), dtype=torch.float64)


def gradients(network, x):
    """Of a loss that is not linear in the output, so that all gradients differ."""
    network.zero_grad()
    network(x).square().sum().sin().backward()
    return {name: p.grad.clone() for name, p in network.named_parameters() if p.grad is not None}


def projected(network, x, projection, batch_size):
    with projection.project_in_backward(network, batch_size):
        result = gradients(network, x)
        projection.project_gradients(result)
    return result


def plain(layers, result, bases):
    """G - G Phi Phi^T in NumPy; Phi has rows of zeros where the kernel has taps that never see data.

    Of a grouped convolution each group has its own rows of G, and its own Phi.
    """
    expected = {name: gradient.numpy().copy() for name, gradient in result.items()}
    for name, Phi in bases.items():
        layer = layers[name]
        shape = layer.module.weight.shape
        places = layer.select_taps(torch.arange(shape[1:].numel()).view(1, *shape[1:])).flatten()
        whole = np.zeros((shape[1:].numel(), Phi.shape[1]))
        whole[places] = Phi.numpy()
        groups = np.split(expected[layer.weight].reshape(shape[0], -1), layer.groups)
        groups[layer.group] = groups[layer.group] - groups[layer.group] @ whole @ whole.T
        expected[layer.weight] = np.concatenate(groups).reshape(shape)
    return expected


def assert_same(result, expected):
    assert result.keys() == expected.keys()
    scale = max(np.abs(value).max() for value in expected.values())
    for name, value in expected.items():
        np.testing.assert_allclose(result[name], value, atol=EXACT * scale, err_msg=name)


def check(network, x, share, batch_size=None):
    """All layers protected: the projected gradients are the plain ones projected. Gives the projection."""
    network.double()
    layers = find_layers(network, x.shape[1:])
    bases = bases_for(layers, share)
    projection = Projection(layers, *split_by_width(bases))
    expected = plain(layers, gradients(network, x), bases)
    assert_same(projected(network, x, projection, batch_size or len(x)), expected)
    return projection


def in_backward(network, x, projection):
    """Names of the weights whose gradient is projected by the backward pass itself."""
    unprojected = gradients(network, x)
    with projection.project_in_backward(network, len(x)):
        result = gradients(network, x)
    return {name for name, gradient in result.items() if (gradient - unprojected[name]).norm() > 1e-6 * gradient.norm()}


def meets_data(size, kernel, padding, stride, dilation):
    """Whether the kernel has a position along this axis, and some tap of it ever lies in the map."""
    starts = range(-padding, size + padding - dilation * (kernel - 1), stride)
    return any(0 <= start + tap * dilation < size for start in starts for tap in range(kernel))


@given(
    groups=st.integers(1, 3),
    channels=st.tuples(st.integers(1, 3), st.integers(1, 12)),
    kernel=st.tuples(st.integers(1, 3), st.integers(1, 3)),
    stride=st.integers(1, 3),
    padding=st.tuples(st.integers(0, 2), st.integers(0, 2)),
    dilation=st.integers(1, 2),
    size=st.tuples(st.integers(1, 6), st.integers(1, 6)),
    bias=st.booleans(),
    batch=st.integers(1, 3),
    share=st.sampled_from([0.2, 0.6]),
)
def test_any_convolution(groups, channels, kernel, stride, padding, dilation, size, bias, batch, share):
    assume(all(meets_data(*axis, stride, dilation) for axis in zip(size, kernel, padding, strict=True)))
    inputs, outputs = groups * channels[0], groups * channels[1]
    conv = nn.Conv2d(inputs, outputs, kernel, stride, padding, dilation, groups, bias)
    check(nn.Sequential(conv), data(batch, inputs, *size), share)


@given(
    inputs=st.integers(1, 9),
    outputs=st.integers(1, 9),
    positions=st.sampled_from([(), (1,), (3,), (2, 2)]),
    bias=st.booleans(),
    batch=st.integers(1, 9),
    share=st.sampled_from([0.2, 0.6]),
)
def test_any_linear_layer(inputs, outputs, positions, bias, batch, share):
    check(nn.Sequential(nn.Linear(inputs, outputs, bias)), data(batch, *positions, inputs), share)


@pytest.mark.parametrize("share", [0.2, 0.6])
@pytest.mark.parametrize(
    ("layer", "shape", "backward"),
    [
        (nn.Linear(7, 16), (7,), True),
        (nn.Linear(7, 3), (7,), False),
        (Conv3x3(5, 16), (5, 1, 1), True),
        (Conv3x3(5, 24), (5, 2, 2), True),
        (Conv3x3(5, 8), (5, 2, 2), False),
        (Conv3x3(5, 16, stride=2), (5, 2, 2), True),
        (nn.Conv2d(5, 16, 3, stride=2, padding=1), (5, 2, 2), True),
        (nn.Conv2d(4, 64, 3, padding=2, dilation=2), (4, 3, 3), True),
        (nn.Conv2d(4, 64, 3, padding=1, groups=2), (4, 2, 2), False),
        (nn.Conv2d(6, 6, 3, padding=1, groups=6), (6, 4, 4), False),
    ],
    ids=lambda value: str(value) if isinstance(value, nn.Module) else None,
)
def test_few_columns_are_projected_in_the_backward_pass_and_many_in_the_gradient(layer, shape, backward, share):
    network, x = nn.Sequential(layer), data(4, *shape)
    projection = check(network, x, share)
    assert in_backward(network, x, projection) == ({"0.weight"} if backward else set())


def test_a_gradient_is_projected_once():
    network, x = nn.Sequential(nn.Linear(7, 16)).double(), data(4, 7)
    projection = Projection(find_layers(network, (7,)), {"0": orthonormal(7, 3)}, {})
    with projection.project_in_backward(network, 4):
        result = gradients(network, x)
        again = {name: gradient.clone() for name, gradient in result.items()}
        projection.project_gradients(again)
    assert torch.equal(again["0.weight"], result["0.weight"])


def test_a_batch_smaller_or_larger_than_announced_is_projected_all_the_same():
    for batch_size in (1, 100):
        check(nn.Sequential(nn.Linear(7, 16)), data(20, 7), 0.3, batch_size)


@pytest.mark.parametrize("share", [0.2, 0.6])
def test_a_whole_resnet(share):
    network = ResNet18(ResNet18.Settings(width=4)).build((3, 32, 32))
    x = data(4, 3, 32, 32)
    projection = check(network, x, share)
    both = in_backward(network, x, projection)
    assert {"layer4.0.conv1.weight", "layer4.1.conv2.weight", "layer4.0.downsample.0.weight"} <= both
    assert "layer1.0.conv1.weight" not in both


def test_activations_in_place_before_and_after_a_layer():
    network = nn.Sequential(
        nn.Conv2d(2, 30, 3, padding=1), nn.ReLU(inplace=True), nn.Conv2d(30, 40, 2), nn.ReLU(inplace=True),
        nn.Flatten(), nn.Linear(40, 50, bias=False), nn.ReLU(inplace=True), nn.Linear(50, 3),
    )  # fmt: skip
    x = data(4, 2, 2, 2)
    projection = check(network, x, 0.4)
    assert in_backward(network, x, projection) == {"0.weight", "2.weight", "5.weight"}


def test_an_input_changed_after_the_layer_read_it_is_an_error_as_in_plain_autograd():
    network = nn.Sequential(nn.Linear(3, 9)).double()
    projection = Projection(find_layers(network, (3,)), {"0": orthonormal(3, 1)}, {})
    x = data(2, 3)
    with projection.project_in_backward(network, 2):
        loss = network(x).sum()
    x.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_a_layer_used_twice_gets_the_sum():
    shared = nn.Linear(5, 5)
    check(nn.Sequential(shared, nn.Tanh(), shared), data(3, 5), 0.4)


@pytest.mark.parametrize("batch", [8, 800])
@pytest.mark.parametrize("share", [0.2, 0.6])
def test_in_single_precision_rounding_alone_leaks_into_the_span(batch, share):
    network, x = nn.Sequential(nn.Linear(500, 600)), data(batch, 500).float()
    layers = find_layers(network, (500,))
    Phi = orthonormal(500, int(500 * share), dtype=torch.float32)
    result = projected(network, x, Projection(layers, *split_by_width({"0": Phi})), batch)["0.weight"]
    assert (result @ Phi).norm() < 1e-5 * gradients(network, x)["0.weight"].norm()
    assert result.norm() > 0.1 * gradients(network, x)["0.weight"].norm()


def test_the_gradient_of_the_input_is_autograds():
    network = nn.Sequential(Conv3x3(3, 40), nn.ReLU(inplace=True), Conv3x3(40, 40, stride=2)).double()
    layers = find_layers(network, (3, 2, 2))
    projection = Projection(layers, bases_for(layers, 0.5), {})
    of_input = []
    for batch_size in (1000, 2):
        x = data(2, 3, 2, 2).requires_grad_()
        with projection.project_in_backward(network, batch_size):
            network(x).square().sum().backward()
        of_input.append(x.grad)
    torch.testing.assert_close(*of_input, rtol=EXACT, atol=EXACT)


def test_gradients_add_up_over_backward_passes():
    network = nn.Sequential(nn.Linear(5, 8)).double()
    projection = Projection(find_layers(network, (5,)), {"0": orthonormal(5, 2)}, {})
    x = data(2, 5)
    once = projected(network, x, projection, 2)["0.weight"]
    with projection.project_in_backward(network, 2):
        network.zero_grad()
        for _ in range(2):
            network(x).square().sum().sin().backward()
    torch.testing.assert_close(network[0].weight.grad, 2 * once)


def test_frozen_layers_and_layers_without_basis_are_left_alone():
    network = nn.Sequential(nn.Linear(5, 8), nn.Linear(8, 9), nn.Linear(9, 10)).double()
    layers = find_layers(network, (5,))
    network[0].weight.requires_grad_(False)
    x = data(2, 5)
    expected = gradients(network, x)
    projection = Projection(layers, {"0": orthonormal(5, 2), "1": orthonormal(8, 0)}, {})
    result = projected(network, x, projection, 2)
    assert "0.weight" not in result
    assert result.keys() == expected.keys()
    assert all(torch.equal(result[name], expected[name]) for name in result)
    assert not network[0].weight.requires_grad


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_prediction_while_open_is_the_plain_one(mode):
    network = nn.Sequential(nn.Linear(5, 8), nn.ReLU(inplace=True), nn.Linear(8, 9)).double()
    layers, x = find_layers(network, (5,)), data(2, 5)
    with mode(), Projection(layers, bases_for(layers, 0.5), {}).project_in_backward(network, 2):
        inside = network(x)
    assert not inside.requires_grad
    assert torch.equal(inside, network(x))


def test_bases_made_in_inference_mode_serve():
    network, x = nn.Sequential(nn.Linear(5, 8), nn.Linear(8, 2)).double(), data(3, 5)
    layers = find_layers(network, (5,))
    expected = plain(layers, gradients(network, x), bases_for(layers, 0.4))
    with torch.inference_mode():
        bases = bases_for(layers, 0.4)
    assert_same(projected(network, x, Projection(layers, bases, {}), 3), expected)


def test_the_network_is_its_own_again_after_an_error():
    network = nn.Sequential(nn.Linear(5, 8)).double()
    projection = Projection(find_layers(network, (5,)), {"0": orthonormal(5, 2)}, {})
    x = data(2, 5)
    expected = gradients(network, x)
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"), projection.project_in_backward(network, 2):
        network(data(2, 6))
    assert network[0].weight.requires_grad
    assert torch.equal(gradients(network, x)["0.weight"], expected["0.weight"])
    projection.project_gradients(expected)
    np.testing.assert_allclose(expected["0.weight"] @ orthonormal(5, 2), 0, atol=1e-12)


@pytest.mark.parametrize("batch", [2, 50])
def test_a_full_basis_leaves_nothing_to_learn(batch):
    network, x = nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 9)).double(), data(batch, 5)
    layers = find_layers(network, (5,))
    bases, complements = split_by_width(bases_for(layers, 1.0))
    assert not bases
    result = projected(network, x, Projection(layers, bases, complements), batch)
    assert not result["0.weight"].any()
    assert not result["2.weight"].any()
    assert result["0.bias"].all()


@given(d=st.integers(1, 8), rank=st.integers(0, 8))
def test_split_by_width_keeps_the_narrower_of_basis_and_complement(d, rank):
    Phi = orthonormal(d, min(rank, d))
    bases, complements = split_by_width({"layer": Phi})
    assert len(bases) + len(complements) == 1
    if complements:
        Q = complements["layer"]
        assert Q.shape[1] < Phi.shape[1]
        np.testing.assert_allclose(Phi @ Phi.T + Q @ Q.T, np.eye(d), atol=1e-12)
    else:
        assert bases["layer"] is Phi
        assert 2 * Phi.shape[1] <= d


@pytest.fixture
def dead_taps():
    """A convolution whose map is 1x1: of its 9 taps only the centre sees data; its input space has 6 dimensions."""
    network = nn.Sequential(Conv3x3(6, 4), nn.Flatten(), nn.Linear(4, 3)).double()
    return network, find_layers(network, (6, 1, 1))


@pytest.mark.parametrize("rank", [2, 5])
def test_the_protected_part_is_what_the_weight_does_on_the_span(dead_taps, rank):
    network, layers = dead_taps
    Phi = orthonormal(6, rank)
    projection = Projection(layers, *split_by_width({"0": Phi}))
    weights = dict(network.state_dict())
    parts = projection.compute_protected_part(weights)
    assert parts.keys() == {"0.weight"}
    C, W = parts["0.weight"], weights["0.weight"]
    np.testing.assert_allclose(C[:, :, 1, 1], W[:, :, 1, 1].numpy() @ Phi.numpy() @ Phi.numpy().T, atol=1e-12)
    C[:, :, 1, 1] = 0
    assert not C.any()


@pytest.mark.parametrize("rank", [2, 5])
def test_whole_steps_are_projected_where_data_are_seen(dead_taps, rank):
    network, layers = dead_taps
    Phi = orthonormal(6, rank)
    bases, complements = split_by_width({"0": Phi})
    steps = {name: data(*value.shape, seed=7) for name, value in network.state_dict().items()}
    before = {name: step.clone() for name, step in steps.items()}
    result = Projection(layers, bases, complements).project_steps(steps)
    centre = before["0.weight"][:, :, 1, 1].numpy()
    np.testing.assert_allclose(
        result["0.weight"][:, :, 1, 1], centre - centre @ Phi.numpy() @ Phi.numpy().T, atol=1e-12
    )
    assert all(torch.equal(steps[name], before[name]) for name in before)
    result["0.weight"][:, :, 1, 1] = before["0.weight"][:, :, 1, 1]
    assert torch.equal(result["0.weight"], before["0.weight"])
    assert all(result[name] is steps[name] for name in steps if name != "0.weight")


@pytest.mark.parametrize("batch", [2, 30])
def test_with_momentum_and_decay_of_the_free_part_a_weight_does_not_move_on_the_span(batch):
    network = nn.Sequential(Conv3x3(3, 10), nn.ReLU(inplace=True), nn.Flatten(), nn.Linear(40, 5)).double()
    layers = find_layers(network, (3, 2, 2))
    bases = bases_for(layers, 0.5)
    projection, decay = Projection(layers, bases, {}), 0.1
    optimiser = torch.optim.SGD(network.parameters(), 0.05, momentum=0.9, weight_decay=decay)
    start = {name: value.clone() for name, value in network.state_dict().items()}
    protected = projection.compute_protected_part(start)
    with projection.project_in_backward(network, batch):
        for step in range(20):
            optimiser.zero_grad()
            network(data(batch, 3, 2, 2, seed=step)).sub(1).square().mean().backward()
            result = {name: p.grad for name, p in network.named_parameters()}
            projection.project_gradients(result)
            for name, C in protected.items():
                result[name].sub_(C, alpha=decay)
            optimiser.step()
    for name, Phi in bases.items():
        weight = layers[name].weight
        moved = (network.state_dict()[weight] - start[weight]).flatten(1)
        assert moved.norm() > 0.01 * start[weight].norm()
        np.testing.assert_allclose(moved @ Phi, 0, atol=EXACT * start[weight].norm())


def test_a_gradient_is_clear_of_the_span_in_lower_precision_too():
    network, basis = torch.nn.Sequential(torch.nn.Linear(12, 40)), orthonormal(12, 4).float()
    projection = Projection(find_layers(network, (12,)), {"0": basis}, {})
    with projection.project_in_backward(network, 5), torch.autocast("cpu", torch.bfloat16):
        loss = network(torch.randn(5, 12)).square().sum()
    loss.backward()
    gradient = network[0].weight.grad
    assert (gradient @ basis).norm() < 1e-5 * gradient.norm()
