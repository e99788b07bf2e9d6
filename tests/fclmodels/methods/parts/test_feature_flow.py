"""The flow on features: AF-FCL's release, a coupling by hand, its inverse, its density in NumPy."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from fclmodels.methods.parts.feature_flow import Coupling, FeatureFlow, weigh_by_density

# Of nflows in AF-FCL's release (5 features, 3 classes, width 4, float64) with the numbers below as parameters.
ORDERS = ((4, 3, 2, 1, 0), (4, 3, 2, 1, 0), (2, 0, 4, 1, 3), (1, 4, 0, 3, 2))
H, CLASSES = ((0.4, -1, 0, 2, 0.3), (1, 0.5, -0.2, 0, 0.1)), (2, 0)
LATENTS = (
    (1.9171738561029494, 3.316905564485547, 1.1764494187050267, -7.4121961864890356, 3.581796027423704),
    (1.439112031415819, 1.8323527674120028, 1.0686107942207048, -4.364959533339778, 3.0500830668800836),
)
LOG_DENSITY = (-54.209122522341396, -27.294037420904218)
NOISE = ((0.1, -0.2, 0.3, 0.4, -0.5), (1, 0, -1, 0.5, 0.2))
INVERSE = (
    (3.1819030869747342, 0.008208491678530426, 2.1901873347763288, -2.833386927201176, -9.412930916053693),
    (4.286365393905399, 2.4595686741010696, -9.772535158122945, -0.6542855334347248, -13.954662297529001),
)


def double(values: tuple) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float64)


@pytest.fixture(scope="module")
def flow() -> FeatureFlow:
    flow = FeatureFlow(5, 4, 3).double()
    for k, parameter in enumerate(flow.parameters()):
        numbers = torch.arange(parameter.numel(), dtype=torch.float64)
        parameter.data = 0.5 * torch.sin(0.7 * numbers + k).view_as(parameter)
    for coupling, order in zip(flow.couplings, ORDERS, strict=True):
        coupling.order.copy_(torch.tensor(order))
    return flow


def test_the_flow_is_the_releases(flow: FeatureFlow) -> None:
    latents, log_density = flow(double(H), torch.tensor(CLASSES))
    torch.testing.assert_close(latents, double(LATENTS), rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(log_density, double(LOG_DENSITY), rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(flow.invert(double(NOISE), torch.tensor(CLASSES)), double(INVERSE), rtol=1e-12, atol=0)


def test_one_coupling_by_hand() -> None:
    """x = (.4, -1), shift .5, a = .3."""
    flow = FeatureFlow(2, 3, 1).double()
    coupling = Coupling(torch.arange(2), 3, 1).double()
    nn.init.zeros_(coupling.leave.weight)
    coupling.leave.bias.data = double((0.5, 0.3))
    flow.couplings = nn.ModuleList([coupling])
    latents, log_density = flow(double(((0.4, -1.0),)), torch.tensor([0]))
    assert latents[0].tolist() == pytest.approx([0.4, -0.409877], abs=1e-6)
    assert log_density.item() == pytest.approx(-2.096322, abs=1e-6)
    assert (log_density / 2).exp().item() == pytest.approx(0.350582, abs=1e-6)


@given(st.integers(0, 2**32 - 1), st.integers(2, 7), st.integers(1, 4))
def test_the_inverse_undoes_the_flow(seed: int, features: int, classes: int) -> None:
    torch.manual_seed(seed)
    flow = FeatureFlow(features, 6, classes).double()
    h, of = torch.randn(5, features, dtype=torch.float64), torch.randint(classes, (5,))
    torch.testing.assert_close(flow.invert(flow(h, of)[0], of), h, rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(flow(flow.invert(h, of), of)[0], h, rtol=1e-9, atol=1e-9)


def test_the_density_is_that_of_the_latents_and_the_jacobian(flow: FeatureFlow) -> None:
    for h, of, log_density in zip(H, CLASSES, LOG_DENSITY, strict=True):
        jacobian = torch.autograd.functional.jacobian(
            lambda x, of=of: flow(x[None], torch.tensor([of]))[0][0], double(h)
        )
        z = flow(double((h,)), torch.tensor([of]))[0][0].detach().numpy()
        normal = -0.5 * (z @ z) - 2.5 * math.log(2 * math.pi)
        assert normal + np.linalg.slogdet(jacobian.numpy())[1] == pytest.approx(log_density, rel=1e-12)


def test_a_draw_is_the_features_of_its_latents() -> None:
    torch.manual_seed(0)
    flow, of = FeatureFlow(4, 8, 2), torch.tensor([0, 1, 1])
    h, z = flow.draw(of)
    torch.testing.assert_close(flow(h, of)[0], z, rtol=1e-4, atol=1e-4)
    assert not h.requires_grad


def test_credibility_by_hand() -> None:
    """Latents of one class, and draws at their mean in part; a class with fewer samples gets the batch's density."""
    present = torch.tensor([[0.0, 1], [2, 1], [1, 4], [5, 5]])
    drawn = torch.tensor([[1.0, 2], [2, 0], [5, 5], [0, 0]])
    weights = weigh_by_density(
        drawn, torch.tensor([0, 0, 1, 2]), present, torch.tensor([0, 0, 0, 1]), torch.tensor(0.2)
    )
    assert weights.tolist() == pytest.approx([0.385349, 0.167288, 0.2, 0.2], abs=1e-6)


def test_of_a_single_sample_the_release_makes_nothing_credible() -> None:
    present, drawn = torch.tensor([[5.0, 5]]), torch.tensor([[5.1, 4.9]])
    label = torch.tensor([1])
    assert weigh_by_density(drawn, label, present, label, torch.tensor(0.2), least=1).item() == 0
