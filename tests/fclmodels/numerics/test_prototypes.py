"""Prototypes: moments that NumPy finds in the pooled data, vectors that have what their kind says, and noise."""

import math
from functools import reduce

import numpy as np
import pytest
import torch
from hypothesis import example, given
from hypothesis.strategies import floats, integers
from numpy.testing import assert_allclose
from scipy import stats

from fclmodels.numerics.gaussian_mechanism import draw_noise
from fclmodels.numerics.prototypes import (
    BOUND,
    Augmentation,
    Gaussians,
    Moments,
    carry_over,
    clip_rows,
    count_balanced,
    draw_vectors,
    fit_gaussians,
    from_units,
    moments,
    to_units,
    weigh,
)


def seeded(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def added(several: list[Moments]) -> Moments:
    return reduce(lambda a, b: {name: a[name] + b[name] for name in a}, several)


@given(n=integers(0, 40), parts=integers(1, 6), scale=floats(1e-3, 1e3), seed=integers(0, 999))
@example(n=0, parts=2, scale=1.0, seed=0)
def test_added_over_any_split_they_are_those_of_the_pooled_data(n: int, parts: int, scale: float, seed: int) -> None:
    random, C = np.random.default_rng(seed), 5
    X = (scale * (random.normal(size=(n, 3)) + random.normal(size=3))).astype(np.float32)
    y, owner = random.integers(0, C, n), random.integers(0, parts, n)
    each = [moments(torch.from_numpy(X[owner == p]), torch.from_numpy(y[owner == p]), C) for p in range(parts)]
    result = fit_gaussians(added(each))
    assert result.present.tolist() == [c in y for c in range(C)]
    assert torch.isfinite(result.mu).all()
    assert (result.sigma2 >= 0).all()
    for c in set(y.tolist()):
        pooled = X[y == c].astype(np.float64)
        assert_allclose(result.mu[c], pooled.mean(0), rtol=1e-6, atol=1e-6 * scale)
        assert_allclose(result.sigma2[c], pooled.var(0), rtol=1e-6, atol=1e-6 * scale**2)


def test_by_hand() -> None:
    """Class 0: (1, 2) and (3, 2). Class 2: (5, 0) alone. Class 1 has none."""
    total = moments(torch.tensor([[1.0, 2], [5, 0], [3, 2]]), torch.tensor([0, 2, 0]), 3)
    assert {name: value.tolist() for name, value in total.items()} == {
        "weight": [2, 0, 1],
        "sum": [[4, 4], [0, 0], [5, 0]],
        "square": [[10, 8], [0, 0], [25, 0]],
    }
    assert all(value.dtype == torch.float64 for value in total.values())
    mu, sigma2, present = fit_gaussians(total)
    assert mu.tolist() == [[2, 2], [0, 0], [5, 0]]
    assert sigma2.tolist() == [[1, 0], [0, 0], [0, 0]]
    assert present.tolist() == [True, False, True]


@pytest.mark.parametrize(("n", "error"), [(100, 1e-4), (10_000, 1e-3)])
def test_a_variance_survives_a_mean_of_1e5_deviations(n: int, error: float) -> None:
    """Ten times what the docstring promises: 1e-16 sqrt(n) 1e10 are 1e-5 and 1e-4."""
    X = 1e3 + 1e-2 * np.random.default_rng(0).normal(size=(n, 20))
    labels = torch.zeros(100, dtype=torch.long)
    total = added([moments(batch, labels, 1) for batch in torch.from_numpy(X).split(100)])
    assert_allclose(fit_gaussians(total).sigma2[0], X.var(0), rtol=error)


@given(value=floats(-1e6, 1e6, width=32), n=integers(1, 50), w=floats(1, 1e5))
def test_equal_samples_have_no_variance(value: float, n: int, w: float) -> None:
    """What is left is rounding, and it never falls below 0; of one sample nothing is left."""
    total = moments(torch.full((n, 1), value), torch.zeros(n, dtype=torch.long), 1)
    for each in (total, weigh(total, w)):
        assert 0 <= fit_gaussians(each).sigma2.item() <= 1e-13 * value**2
    if n == 1:
        assert fit_gaussians(total).sigma2.item() == 0


def test_the_papers_weights_are_equations_14_and_15() -> None:
    """As printed, class by class, over clients that lack some classes."""
    random, C, rho, classes = np.random.default_rng(1), 4, [3, 1, 2], [(0, 1), (1, 2), (1, 0)]
    data = [
        (random.normal(size=(n, 2)), random.choice(labels, n)) for n, labels in zip([9, 30, 14], classes, strict=True)
    ]
    omega = [r * len(y) for r, (_, y) in zip(rho, data, strict=True)]
    counted = [moments(torch.from_numpy(X), torch.from_numpy(y), C) for X, y in data]
    result = fit_gaussians(added([weigh(m, w) for m, w in zip(counted, omega, strict=True)]))
    for c in range(3):
        here = [(w, X[y == c]) for w, (X, y) in zip(omega, data, strict=True) if c in y]
        total = sum(w for w, _ in here)
        mu = sum(w * Z.mean(0) for w, Z in here) / total
        assert_allclose(result.mu[c], mu)
        second = sum(w * (Z.mean(0) ** 2 + Z.var(0)) for w, Z in here) / total
        assert_allclose(result.sigma2[c], second - mu**2)
    assert result.present.tolist() == [True, True, True, False]
    assert not torch.allclose(result.mu, fit_gaussians(added(counted)).mu, atol=1e-3)


def test_a_class_that_nobody_holds_keeps_its_prototype() -> None:
    old = Gaussians(torch.tensor([[1.0], [2], [0]]), torch.tensor([[4.0], [5], [0]]), torch.tensor([True, True, False]))
    new = Gaussians(
        torch.tensor([[7.0], [0], [0]]), torch.tensor([[8.0], [0], [0]]), torch.tensor([True, False, False])
    )
    mu, sigma2, present = carry_over(old, new)
    assert (mu.tolist(), sigma2.tolist()) == ([[7], [2], [0]], [[8], [5], [0]])
    assert present.tolist() == [True, True, False]


MU, SIGMA2 = torch.tensor([[3.0, -1.0], [0.0, 10.0]]), torch.tensor([[4.0, 0.25], [9.0, 0.0]])
DRAWN = 20_000


def test_normal_ones_are_normal() -> None:
    """Kolmogorov and Smirnov leave one correct run in 10,000 out for each of three numbers."""
    vectors = draw_vectors(MU, SIGMA2, DRAWN, "normal", seeded())
    for c, f in [(0, 0), (0, 1), (1, 0)]:
        deviation = SIGMA2[c, f].sqrt()
        assert stats.kstest(((vectors[c, :, f] - MU[c, f]) / deviation).numpy(), "norm").pvalue > 1e-4
    assert (vectors[1, :, 1] == 10).all()
    together = torch.cat([vectors[0], vectors[1, :, :1]], dim=1)
    assert_allclose(np.corrcoef(together.numpy().T), np.eye(3), atol=4.2 / math.sqrt(DRAWN))


def test_the_papers_lie_between_mu_and_mu_plus_sigma() -> None:
    """The first is mu; the others have the mean mu + sigma/2 and the deviation sigma/sqrt(12)."""
    vectors, sigma = draw_vectors(MU, SIGMA2, DRAWN + 1, "paper", seeded()), SIGMA2.sqrt()
    assert torch.equal(vectors[:, 0], MU)
    drawn = vectors[:, 1:].double()
    assert_allclose(drawn.mean(1), MU + sigma / 2, atol=4.2 * 3 / math.sqrt(12 * DRAWN))
    assert_allclose(drawn.std(1), sigma / math.sqrt(12), rtol=0.03)
    beta = (vectors[0, 1:] - MU[0]) / sigma[0]
    assert_allclose(beta[:, 0], beta[:, 1], atol=1e-5)
    other = (vectors[1, 1:, 0] - MU[1, 0]) / sigma[1, 0]
    assert abs(np.corrcoef(beta[:, 0].numpy(), other.numpy())[0, 1]) < 4.2 / math.sqrt(DRAWN)


def test_the_releases_are_three() -> None:
    vectors = draw_vectors(MU, SIGMA2, 7, "release", seeded())
    shift = vectors[:, 1] - MU
    assert_allclose(vectors, torch.stack([MU, MU + shift, MU - shift] * 2 + [MU], dim=1), atol=1e-5)
    many = draw_vectors(torch.zeros(DRAWN, 2), torch.tensor([[4.0, 0.5]]).expand(DRAWN, 2), 2, "release", seeded())
    uniform = many[:, 1] * 3 / torch.tensor([16.0, 0.25])
    for f in range(2):
        assert stats.kstest(uniform[:, f].numpy(), "uniform").pvalue > 1e-4
    assert abs(np.corrcoef(uniform.numpy().T)[0, 1]) < 4.2 / math.sqrt(DRAWN)


@pytest.mark.parametrize("kind", ["normal", "paper", "release"])
def test_a_generator_decides_and_nothing_is_drawn_for_nothing(kind: Augmentation) -> None:
    first, again, other = (draw_vectors(MU, SIGMA2, 5, kind, seeded(seed)) for seed in (1, 1, 2))
    assert torch.equal(first, again)
    assert not torch.equal(first, other)
    assert draw_vectors(MU[:0], SIGMA2[:0], 5, kind, seeded()).shape == (0, 5, 2)
    assert draw_vectors(MU, SIGMA2, 0, kind, seeded()).shape == (2, 0, 2)


def test_a_missing_class_gets_as_many_as_an_own_one_has() -> None:
    assert [count_balanced(24, own) for own in (1, 3, 5, 24)] == [24, 8, 5, 1]
    assert count_balanced(2, 9) == 1


@given(bound=floats(1e-2, 1e2), scale=floats(1e-2, 1e3), seed=integers(0, 999), n=integers(0, 9))
def test_no_client_is_longer_than_the_bound(bound: float, scale: float, seed: int, n: int) -> None:
    """Whatever its samples, and however many."""
    X = scale * torch.randn(n, 4, generator=seeded(seed))
    short = clip_rows(X, bound)
    inside = X.norm(dim=1) < bound * (1 - 1e-6)
    assert torch.equal(short[inside], X[inside].double())
    scaled = to_units(moments(short, torch.arange(n) % 3, 3), bound)
    assert math.sqrt(sum(float(value.square().sum()) for value in scaled.values())) <= BOUND * (1 + 1e-9)


def test_samples_along_an_axis_attain_the_bound() -> None:
    scaled = to_units(moments(clip_rows(torch.tensor([[0.0, 9.0]] * 5), 2.0), torch.zeros(5, dtype=torch.long), 1), 2.0)
    assert [float(value.abs().max()) for value in scaled.values()] == pytest.approx([1, 1, 1])
    assert math.sqrt(sum(float(value.square().sum()) for value in scaled.values())) == pytest.approx(BOUND)


def test_units_leave_the_gaussians_of_clients_of_one_size_as_they_were() -> None:
    X, labels = torch.randn(40, 3, generator=seeded()), torch.arange(40) % 4
    clients = [moments(X[i::8], labels[i::8], 4) for i in range(8)]
    total = from_units(added([to_units(each, 10.0) for each in clients]), 10.0, noise=0.0)
    for result, expected in zip(fit_gaussians(total), fit_gaussians(added(clients)), strict=True):
        assert_allclose(result, expected, rtol=1e-9)


def test_what_noise_makes_impossible_is_mended() -> None:
    """A weight that may well be noise, a mean longer than any feature, squares below 0 and above all features'."""
    total = {
        "weight": torch.tensor([-3.0, 1.5, 1.6]),
        "sum": torch.tensor([[1.0, 0], [1, 0], [3, 4]]),
        "square": torch.tensor([[1.0, 1], [1, 1], [-1, 9]]),
    }
    mended = from_units(total, 2.0, noise=0.5)
    assert mended["weight"].tolist() == pytest.approx([0, 0, 1.6])
    assert_allclose(mended["sum"], [[0, 0], [0, 0], [1.6 * 2 * 0.6, 1.6 * 2 * 0.8]], rtol=1e-6)
    assert_allclose(mended["square"], [[0, 0], [0, 0], [0, 1.6 * 4]], rtol=1e-6)
    assert fit_gaussians(mended).present.tolist() == [False, False, True]


def test_a_class_that_nobody_holds_is_hardly_ever_known_under_noise() -> None:
    """Three deviations: one in 740, and of 20,000 classes fewer than 60 but for one run in 10,000."""
    nothing = moments(torch.zeros(0, 1), torch.zeros(0, dtype=torch.long), 20_000)
    random = seeded()
    total = {name: value + draw_noise(value, 0.7, random) for name, value in nothing.items()}
    assert 5 < int(fit_gaussians(from_units(total, 2.0, noise=0.7)).present.sum()) < 60
