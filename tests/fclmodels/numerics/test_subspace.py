"""Bases, spans and ranks against NumPy's and SciPy's; ranks against counting one by one."""

from functools import reduce

import numpy as np
import pytest
import scipy.linalg
import torch
from hypothesis import assume, given
from hypothesis import strategies as st
from numpy.testing import assert_allclose

from fclmodels.numerics.subspace import (
    complement,
    extend,
    principal,
    principal_of_gram,
    project,
    rank_as_printed,
    rank_as_released,
    rank_by_energy,
    rank_by_mass,
    residual,
    union,
    used_share,
)

DTYPES = (torch.float32, torch.float64)
ROUNDING = {torch.float32: 3e-6, torch.float64: 1e-13}
SEEDS = st.integers(0, 10**6)
SCALES = st.sampled_from([1e-25, 1e-6, 1.0, 1e6, 1e25])


def normal(seed: int, *shape: int) -> np.ndarray:
    return np.random.default_rng([seed, *shape]).standard_normal(shape)


def orthonormal(seed: int, d: int, r: int) -> np.ndarray:
    return np.linalg.qr(normal(seed, d, d))[0][:, :r]


def projector(basis: torch.Tensor | np.ndarray) -> np.ndarray:
    Phi = np.asarray(basis, float)
    return Phi @ Phi.T


def deviation(basis: torch.Tensor) -> float:
    """|Phi^T Phi - I| as the norm of an operator."""
    Phi = basis.double().numpy()
    return float(np.linalg.norm(Phi.T @ Phi - np.eye(Phi.shape[1]), 2)) if Phi.shape[1] else 0.0


@st.composite
def bases(draw: st.DrawFn) -> tuple[np.ndarray, int]:
    """An orthonormal basis [d, r], r from 0 to d, and a seed for what else is drawn."""
    d, seed = draw(st.integers(1, 12)), draw(SEEDS)
    return orthonormal(seed, d, draw(st.integers(0, d))), seed


@given(drawn=bases(), n=st.integers(0, 20), scale=SCALES, dtype=st.sampled_from(DTYPES))
def test_a_residual_is_what_lies_outside_the_span(drawn, n, scale, dtype):
    Phi, seed = drawn
    X = scale * normal(seed, len(Phi), n)
    result = residual(torch.from_numpy(X).to(dtype), torch.from_numpy(Phi).to(dtype)).double().numpy()
    assert_allclose(result, X - Phi @ (Phi.T @ X), atol=10 * scale * ROUNDING[dtype])
    assert_allclose(Phi.T @ result, 0, atol=10 * scale * ROUNDING[dtype])


@given(drawn=bases(), outputs=st.integers(1, 5))
def test_a_projected_step_does_not_act_on_the_span(drawn, outputs):
    Phi, seed = drawn
    step = torch.from_numpy(normal(seed, outputs, len(Phi)))
    result = project(step, torch.from_numpy(Phi))
    assert_allclose(result @ torch.from_numpy(Phi), 0, atol=1e-13)
    outside = scipy.linalg.null_space(Phi.T) if Phi.shape[1] else np.eye(len(Phi))
    assert_allclose(result.numpy() @ outside, step.numpy() @ outside, atol=1e-13)


@given(drawn=bases(), dtype=st.sampled_from(DTYPES))
def test_a_basis_and_its_complement_fill_the_space(drawn, dtype):
    Phi, _ = drawn
    inside = torch.from_numpy(Phi).to(dtype)
    rest = complement(inside)
    assert rest.dtype == dtype
    assert rest.is_contiguous()
    assert rest.shape == (len(Phi), len(Phi) - Phi.shape[1])
    whole = torch.cat([inside, rest], dim=1).double().numpy()
    assert_allclose(whole @ whole.T, np.eye(len(Phi)), atol=ROUNDING[dtype])


# Bases that grow.


@st.composite
def directions(draw: st.DrawFn) -> tuple[np.ndarray, np.ndarray]:
    """A basis, and directions: new ones, some of the span, repeated ones and zeros, in any order."""
    Phi, seed = draw(bases())
    d, r = Phi.shape
    fresh = normal(seed + 1, d, draw(st.integers(0, d + 2)))
    inside = Phi @ normal(seed + 2, r, draw(st.integers(0, 3)))
    together = np.concatenate([fresh, inside, 2 * fresh[:, :2], np.zeros((d, draw(st.integers(0, 1))))], axis=1)
    return Phi, together[:, np.random.default_rng(seed).permutation(together.shape[1])]


@given(drawn=directions(), scale=SCALES, dtype=st.sampled_from(DTYPES))
def test_extending_spans_both_and_no_more(drawn, scale, dtype):
    Phi, D = drawn
    basis = torch.from_numpy(Phi).to(dtype)
    result = extend(basis, torch.from_numpy(scale * D).to(dtype))
    expected = np.concatenate([Phi, D], axis=1)
    assume(not any(1e-6 < s < 1e-3 for s in np.linalg.svd(expected - projector(Phi) @ expected, compute_uv=False)))
    assert result.dtype == dtype
    assert torch.equal(result[:, : Phi.shape[1]], basis)
    assert deviation(result) < ROUNDING[dtype]
    assert_allclose(projector(result), projector(scipy.linalg.orth(expected, rcond=1e-6)), atol=3e3 * ROUNDING[dtype])


@pytest.mark.parametrize("d", [30, 300])
@pytest.mark.parametrize("new", ["random", "nearly known"])
def test_fifty_tasks_leave_a_basis_orthonormal_and_old_columns_as_they_were(d, new):
    basis, sizes = torch.zeros(d, 0), []
    for task in range(50):
        D = normal(task, d, 12)
        if new == "nearly known":
            D = projector(basis) @ D + 1e-2 * D
        before, basis = basis, extend(basis, torch.from_numpy(D).float())
        assert torch.equal(basis[:, : before.shape[1]], before)
        sizes.append(basis.shape[1])
    assert sizes == [min(12 * (task + 1), d) for task in range(50)]
    assert deviation(basis) < 1e-6


def test_directions_within_rounding_of_the_span_add_nothing():
    Phi = torch.from_numpy(orthonormal(0, 200, 80)).float()
    inside = Phi @ torch.from_numpy(normal(1, 80, 40)).float()
    assert extend(Phi, inside).shape == (200, 80)


def test_what_is_new_of_a_direction_may_be_little_of_it():
    inside = torch.from_numpy(orthonormal(0, 60, 20)).float()
    D = inside @ torch.from_numpy(normal(1, 20, 6)).float() + 1e-3 * torch.from_numpy(normal(2, 60, 6)).float()
    result = extend(inside, D * torch.tensor([1, 1, 0.5, 0.5, 0.2, 0.2]))
    expected = scipy.linalg.orth(np.concatenate([inside.double(), D.double()], axis=1), rcond=1e-12)
    assert_allclose(projector(result), projector(expected), atol=5e-6)


def test_most_of_all_directions_are_kept_where_room_is_short():
    Phi, rest = torch.eye(5)[:, :3], torch.diag(torch.tensor([9.0, 9, 9, 1, 2]))
    more = torch.cat([rest, rest], dim=1)
    assert extend(Phi, more).shape == (5, 5)
    assert_allclose(projector(extend(torch.eye(5)[:, :4], more)), np.eye(5), atol=1e-7)
    assert extend(torch.eye(5), more).shape == (5, 5)


@given(st.integers(1, 9), st.lists(st.integers(0, 4), min_size=1, max_size=5), SEEDS, st.randoms())
def test_a_union_spans_all_bases_in_whatever_order(d, ranks, seed, order):
    """FedProTIP's Proposition 1; the second basis lies in the first one's span."""
    parts = [orthonormal(seed + i, d, min(r, d)) for i, r in enumerate(ranks)]
    if len(parts) > 1:
        parts[1] = parts[0][:, ::2] if parts[0].shape[1] else parts[1]
    clients = [torch.from_numpy(part) for part in parts]
    nothing = {"layer": clients[0][:, :0], "other": clients[0]}

    def of_all(clients: list[torch.Tensor]) -> torch.Tensor:
        bases = reduce(union, [{"layer": part} for part in clients], nothing)
        assert bases["other"] is nothing["other"]
        return bases["layer"]

    result = of_all(clients)
    assert_allclose(projector(result), projector(scipy.linalg.orth(np.concatenate(parts, 1), rcond=1e-6)), atol=1e-8)
    for part in clients:
        assert_allclose(residual(part, result), 0, atol=1e-8)
    shuffled = order.sample(clients, len(clients))
    assert_allclose(projector(of_all(shuffled)), projector(result), atol=1e-8)


# Singular pairs.


def of_spectrum(sigma: np.ndarray, d: int, n: int, seed: int = 0) -> np.ndarray:
    k = len(sigma)
    return (orthonormal(seed, d, k) * sigma) @ orthonormal(seed + 1, n, k).T


def check_pairs(X: np.ndarray, dtype: torch.dtype, atol: float) -> None:
    U, sigma = principal(torch.from_numpy(X).to(dtype))
    assert U.dtype == sigma.dtype == dtype
    assert U.shape == (len(X), min(X.shape))
    expected = np.linalg.svd(X, compute_uv=False)
    largest = expected[0] if expected.size else 0.0
    assert_allclose(sigma, expected, atol=atol * largest)
    assert (sigma.diff() <= 0).all()
    U, sigma = U.double(), sigma.double()
    assert_allclose((U * sigma**2) @ U.T, X @ X.T, atol=10 * ROUNDING[dtype] * largest**2)


@given(d=st.integers(1, 12), n=st.integers(1, 30), rank=st.integers(0, 12), scale=SCALES, seed=SEEDS)
def test_singular_pairs_are_numpys(d, n, rank, scale, seed):
    X = scale * normal(seed, d, rank) @ normal(seed + 1, rank, n)
    check_pairs(X, torch.float64, 1e-13)
    check_pairs(X.astype(np.float32).astype(float), torch.float32, 2e-4)


@pytest.mark.parametrize(("d", "n"), [(7, 7), (7, 40), (40, 7)])
def test_equal_singular_values(d, n):
    for sigma in (np.ones(7), np.array([3.0, 3, 3, 1, 1, 1, 0])):
        check_pairs(of_spectrum(sigma, d, n), torch.float64, 1e-13)
        check_pairs(of_spectrum(sigma, d, n).astype(np.float32).astype(float), torch.float32, 1e-5)


@pytest.mark.parametrize(("d", "n"), [(120, 150), (150, 120)])
@pytest.mark.parametrize("sigma", [100 * np.arange(1, 121) ** -2.0, np.r_[1000, np.arange(1, 120) ** -1.5]])
def test_steep_spectra_have_numpys_rank_by_mass(d, n, sigma):
    """Values of a thousandth of the largest and less: their squares are rounding in float32."""
    X = of_spectrum(sigma, d, n).astype(np.float32)
    _, result = principal(torch.from_numpy(X))
    exact = torch.from_numpy(np.linalg.svd(X.astype(float), compute_uv=False))
    for share in (0.7, 0.9, 0.95, 0.99):
        assert rank_by_mass(result, share) == rank_by_mass(exact, share)


@pytest.mark.parametrize("shape", [(4, 6), (6, 4), (5, 0), (3, 1)])
def test_nothing_has_no_length(shape):
    U, sigma = principal(torch.zeros(shape))
    assert_allclose(U.T @ U, np.eye(min(shape)))
    assert sigma.tolist() == [0.0] * min(shape)


@given(d=st.integers(1, 9), n=st.integers(1, 20), seed=SEEDS)
def test_pairs_of_a_gram_matrix(d, n, seed):
    X = normal(seed, d, n)
    U, sigma = principal_of_gram(torch.from_numpy(X @ X.T))
    expected = np.zeros(d)
    expected[: min(d, n)] = np.linalg.svd(X, compute_uv=False)
    assert_allclose(sigma, expected, atol=1e-6)
    assert_allclose((U * sigma**2) @ U.T, X @ X.T, atol=1e-12)


# Ranks.

SPECTRA = st.lists(st.integers(0, 50), min_size=0, max_size=12).map(lambda values: sorted(values, reverse=True))
SHARES = st.integers(1, 64).map(lambda i: i / 64)


def first(count: int, enough) -> int:
    return next((r for r in range(count + 1) if enough(r)), count)


@given(values=SPECTRA, share=SHARES)
def test_residual_mass_counts_one_by_one(values, share):
    expected = first(len(values), lambda r: sum(values[:r]) >= share * sum(values))
    assert rank_by_mass(torch.tensor(values, dtype=torch.float32), share) == expected


@given(values=SPECTRA, q=st.integers(0, 64).map(lambda i: i / 64), threshold=SHARES)
def test_total_energy_counts_one_by_one(values, q, threshold):
    energy = [value**2 for value in values]

    def enough(r: int) -> bool:
        # (1 - q) + q e_r / e >= threshold without a division
        return q * sum(energy[:r]) >= (threshold - (1 - q)) * sum(energy)

    sigma = torch.tensor(values, dtype=torch.float32)
    assert rank_by_energy(sigma, q, threshold) == first(len(values), enough)


def test_the_rules_add_nothing_where_nothing_is_missing():
    sigma = torch.tensor([2.0, 1.0])
    assert rank_by_energy(sigma, q=0.05, threshold=0.95) == 0
    assert rank_by_energy(sigma, q=0.0, threshold=1.0) == 0
    assert rank_by_mass(torch.zeros(4), 0.9) == 0
    assert rank_by_mass(torch.zeros(0), 0.9) == 0


def test_a_threshold_of_one_takes_every_direction_but_not_zeros():
    sigma = torch.tensor([3.0, 1.0, 1e-3, 0.0])
    assert rank_by_mass(sigma, 1.0) == 3
    assert rank_by_energy(sigma, 1.0, 1.0) == 3


@given(values=SPECTRA, ratio=st.integers(1, 64).map(lambda i: i / 64), threshold=SHARES)
def test_the_release_always_adds_a_vector(values, ratio, threshold):
    assume(sum(values) > 0)
    energy = np.array(values, float) ** 2
    cumulative = energy.cumsum() / energy.sum()
    target = (ratio - (1 - threshold)) / ratio
    assume(all(abs(share - target) > 1e-9 for share in cumulative))
    above = np.flatnonzero(cumulative > target)
    expected = int(above[0]) + 1 if len(above) else len(values)
    assert rank_as_released(torch.tensor(values, dtype=torch.float32), ratio, threshold) == expected >= 1


def test_the_release_adds_nothing_of_a_layer_that_sees_nothing():
    assert rank_as_released(torch.zeros(5), 0.0, 0.9) == 0
    assert rank_as_released(torch.zeros(5), 1.0, 0.9) == 0


def published_gpm(inside: np.ndarray, X: np.ndarray, threshold: float) -> np.ndarray:
    """GPM's criterion (Saha et al. 2021, eq. 5 and 9): the memory after a task whose inputs are X."""
    covered = np.linalg.norm(inside.T @ X) ** 2
    U, sigma, _ = np.linalg.svd(X - inside @ (inside.T @ X), full_matrices=False)
    rank = 0
    while covered < threshold * np.linalg.norm(X) ** 2:
        covered += sigma[rank] ** 2
        rank += 1
    return np.concatenate([inside, U[:, :rank]], axis=1)


@pytest.mark.parametrize("seed", range(5))
def test_total_energy_of_one_client_is_gpms_published_criterion(seed):
    memory, basis = np.zeros((20, 0)), torch.zeros(20, 0, dtype=torch.float64)
    for task in range(6):
        threshold = 0.9 + 0.01 * task
        # Every other task lies mostly where the memory is, so that some add nothing.
        X = (normal(seed + task // 2, 20, 4) * [4, 2, 1, 0.5]) @ normal(task, 4, 50) + 0.05 * normal(-task % 97, 20, 50)
        columns = torch.from_numpy(X)
        outside = residual(columns, basis)
        U, sigma = principal(outside)
        q = float((outside.norm() / columns.norm()) ** 2)
        rank = rank_by_energy(sigma, q, threshold)
        if task == 0:
            # The release counts cumulative energies below the threshold, one fewer.
            values = np.linalg.svd(X, compute_uv=False) ** 2
            assert rank == (values.cumsum() / values.sum() < threshold).sum() + 1
        basis, memory = extend(basis, U[:, :rank]), published_gpm(memory, X, threshold)
        assert_allclose(projector(basis), projector(memory), atol=1e-9)


def test_used_share():
    assert used_share(torch.zeros(8, 0)) == 0
    assert used_share(torch.eye(8)[:, :6]) == 0.75


@given(
    sigma=st.lists(st.floats(0.01, 10), min_size=1, max_size=12).map(lambda s: sorted(s, reverse=True)),
    ratio=st.floats(0.05, 1),
    threshold=st.floats(0.1, 0.99),
)
def test_the_papers_rank_adds_norms(sigma: list[float], ratio: float, threshold: float) -> None:
    """Eq. 12 with 1 - ratio for what is covered; with its own second term no first task keeps a vector: 0 + 1."""
    rank = rank_as_printed(torch.tensor(sigma, dtype=torch.float64), ratio, threshold)
    norm = np.linalg.norm(sigma)

    def kept(r: int) -> float:
        return float(np.linalg.norm(sigma[:r]) / norm)

    assert rank == len(sigma) or kept(rank) + 1 - ratio >= threshold - 1e-6
    assert rank == 0 or kept(rank - 1) + 1 - ratio < threshold + 1e-6
    assert next(r for r in range(len(sigma) + 1) if kept(r) + 1 > threshold) == 0
    # Squares add up, norms do not: the threshold covers threshold^2 of a first task's energy.
    if ratio == 1:
        assert rank == rank_by_energy(torch.tensor(sigma, dtype=torch.float64), 1.0, threshold**2)
