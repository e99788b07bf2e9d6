"""Grouped convolutions: a basis a group, against NumPy and against a dense convolution with diagonal blocks."""

from collections.abc import Callable

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional as F

from fclmodels.backbones.inputs.gradient_projection import Projection, ProtectedGroups, project_update, split_by_width
from fclmodels.backbones.inputs.layer_capture import Layer, find_layers, observe_inputs
from fclmodels.backbones.inputs.layer_inputs import LayerInputs
from fclmodels.data.batches import Batch
from fclmodels.federation.monitors.used_share import measure_used_shares
from fclmodels.methods.fedprotip import FedProTIP
from fclmodels.methods.fot import Fot
from fclmodels.methods.gpm import Gpm
from fclmodels.methods.parts.input_grams import sum_inputs
from fclmodels.methods.regmean import RegMean
from fclmodels.methods.rgo_approx import RgoApprox

GEOMETRY = {"kernel_size": 3, "padding": 1, "bias": False}
MOBILE = (
    *("model.backbone=mobilenet-v2", "model.width=0.05", "model.stride=8", "model.norm=group"),
    *("federation.rounds=1", "optimizer.lr=0.05"),
)


class Alone(nn.Module):
    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.backbone = nn.Sequential(module)

    def forward(self, x: Tensor) -> Tensor:
        return self.backbone(x)


def draw(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def observe(network: Alone, x: Tensor) -> tuple[dict[str, Layer], dict[str, LayerInputs]]:
    layers = find_layers(network, tuple(x.shape[1:]))
    return layers, observe_inputs(network, layers, x.split(2), len(x), None, torch.Generator().manual_seed(0))


def to_dense(conv: nn.Conv2d) -> nn.Conv2d:
    """The convolution without groups that computes the same: blocks on its diagonal, zeros elsewhere."""
    dense = nn.Conv2d(conv.in_channels, conv.out_channels, **GEOMETRY).double()
    nn.init.zeros_(dense.weight)
    channels, filters = conv.in_channels // conv.groups, conv.out_channels // conv.groups
    with torch.no_grad():
        for group, W in enumerate(conv.weight.chunk(conv.groups)):
            dense.weight[group * filters : (group + 1) * filters, group * channels : (group + 1) * channels] = W
    return dense


@given(
    groups=st.integers(2, 4),
    channels=st.tuples(st.integers(1, 2), st.integers(1, 2)),
    ranks=st.lists(st.integers(0, 9), min_size=4, max_size=4),
    seed=st.integers(0, 99),
)
def test_a_projected_step_is_the_block_diagonal_of_the_dense_convolutions(
    groups: int, channels: tuple[int, int], ranks: list[int], seed: int
) -> None:
    """The dense one is projected by its own code on the basis diag(O_1, .., O_G), of the whole space C_in k k."""
    conv = nn.Conv2d(groups * channels[0], groups * channels[1], groups=groups, **GEOMETRY).double()
    x = draw(2, groups * channels[0], 4, 4, seed=seed)
    grouped, dense = Alone(conv), Alone(to_dense(conv))
    torch.testing.assert_close(grouped(x), dense(x))
    layers = find_layers(grouped, tuple(x.shape[1:]))
    d = 9 * channels[0]
    bases = {
        name: torch.linalg.qr(draw(d, d, seed=seed + place)).Q[:, : ranks[place]].contiguous()
        for place, name in enumerate(layers)
    }
    steps = {}
    for network in (grouped, dense):
        network(x).square().sum().sin().backward()
        steps[network] = {"backbone.0.weight": network.get_parameter("backbone.0.weight").grad}
    own = project_update(steps[grouped], layers, *split_by_width(bases))["backbone.0.weight"]
    whole = {"backbone.0": torch.block_diag(*bases.values())}
    theirs = project_update(steps[dense], find_layers(dense, tuple(x.shape[1:])), *split_by_width(whole))
    for group, block in enumerate(own.chunk(groups)):
        rows = theirs["backbone.0.weight"].chunk(groups)[group]
        torch.testing.assert_close(block, rows.chunk(groups, dim=1)[group])


def test_each_group_has_the_directions_and_energies_of_its_own_channels() -> None:
    """By NumPy: the SVD of patches of its channels alone, cut out one by one."""
    x = draw(5, 6, 5, 5)
    layers, inputs = observe(Alone(nn.Conv2d(6, 9, groups=3, **GEOMETRY).double()), x)
    assert [(layer.name, layer.width, layer.outputs) for layer in layers.values()] == [
        (f"backbone.0[{group}]", 18, 3) for group in range(3)
    ]
    padded = F.pad(x, (1, 1, 1, 1)).numpy()
    for group, X in enumerate(inputs.values()):
        patches = [
            padded[b, 2 * group : 2 * group + 2, i : i + 3, j : j + 3].ravel()
            for b in range(5)
            for i in range(5)
            for j in range(5)
        ]
        theirs, lengths, _ = np.linalg.svd(np.array(patches).T, full_matrices=False)
        U, sigma = X.decompose_principal(torch.zeros(18, 0, dtype=torch.float64))
        np.testing.assert_allclose(sigma, lengths, rtol=1e-6)
        np.testing.assert_allclose(U @ U.T, theirs @ theirs.T, atol=1e-8)
        assert X.measure_energy() == pytest.approx((lengths**2).sum())


def test_a_projected_step_leaves_the_outputs_of_what_was_seen() -> None:
    """Of a depthwise convolution whose channels see spaces of different size; the whole step would change them."""
    conv = nn.Conv2d(4, 8, groups=4, **GEOMETRY).double()
    x = draw(1, 4, 1, 6, seed=3).expand(3, 4, 5, 6) * torch.tensor([0.0, 1.0, 2.0, 0.5]).view(4, 1, 1)
    layers, inputs = observe(Alone(conv), x)
    empty = torch.zeros(9, 0, dtype=torch.float64)
    bases = {}
    for name, X in inputs.items():
        U, sigma = X.decompose_principal(empty)
        bases[name] = U[:, : int((sigma > 0).sum())]
    assert len({basis.shape[1] for basis in bases.values()}) == 2  # of the channel that is 0: none
    step = draw(8, 1, 3, 3, seed=4)
    projected = project_update({"backbone.0.weight": step}, layers, *split_by_width(bases))["backbone.0.weight"]
    options = {"padding": 1, "groups": 4}
    assert F.conv2d(x, projected, **options).abs().max() < 1e-9
    assert F.conv2d(x, step, **options).abs().max() > 0.1
    assert projected.abs().sum() > 0.1


def test_memory_is_bounded_by_half_of_what_matrices_of_the_groups_are() -> None:
    """Bases of groups differ in width; M is as wide as the widest, at most d/2, and no d x d matrix is made."""
    layers = find_layers(Alone(nn.Conv2d(12, 12, groups=12, **GEOMETRY).double()), (12, 4, 4))
    for most in (1, 3, 9):
        bases = {n: torch.eye(9, dtype=torch.float64)[:, : i % (most + 1)] for i, n in enumerate(layers)}
        (span,) = Projection(layers, *split_by_width(bases)).protected.values()
        assert isinstance(span, ProtectedGroups)
        assert span.columns.shape == (12, 9, min(most, 4))
    nothing = {n: torch.zeros(9, 0, dtype=torch.float64) for n in layers}
    assert not Projection(layers, *split_by_width(nothing)).protected


@pytest.mark.parametrize("kind", [Fot, FedProTIP])
def test_methods_keep_what_each_channel_saw(kind: type, method_of: Callable, federate: Callable) -> None:
    """On a MobileNetV2 in two tasks: a basis for each channel, and the second task moves nothing on any of them."""
    method = method_of(kind, *MOBILE, patches=64, protect=("stages.1",), threshold_by="fixed")
    first, second = federate(method, tasks=1), federate(method, tasks=2)
    bases = first.knowledge["bases"]
    layers = find_layers(method.networks.build(method.run.make_spec(1)), method.run.splits.shape)
    depthwise = {name: layer for name, layer in layers.items() if layer.groups > 1}
    depthwise = {name: layer for name, layer in depthwise.items() if name.startswith("backbone.stages.1.")}
    assert len(depthwise) == 8
    assert depthwise.keys() <= bases.keys()
    assert sum(bases[name].shape[1] for name in depthwise) > 8
    moved = 0.0
    for name, layer in depthwise.items():
        step = layer.to_matrix(second.weights[layer.weight] - first.weights[layer.weight])
        assert float((step @ bases[name]).norm()) < 1e-5
        moved += float(step.norm())
    assert moved > 1e-3


def test_a_layers_used_share_is_that_of_all_its_groups(method_of: Callable) -> None:
    """Of ranks 1 and 3 of 4 and of 2 of 8: a half and a quarter; groups count as one layer, in what is said, too."""
    ranks = {"backbone.a[0]": (4, [1]), "backbone.a[1]": (4, [3]), "backbone.b": (8, [2])}
    bases = {name: torch.zeros(d, of_tasks[-1]) for name, (d, of_tasks) in ranks.items()}
    shares = {row["layer"]: row["value"] for row in measure_used_shares(bases, 0).iter_rows(named=True)}
    assert shares == {"backbone.a": 0.5, "backbone.b": 0.25, None: 0.375}
    full = {f"backbone.a[{group}]": (4, [4]) for group in range(3)} | {"backbone.b": (8, [0]), "backbone.c": (8, [8])}
    knowledge = {
        "bases": {name: torch.zeros(d, of_tasks[-1]) for name, (d, of_tasks) in full.items()},
        "ranks": {name: of_tasks for name, (_, of_tasks) in full.items()},
    }
    (line,) = method_of(Fot).subspace.list_remarks(knowledge)
    assert line.startswith("after task 1 the bases fill 2 of 3 protected layers")


@pytest.mark.slow
@pytest.mark.parametrize("kind", [Gpm, RegMean, RgoApprox])
def test_other_methods_of_layer_inputs_learn_with_groups(kind: type, method_of: Callable, federate: Callable) -> None:
    weights = federate(method_of(kind, *MOBILE), tasks=2).weights
    assert all(tensor.isfinite().all() for tensor in weights.values())


def test_sums_of_inputs_are_of_each_groups_own() -> None:
    """What RegMean weighs by: x x^T of a group's patches, against autograd's unfolding of its channels."""
    conv = nn.Conv2d(6, 6, groups=3, **GEOMETRY).double()
    network, x = Alone(conv), draw(4, 6, 5, 5)
    network.compute_logits = lambda features: features  # type: ignore[assignment]
    layers = find_layers(network, (6, 5, 5))
    batches = [Batch(part, torch.zeros(2), torch.zeros(2)) for part in x.split(2)]
    widths = {name: layer.width for name, layer in layers.items()}
    grams = sum_inputs(network, batches, widths, diagonal=["backbone.0[1]"], convolutions=layers)
    for group, part in enumerate(x.chunk(3, dim=1)):
        X = F.unfold(part, 3, padding=1).transpose(0, 1).flatten(1)
        expected = (X @ X.T).diagonal() if group == 1 else X @ X.T
        torch.testing.assert_close(grams[f"backbone.0[{group}]"], expected)
