"""The Gaussian mechanism: norms, noise in the sum, and an epsilon that SciPy's own integrals confirm."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis.strategies import floats, integers
from opacus.accountants import PRVAccountant, RDPAccountant
from scipy import integrate, stats

from fclmodels.numerics.gaussian_mechanism import clip_norm, compute_epsilon, draw_noise, remove_noise


@given(bound=floats(1e-3, 1e3), scale=floats(1e-6, 1e6), seed=integers(0, 99))
def test_clipping_shortens_and_does_not_turn(bound: float, scale: float, seed: int) -> None:
    X = scale * torch.randn(5, 3, generator=torch.Generator().manual_seed(seed))
    Y = clip_norm(X, bound)
    norm = float(np.linalg.norm(X.numpy().astype(np.float64)))
    assert np.linalg.norm(Y.numpy().astype(np.float64)) <= bound * (1 + 1e-6)
    if norm < bound * (1 - 1e-6):
        assert torch.equal(X, Y)
    np.testing.assert_allclose(Y * norm, X * min(norm, bound), rtol=1e-5)


def test_clipping_zeros_gives_zeros() -> None:
    assert torch.equal(clip_norm(torch.zeros(4, 2), 1.0), torch.zeros(4, 2))


def test_noise_has_the_deviation_that_is_asked_for() -> None:
    """Each of the two bounds leaves one correct run in 30,000 out."""
    drawn = draw_noise(torch.zeros(100, 400), 3.0, torch.Generator().manual_seed(0)).double().flatten()
    n = drawn.numel()
    assert abs(float(drawn.mean())) < 4.2 * 3.0 / math.sqrt(n)
    assert float(drawn.var()) / 9 == pytest.approx(1, abs=4.2 * math.sqrt(2 / n))
    assert stats.kstest(drawn.numpy() / 3.0, "norm").pvalue > 1e-4


@pytest.mark.parametrize("shape", [(6, 40), (40, 6), (8, 8)])
def test_what_is_left_without_noise_is_the_energy_that_was_there(shape: tuple[int, int]) -> None:
    """On the average over noises. The weakest signal is above what noise can reach, so that nothing is cut off at 0."""
    random, deviation, runs = np.random.default_rng(0), 5.0, 400
    k = min(shape)
    U, V = (np.linalg.qr(random.normal(size=(d, k)))[0] for d in shape)
    A = (U * np.linspace(60, 90, k)) @ V.T
    left = []
    for _ in range(runs):
        noisy = torch.from_numpy(A + deviation * random.normal(size=shape))
        left.append(float(remove_noise(torch.linalg.svdvals(noisy), shape, deviation).square().sum()))
    standard_error = np.std(left) / math.sqrt(runs)
    assert np.mean(left) == pytest.approx((A**2).sum(), abs=4 * standard_error)
    assert 4 * standard_error < 0.5 * math.prod(shape) * deviation**2


def test_what_noise_outweighs_is_nothing() -> None:
    """20 - 16, 18 - 16 and 14 - 16 make 4 together, which the first of them has."""
    sigma = torch.tensor([20.0, 18.0, 14.0]).sqrt()
    assert remove_noise(sigma, (3, 4), 2.0).tolist() == pytest.approx([2, 0, 0])
    assert remove_noise(sigma, (3, 4), 3.0).tolist() == [0, 0, 0]


def test_noise_alone_leaves_next_to_nothing() -> None:
    """Though it gives about a half of all singular values more than their share."""
    noise = torch.randn(100, 300, generator=torch.Generator().manual_seed(0))
    left = remove_noise(torch.linalg.svdvals(noise), (100, 300), 1.0)
    assert int((left > 0).sum()) <= 2


def composed(kind: type, noise_multiplier: float, sample_rate: float, steps: int, delta: float = 1e-5) -> float:
    accountant = kind()
    for _ in range(steps):
        accountant.step(noise_multiplier=noise_multiplier, sample_rate=sample_rate)
    return float(accountant.get_epsilon(delta))


@pytest.mark.parametrize(("z", "releases"), [(4.0, 12), (1.0, 1), (20.0, 800)])
def test_without_sampling_it_is_renyis_bound_by_hand(z: float, releases: int) -> None:
    """Of order a a Gaussian has the divergence a / (2 z^2), which adds up over releases; the bound of Canonne et al.
    2020, proposition 12, over the orders that opacus looks at."""
    orders = np.array(RDPAccountant.DEFAULT_ALPHAS)
    divergence = releases * orders / (2 * z**2)
    bounds = divergence + np.log((orders - 1) / orders) - (np.log(1e-5) + np.log(orders)) / (orders - 1)
    assert compute_epsilon(z, 1.0, releases, 1e-5) == pytest.approx(bounds.min(), rel=1e-9)


def exact_delta(epsilon: float, z: float, q: float) -> float:
    """Of one release, both for a client that is added and for one that is removed: N(0, z^2), and with the client
    N(1, z^2) with probability q."""
    without, joined = stats.norm(0, z), stats.norm(1, z)
    x = np.linspace(-12 * z, 1 + 12 * z, 100_001)
    mixture = (1 - q) * without.pdf(x) + q * joined.pdf(x)
    both = [(mixture, without.pdf(x)), (without.pdf(x), mixture)]
    return max(integrate.trapezoid((p - math.exp(epsilon) * other).clip(0), x) for p, other in both)


@pytest.mark.parametrize(("z", "q"), [(1.6, 0.1), (0.8, 0.3), (1.6, 1.0)])
def test_epsilon_is_one_that_holds(z: float, q: float) -> None:
    """And is not far too large: SciPy integrates the privacy loss of one release."""
    epsilon = compute_epsilon(z, q, 1, 1e-5)
    assert exact_delta(epsilon, z, q) <= 1e-5
    assert exact_delta(epsilon / 1.6, z, q) > 1e-5


def test_the_tighter_accountant_is_not_far_below() -> None:
    epsilon = compute_epsilon(1.6, 0.5, 2, 1e-5)
    tight = composed(PRVAccountant, 1.6, 0.5, 2)
    assert tight < epsilon < 1.25 * tight


@settings(max_examples=25, deadline=None)
@given(z=floats(0.5, 8), releases=integers(1, 40))
def test_more_releases_cost_more_and_more_noise_less(z: float, releases: int) -> None:
    epsilon = compute_epsilon(z, 1.0, releases, 1e-5)
    assert epsilon < compute_epsilon(z, 1.0, releases + 1, 1e-5)
    assert epsilon > compute_epsilon(1.1 * z, 1.0, releases, 1e-5)


def test_a_smaller_sample_costs_less() -> None:
    epsilon = [compute_epsilon(1.6, q, 2, 1e-5) for q in (0.05, 0.2, 0.6, 1.0)]
    assert epsilon == sorted(epsilon)
    assert epsilon[0] < epsilon[-1] / 5


def test_what_releases_nothing_costs_nothing() -> None:
    assert compute_epsilon(1.0, 1.0, 0, 1e-5) == 0
