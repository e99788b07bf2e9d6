"""Columns against nn.Unfold and the layers' own outputs; a stream of batches against the whole matrix."""

import numpy as np
import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from numpy.testing import assert_allclose
from torch import nn

from fclmodels.backbones.inputs import layer_capture, layer_inputs
from fclmodels.backbones.inputs.layer_capture import find_layers, observe_inputs
from fclmodels.backbones.inputs.layer_inputs import LayerInputs
from fclmodels.backbones.model.network import build_skeleton
from fclmodels.backbones.model.spec import ModelSpec
from fclmodels.errors import UserError
from fclmodels.numerics.products import STEP
from fclmodels.numerics.subspace import rank_by_energy, rank_by_mass

SEEDS = st.integers(0, 10**6)


def random(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def data(*shape: int, seed: int = 1, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    return torch.randn(*shape, generator=random(seed), dtype=dtype)


def network_of(shape=(1, 8, 8), tasks=((0, 1),), head="growing", **settings) -> nn.Module:
    return build_skeleton(ModelSpec({"backbone": "cnn", "width": 3, "features": 7} | settings, shape, head, tasks))


class Alone(nn.Module):
    """A network of one backbone and no heads."""

    def __init__(self, *modules: nn.Module) -> None:
        super().__init__()
        self.backbone = nn.Sequential(*modules)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.backbone(x)


def alone(module: nn.Module, *shape: int) -> layer_capture.Layer:
    """The layer, or of a grouped convolution its last group."""
    return list(find_layers(Alone(module), shape).values())[-1]


def columns_of(observed: LayerInputs) -> torch.Tensor:
    """The columns, without those of zeros that fill them up."""
    assert observed.columns is not None
    assert observed.columns.shape[1] % STEP == 0
    assert not observed.columns[:, observed.count :].any()
    return observed.columns[:, : observed.count]


# Columns of one layer.


@st.composite
def convolutions(draw: st.DrawFn) -> tuple[nn.Conv2d, tuple[int, int, int]]:
    """Any geometry, depthwise and grouped too, and the shape of an input that it can take."""
    groups, channels = draw(st.integers(1, 3)), draw(st.integers(1, 3))
    outputs = groups * draw(st.integers(1, 2))
    sizes = {name: (draw(st.integers(1, most)), draw(st.integers(1, most))) for name, most in
             {"kernel_size": 4, "stride": 3, "dilation": 3, "input": 7}.items()}  # fmt: skip
    padding = (draw(st.integers(0, 3)), draw(st.integers(0, 3)))
    sides = sizes.pop("input")
    for i in range(2):
        reach = sizes["dilation"][i] * (sizes["kernel_size"][i] - 1) + 1
        assume(reach <= sides[i] + 2 * padding[i])
    conv = nn.Conv2d(groups * channels, outputs, padding=padding, groups=groups, bias=False, **sizes).double()
    return conv, (groups * channels, *sides)


def unfolded(conv: nn.Conv2d, x: torch.Tensor) -> torch.Tensor:
    """By nn.Unfold, all taps of the last group: [d, B, positions]."""
    unfold = nn.Unfold(conv.kernel_size, conv.dilation, conv.padding, conv.stride)
    return unfold(x.chunk(conv.groups, dim=1)[-1]).transpose(0, 1)


@given(drawn=convolutions(), batch=st.integers(1, 3), last=st.booleans())
def test_columns_are_those_of_unfold(drawn, batch, last):
    conv, shape = drawn
    layer = alone(conv, *shape)
    x = data(batch, *shape)
    x = x.contiguous(memory_format=torch.channels_last) if last else x[:, :, :, :]
    every = unfolded(conv, x)
    taps = layer.select_taps(torch.arange(conv.weight[0].numel()).view(1, *conv.weight.shape[1:])).flatten()
    assert layer.width == len(taps)
    assert layer.columns_per_sample == every[0, 0].numel()
    assert layer.count_columns(x) == every[0].numel()
    assert torch.equal(layer.unfold(x), every[taps].flatten(1))


@given(drawn=convolutions())
def test_live_taps_are_the_least_rectangle_of_those_that_can_see_data(drawn):
    conv, shape = drawn
    layer = alone(conv, *shape)
    observed = unfolded(conv, torch.ones(1, *shape, dtype=torch.float64)).any(dim=(1, 2)).view(conv.weight.shape[1:])
    live = torch.zeros_like(conv.weight)
    layer.select_live(live).fill_(1)
    assume(observed.any())
    rows, columns = observed[0].any(dim=1).nonzero(), observed[0].any(dim=0).nonzero()
    expected = torch.zeros_like(observed)
    expected[:, rows.min() : rows.max() + 1, columns.min() : columns.max() + 1] = True
    assert all(torch.equal(of_filter.bool(), expected) for of_filter in live[-layer.outputs :])
    assert not live[: -layer.outputs].any()


@pytest.mark.parametrize(
    ("kernel", "stride", "padding", "side", "live"),
    [
        (3, 1, 1, 1, [1]), (3, 2, 1, 1, [1]), (3, 2, 1, 2, [1, 2]), (3, 1, 1, 2, [0, 1, 2]), (7, 2, 3, 1, [3]),
        (7, 2, 3, 4, [1, 2, 3, 4, 5, 6]), (1, 2, 0, 2, [0]), (5, 1, 2, 2, [1, 2, 3]),
    ],
)  # fmt: skip
def test_live_taps_of_known_layers(kernel, stride, padding, side, live):
    layer = alone(nn.Conv2d(2, 3, kernel, stride, padding), 2, side, side)
    taps = torch.arange(kernel).view(1, 1, -1, 1).expand(3, 2, kernel, kernel)
    assert layer.select_live(taps)[0, 0, :, 0].tolist() == live
    assert layer.width == 2 * len(live) ** 2


@given(drawn=convolutions(), batch=st.integers(1, 3))
def test_the_weight_times_the_columns_is_the_output(drawn, batch):
    conv, shape = drawn
    x = data(batch, *shape)
    layers = find_layers(Alone(conv), shape)
    assert len(layers) == conv.groups
    for layer, right in zip(layers.values(), conv(x).chunk(conv.groups, 1), strict=True):
        columns = layer.unfold(x).view(layer.width, batch, -1)
        result = torch.einsum("od,dbp->bop", layer.to_matrix(conv.weight), columns).view_as(right)
        assert_allclose(result.detach(), right.detach(), atol=1e-12)


@given(drawn=convolutions(), batch=st.integers(1, 3), seed=SEEDS)
def test_columns_at_places(drawn, batch, seed):
    conv, shape = drawn
    layer = alone(conv, *shape)
    x = data(batch, *shape)
    places = torch.randint(layer.count_columns(x), (9,), generator=random(seed))
    assert torch.equal(layer.unfold_at(x, places), layer.unfold(x)[:, places])


@pytest.mark.parametrize("shape", [(5,), (3, 5), (2, 3, 5)])
def test_a_linear_layers_columns_are_its_vectors(shape):
    linear = nn.Linear(5, 4, bias=False).double()
    layer = alone(linear, *shape)
    x = data(6, *shape)
    assert layer.width == 5
    assert layer.count_columns(x) == 6 * layer.columns_per_sample == x.numel() // 5
    columns = layer.unfold(x)
    assert_allclose(
        (layer.to_matrix(linear.weight) @ columns).T.detach(), linear(x).flatten(0, -2).detach(), atol=1e-12
    )
    places = torch.tensor([4, 0, 4])
    assert torch.equal(layer.unfold_at(x, places), columns[:, places])


def test_tokens_that_are_flattened_into_the_batch():
    network = Alone(nn.Flatten(0, 1), nn.Linear(5, 4)).double()
    layers = find_layers(network, (3, 5))
    x = data(7, 3, 5)
    observed = observe_inputs(network, layers, x.split(2), 7, None, random())["backbone.1"]
    assert observed.count == observed.total == 21
    assert_allclose(observed.gram, torch.einsum("bti,btj->ij", x, x), atol=1e-12)


def test_live_is_a_view_and_matrix_has_its_order():
    layer = alone(nn.Conv2d(2, 3, 3, padding=1), 2, 1, 2)
    weight = torch.arange(54.0).view(3, 2, 3, 3)
    assert layer.to_matrix(weight).shape == (3, layer.width)
    assert layer.to_matrix(weight)[0].tolist() == [3.0, 4.0, 5.0, 12.0, 13.0, 14.0]
    layer.select_live(weight).zero_()
    assert weight[:, :, 1].count_nonzero() == 0
    assert weight[:, :, 0].count_nonzero() == 17


@pytest.mark.parametrize("padding", [{"padding": 1, "padding_mode": "reflect"}, {"padding": "same"}])
def test_paddings_that_are_not_unfolded_are_refused(padding):
    with pytest.raises(UserError, match=r"backbone\.0: padding .* is not unfolded"):
        alone(nn.Conv2d(1, 1, 3, **padding), 1, 4, 4)


# Layers of networks.


def test_layers_come_by_name_in_the_order_of_their_use():
    network = network_of(tasks=((0, 1), (2,)), head="per-task")
    layers = find_layers(network, (1, 8, 8))
    assert list(layers) == ["backbone.conv1", "backbone.conv2", "backbone.fc1", "heads.0", "heads.1"]
    assert [layer.width for layer in layers.values()] == [9, 27, 24, 7, 7]
    assert [layer.columns_per_sample for layer in layers.values()] == [64, 16, 1, 1, 1]
    for name, layer in layers.items():
        assert layer.name == name
        assert network.get_parameter(layer.weight) is layer.module.weight


def test_finding_and_observing_leave_the_network_as_it_was():
    network = build_skeleton(ModelSpec({"backbone": "resnet18", "width": 2}, (1, 33, 33), "growing", ((0, 1),)))
    network.backbone.layer1.eval()
    modes = [module.training for module in network.modules()]
    before = {name: value.clone() for name, value in network.state_dict().items()}
    layers = find_layers(network, (1, 33, 33))
    assert len(layers) == 21
    observe_inputs(network, layers, data(4, 1, 33, 33, dtype=torch.float32).split(2), 4, 5, random())
    assert [module.training for module in network.modules()] == modes
    assert all(torch.equal(value, before[name]) for name, value in network.state_dict().items())
    assert not any(module._forward_pre_hooks for module in network.modules())


def test_hooks_and_modes_are_restored_after_an_error():
    network = network_of()
    with pytest.raises(RuntimeError):
        find_layers(network, (2, 8, 8))
    assert all(module.training for module in network.modules())
    assert not any(module._forward_pre_hooks for module in network.modules())


def test_a_layer_that_works_twice_is_refused():
    shared = nn.Linear(5, 5)
    network = Alone(shared, nn.Tanh(), shared)
    for columns in (None, 3):
        with pytest.raises(UserError, match=r"backbone\.0 saw 8 columns of 4\."):
            observe_inputs(network, find_layers(network, (5,)), [torch.ones(4, 5)], 4, columns, random())


# Streams.


def everything(network: nn.Module, layers: dict, x: torch.Tensor) -> dict[str, np.ndarray]:
    """All columns of each layer's input, in double precision, at once."""
    result: dict[str, np.ndarray] = {}
    handles = [
        layer.module.register_forward_pre_hook(
            lambda _, inputs, name=name, layer=layer: result.update(
                {name: layer.unfold(inputs[0]).double().numpy().copy()}
            )
        )
        for name, layer in layers.items()
    ]
    with torch.no_grad():
        network.eval()(x)
    for handle in handles:
        handle.remove()
    return result


def orthonormal(d: int, r: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.linalg.qr(torch.randn(d, d, generator=random(d), dtype=torch.float64)).Q[:, :r].to(dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("samples", [1, 5, 40])
@pytest.mark.parametrize("share", [0.0, 0.4, 1.0])
@pytest.mark.parametrize("column_limit", [0, 200])
def test_a_stream_is_the_whole_matrix(monkeypatch, dtype, samples, share, column_limit):
    monkeypatch.setattr(layer_capture, "CHUNK", 3000)
    monkeypatch.setattr(layer_inputs, "LUMP", 128)
    tolerance = 1e-5 if dtype == torch.float32 else 1e-12
    network = network_of().to(dtype)
    layers = find_layers(network, (1, 8, 8))
    x = data(samples, 1, 8, 8, dtype=dtype)
    whole = everything(network, layers, x)
    inputs = observe_inputs(network, layers, x.split(7), samples, None, random(), column_limit)
    assert list(inputs) == list(layers)
    for name, observed in inputs.items():
        X, d = whole[name], layers[name].width
        Phi = orthonormal(d, round(share * d), dtype)
        outside = X - Phi.double().numpy() @ (Phi.double().numpy().T @ X)
        energy = (X**2).sum()
        assert observed.count == observed.total == X.shape[1]
        if observed.columns is not None:
            assert X.shape[1] < 2 * d or X.shape[1] <= column_limit
            assert_allclose(columns_of(observed), X, atol=1e-6)
        else:
            assert X.shape[1] >= 2 * d
            assert X.shape[1] > column_limit
            assert observed.gram.dtype == torch.float64
            assert_allclose(observed.gram, X @ X.T, atol=tolerance * energy)
        assert observed.measure_energy() == pytest.approx(energy, rel=tolerance)
        assert observed.measure_energy(Phi) == pytest.approx((outside**2).sum(), rel=tolerance, abs=tolerance * energy)
        U, sigma = observed.decompose_principal(Phi)
        expected = np.linalg.svd(outside, compute_uv=False)
        # A Gram matrix of float32 products knows singular values to the root of its rounding.
        assert_allclose(sigma[: len(expected)], expected, atol=5e-4 * energy**0.5)
        assert_allclose(sigma[len(expected) :], 0, atol=1e-4 * expected[0])
        parts = (U * sigma).double().numpy()
        assert_allclose(parts @ parts.T, outside @ outside.T, atol=3 * tolerance * energy)
        if share < 1:
            q = observed.measure_energy(Phi) / observed.measure_energy()
            exact = torch.from_numpy(expected)
            assert rank_by_energy(sigma, q, 0.95) == rank_by_energy(exact, (outside**2).sum() / energy, 0.95)
            assert rank_by_mass(sigma, 0.8) == rank_by_mass(exact, 0.8)
        else:
            assert not sigma.any()
            assert rank_by_mass(sigma, 0.8) == 0


def test_what_lies_in_the_span_adds_no_rank():
    """Rounding leaves a residual of full rank, most of whose mass eq. 8 would keep."""
    network = Alone(nn.Linear(30, 2))
    layers = find_layers(network, (30,))
    Phi = orthonormal(30, 10, torch.float32)
    for samples in (50, 5000):
        x = data(samples, 10, dtype=torch.float32) @ Phi.T
        observed = observe_inputs(network, layers, x.split(100), samples, None, random())["backbone.0"]
        assert observed.measure_energy(Phi) < 1e-6 * observed.measure_energy()
        assert rank_by_mass(observed.decompose_principal(Phi)[1], 0.9) == 0
        fewer = Phi[:, :9].contiguous()
        assert rank_by_mass(observed.decompose_principal(fewer)[1], 0.999) == 1


def test_a_layer_that_sees_only_zeros():
    network = Alone(nn.Linear(4, 2))
    layers = find_layers(network, (4,))
    for samples in (3, 3000):
        observed = observe_inputs(network, layers, [torch.zeros(samples, 4)], samples, None, random())["backbone.0"]
        Phi = torch.zeros(4, 0)
        assert observed.measure_energy() == observed.measure_energy(Phi) == 0
        assert not observed.draw_sketch(Phi, 6, random()).any()
        assert rank_by_mass(observed.decompose_principal(Phi)[1], 0.9) == 0


def test_inputs_that_are_later_overwritten_in_place():
    network = Alone(nn.Linear(5, 6), nn.ReLU(inplace=True), nn.Linear(6, 7), nn.ReLU(inplace=True)).double()
    network.backbone.insert(0, nn.ReLU(inplace=True))
    layers = find_layers(network, (5,))
    x = data(4, 5)
    observed = observe_inputs(network, layers, [x.clone()], 4, None, random())
    first = x.relu()
    assert_allclose(columns_of(observed["backbone.1"]), first.T)
    assert_allclose(columns_of(observed["backbone.3"]), network.backbone[1](first).relu().detach().T)


def test_the_heads_input_are_the_features():
    network = network_of(tasks=((0, 1), (2,)), head="per-task").double()
    layers = {name: layer for name, layer in find_layers(network, (1, 8, 8)).items() if name.startswith("heads.")}
    x = data(5, 1, 8, 8)
    observed = observe_inputs(network, layers, x.split(2), 5, None, random())
    assert list(observed) == ["heads.0", "heads.1"]
    for name in observed:
        assert_allclose(columns_of(observed[name]), network.eval().backbone(x).detach().T)


def test_evaluation_mode_is_what_is_observed():
    network = Alone(nn.Dropout(0.5), nn.Linear(6, 2))
    x = torch.ones(3, 6)
    network.train()
    observed = observe_inputs(network, find_layers(network, (6,)), [x], 3, None, random())
    assert torch.equal(columns_of(observed["backbone.1"]), x.T)


# Sampling.


@given(samples=st.integers(1, 12), columns=st.integers(1, 200), batch=st.integers(1, 5), seed=SEEDS)
@settings(max_examples=40)
def test_at_most_so_many_distinct_columns_of_those_there_are(samples, columns, batch, seed):
    network = network_of().double()
    layers = find_layers(network, (1, 8, 8))
    x = data(samples, 1, 8, 8)
    whole = everything(network, layers, x)
    for name, observed in observe_inputs(network, layers, x.split(batch), samples, columns, random(seed)).items():
        X, d = whole[name], layers[name].width
        assert observed.total == X.shape[1]
        assert observed.count == min(columns, X.shape[1])
        if observed.count >= 2 * d:
            assert observed.columns is None
            assert observed.gram.shape == (d, d)
            continue
        assert observed.gram is None
        assert columns_of(observed).shape == (d, observed.count)
        of_whole, times = np.unique(X.T.round(9), axis=0, return_counts=True)
        left = dict(zip(map(tuple, of_whole), times, strict=True))
        for column in map(tuple, columns_of(observed).numpy().T.round(9)):
            left[column] -= 1
        assert min(left.values()) >= 0


def test_the_places_are_the_generators_and_do_not_depend_on_the_batches():
    network, x = network_of().double(), data(9, 1, 8, 8)
    layers = find_layers(network, (1, 8, 8))
    one, same, other = (
        columns_of(observe_inputs(network, layers, x.split(batch), 9, 10, random(seed))["backbone.conv2"])
        for batch, seed in ((9, 0), (2, 0), (9, 1))
    )
    assert_allclose(one, same, atol=1e-12)
    assert not torch.allclose(one, other)


@pytest.mark.parametrize("columns", [6, 60])
def test_samples_stand_for_all_columns_without_bias(columns):
    """Energies and sketches over many draws of the places: their mean is that of all columns."""
    network = Alone(nn.Conv2d(2, 1, 2)).double()
    layers = find_layers(network, (2, 5, 5))
    # Samples of very unequal energy.
    x = data(20, 2, 5, 5) * torch.arange(1.0, 21).view(-1, 1, 1, 1)
    X = everything(network, layers, x)["backbone.0"]
    Phi = orthonormal(8, 3, torch.float64)
    outside = X - Phi.numpy() @ (Phi.numpy().T @ X)
    draws = [observe_inputs(network, layers, x.split(6), 20, columns, random(i))["backbone.0"] for i in range(300)]
    assert {(draw.count, draw.total, draw.columns is None) for draw in draws} == {(columns, 320, columns >= 16)}
    for basis, Y in ((None, X), (Phi, outside)):
        energies = np.array([observed.measure_energy(basis) for observed in draws])
        assert abs(energies.mean() - (Y**2).sum()) < 4 * energies.std() / 300**0.5
        assert energies.std() > 0
    sketches = [observed.draw_sketch(Phi, 40, random(i)).numpy() for i, observed in enumerate(draws)]
    covariances = np.array([Y @ Y.T / 40 for Y in sketches])
    error = covariances.std(axis=0) / 300**0.5
    assert (np.abs(covariances.mean(axis=0) - outside @ outside.T) < 4.5 * error).all()


def test_every_column_is_as_likely():
    network = Alone(nn.Linear(1, 1)).double()
    x = torch.arange(1.0, 13, dtype=torch.float64).view(12, 1)
    counts = np.zeros(13)
    for seed in range(600):
        observed = observe_inputs(network, find_layers(network, (1,)), x.split(5), 12, 1, random(seed))["backbone.0"]
        counts[int(columns_of(observed).item())] += 1
    assert counts[0] == 0
    # 600 draws of 12: each count has mean 50 and a standard deviation below 7.
    assert np.abs(counts[1:] - 50).max() < 28


def test_a_layer_wider_than_all_samples_keeps_columns_not_a_gram_matrix():
    network = Alone(nn.Linear(3000, 2))
    x = data(3, 3000, dtype=torch.float32)
    observed = observe_inputs(network, find_layers(network, (3000,)), x.split(1), 3, 4096, random())["backbone.0"]
    assert observed.gram is None
    assert torch.equal(columns_of(observed), x.T)
    U, sigma = observed.decompose_principal(torch.zeros(3000, 0))
    assert U.shape == (3000, 3)
    assert_allclose(sigma, np.linalg.svd(x.numpy(), compute_uv=False), rtol=1e-5)


@pytest.mark.parametrize("samples", [4, 400])
def test_a_layers_sketch_has_the_law_of_its_residual(samples):
    network = Alone(nn.Linear(6, 2)).double()
    x = data(samples, 6) * torch.arange(1.0, 7)
    observed = observe_inputs(network, find_layers(network, (6,)), x.split(50), samples, None, random())["backbone.0"]
    assert (observed.columns is None) == (samples == 400)
    Phi = orthonormal(6, 2, torch.float64)
    outside = x.T - Phi @ (Phi.T @ x.T)
    Y, covariance = observed.draw_sketch(Phi, 40_000, random()), outside @ outside.T
    assert_allclose(Y @ Y.T / 40_000, covariance, atol=0.04 * float(covariance.diagonal().max()))
