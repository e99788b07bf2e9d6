"""Gradient alignment: the minimiser against SciPy's, known cases, exact sums of chunks."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.optimize import minimize
from torch import Tensor
from torch.testing import assert_close

from fclmodels.numerics import alignment as module
from fclmodels.numerics.alignment import (
    align,
    alignment,
    combine,
    equalise_norms,
    gram,
    iterate_columns,
    objective,
    solve_by_descent,
    solve_exactly,
)

PAPERS = {"rounds": 100, "lr": 25.0, "momentum": 0.5, "step_size": 30}


def by_slsqp(G: Tensor, kappa: float) -> float:
    """min f on the simplex by SciPy, the best of a few starts, on a Gram matrix of mean norm 1."""
    A, n = G.numpy(), len(G)
    scale = np.diagonal(A).mean()
    A = A / scale

    def f(p: np.ndarray) -> float:
        return p @ A.mean(axis=1) + kappa * np.sqrt(A.mean() * max(p @ A @ p, 0.0))

    simplex = {"type": "eq", "fun": lambda p: p.sum() - 1}
    starts = [np.full(n, 1 / n), *(0.9 * np.eye(n)[i] + 0.1 / n for i in range(min(n, 3)))]
    result = [
        minimize(f, p, bounds=[(0, 1)] * n, constraints=simplex, options={"maxiter": 500, "ftol": 1e-13})
        for p in starts
    ]
    return scale * min(f(np.clip(r.x, 0, None) / np.clip(r.x, 0, None).sum()) for r in result)


def vectors(seed: int, n: int, common: float, spread: float) -> Tensor:
    """n vectors of different lengths that share a direction more or less."""
    random = np.random.default_rng(seed)
    V = random.normal(size=(n, 30)) + common * random.normal(size=30)
    return torch.from_numpy(V * np.exp(spread * random.normal(size=(n, 1))))


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 10**6),
    n=st.integers(1, 20),
    common=st.sampled_from([0.0, 0.3, 2.0]),
    spread=st.sampled_from([0.0, 0.5, 1.5]),
    kappa=st.sampled_from([0.05, 0.25, 0.5, 1.0, 2.0]),
)
def test_the_minimiser_is_scipys(seed: int, n: int, common: float, spread: float, kappa: float) -> None:
    V = vectors(seed, n, common, spread)
    G = V @ V.T
    scale = float(G.diagonal().mean())
    p = solve_exactly(G, kappa)
    assert float(p.sum()) == pytest.approx(1, abs=1e-12)
    assert float(p.min()) >= 0
    assert objective(G, p, kappa) <= by_slsqp(G, kappa) + 1e-6 * scale
    assert objective(G, solve_by_descent(G, kappa, **PAPERS), kappa) >= objective(G, p, kappa) - 1e-8 * scale


def above_exact(V: Tensor, kappa: float, **steps: float) -> float:
    """How far the descent ends above the exact minimum, in mean squared lengths of the vectors."""
    G = V @ V.T
    result, least = (objective(G, p, kappa) for p in (solve_by_descent(G, kappa, **steps), solve_exactly(G, kappa)))
    return (result - least) / float(G.diagonal().mean())


LONG = {**PAPERS, "rounds": 1000, "step_size": 300}


@pytest.mark.parametrize(("steps", "near"), [(PAPERS, 0.8), pytest.param(LONG, 0.97, marks=pytest.mark.slow)])
def test_the_papers_solver_comes_within_a_thousandth_in_nearly_all_cases(steps: dict[str, float], near: float) -> None:
    """Up to 20 vectors, kappa as in Figure 14. The rest, where softmax saturates, ends within 5e-3."""
    random, gaps = np.random.default_rng(0), []
    for seed in range(100):
        V = vectors(seed, random.integers(1, 21), random.choice([0, 0.3, 2]), random.choice([0, 0.5, 1.5]))
        gaps.append(above_exact(V, random.choice([0.1, 0.25, 0.5, 0.75]), **steps))
    assert np.mean(np.array(gaps) < 1e-3) >= near
    assert max(gaps) < 5e-3


@settings(max_examples=40, deadline=None)
@given(
    seed=st.integers(0, 10**6),
    n=st.integers(1, 20),
    common=st.sampled_from([0.0, 0.1]),
    kappa=st.sampled_from([0.1, 0.25, 0.5, 0.75]),
)
def test_at_four_times_its_rate_it_comes_that_near_for_vectors_of_one_length(
    seed: int, n: int, common: float, kappa: float
) -> None:
    """As alignment normalises them, of 100 numbers, in ten times the papers' steps."""
    random = np.random.default_rng(seed)
    V = torch.from_numpy(random.normal(size=(n, 100)) + common * random.normal(size=100))
    assert above_exact(V / V.norm(dim=1, keepdim=True), kappa, **{**LONG, "lr": 100}) < 1e-3


@settings(max_examples=30, deadline=None)
@given(seed=st.integers(0, 10**6), n=st.integers(2, 12))
def test_the_order_of_vectors_does_not_matter(seed: int, n: int) -> None:
    V = vectors(seed, n, 0.3, 0.5)
    order = torch.from_numpy(np.random.default_rng(seed).permutation(n))
    aligned, permuted = (U.T @ alignment(U @ U.T, solve_exactly(U @ U.T, 0.5), 0.5) for U in (V, V[order]))
    assert_close(aligned, permuted, rtol=1e-3, atol=1e-3 * float(V.norm(dim=1).mean()))


@pytest.mark.parametrize("n", [1, 4])
@pytest.mark.parametrize(("rescale", "length"), [("none", 1.5), ("1/(1+kappa)", 1.0), ("1/(1+kappa^2)", 1.2)])
def test_equal_vectors_keep_their_direction(n: int, rescale: str, length: float) -> None:
    g = torch.tensor([3.0, 4.0], dtype=torch.float64)
    V = g.expand(n, 2)
    G = V @ V.T
    for p in (solve_exactly(G, 0.5), solve_by_descent(G, 0.5, **PAPERS)):
        assert_close(V.T @ alignment(G, p, 0.5, rescale), length * g)


@given(seed=st.integers(0, 10**6), kappa=st.sampled_from([0.1, 0.5, 2.0]))
def test_of_two_vectors_of_one_norm_the_mean_is_best(seed: int, kappa: float) -> None:
    """f is convex and does not change where they are exchanged: whatever kappa, there is nothing to search."""
    V = torch.nn.functional.normalize(vectors(seed, 2, 0.3, 0.5))
    G = V @ V.T
    for p in (solve_exactly(G, kappa), solve_by_descent(G, kappa, **PAPERS)):
        assert_close(V.T @ alignment(G, p, kappa, "1/(1+kappa)"), V.mean(dim=0), rtol=0, atol=1e-6)


def test_a_conflict_that_can_be_worked_out() -> None:
    """Two unit vectors at a right angle, one three times as long: kappa = 1, p by the zero of the derivative."""
    V = torch.tensor([[3.0, 0.0], [0.0, 1.0]], dtype=torch.float64)
    G = V @ V.T
    p = solve_exactly(G, 1.0)
    # f(a) = 4.5 a + 0.5 (1 - a) + sqrt(2.5) sqrt(9 a^2 + (1 - a)^2): its least value on a grid of a million points.
    a = np.linspace(0, 1, 1_000_001)
    f = 4.5 * a + 0.5 * (1 - a) + np.sqrt(2.5 * (9 * a**2 + (1 - a) ** 2))
    assert float(p[0]) == pytest.approx(a[f.argmin()], abs=2e-6)


def test_vectors_that_cancel_leave_their_mean() -> None:
    V = torch.tensor([[1.0, 0.0], [-1.0, 0.0]], dtype=torch.float64)
    G = V @ V.T
    assert_close(V.T @ alignment(G, solve_exactly(G, 0.5), 0.5), torch.zeros(2, dtype=torch.float64))
    zero = torch.zeros(3, 3, dtype=torch.float64)
    assert_close(alignment(zero, solve_exactly(zero, 0.5), 0.5), torch.full((3,), 1 / 3, dtype=torch.float64))


def test_for_kappa_of_at_least_one_no_vector_is_opposed_and_for_less_one_may_be() -> None:
    V = torch.tensor([[1.0, 0.0], [-0.3, 0.2]], dtype=torch.float64)
    G = V @ V.T
    products = {
        kappa: float((V @ V.T @ alignment(G, solve_exactly(G, kappa), kappa)).min()) for kappa in (0.25, 0.5, 1.0)
    }
    assert products[0.25] < products[0.5] < 0 <= products[1.0] + 1e-9


def test_vectors_of_one_norm() -> None:
    V = vectors(0, 5, 0.3, 1.0)
    V[2] = 0
    s = equalise_norms(V @ V.T)
    norms = (s[:, None] * V).norm(dim=1)
    assert_close(norms[[0, 1, 3, 4]], V.norm(dim=1).mean().expand(4))
    assert norms[2] == 0


def test_a_gram_matrix_of_chunks_is_exact_where_one_product_is_not() -> None:
    random = torch.Generator().manual_seed(0)
    V = 1e-3 + 1e-4 * torch.randn(3, 2_000_000, generator=random)
    true = V.double() @ V.double().T
    result = gram(V.split(65_536, dim=1))
    assert float(((result - true) / true).abs().max()) < 1e-5


@pytest.mark.parametrize("width", [1, 5, 100])
def test_a_combination_of_pieces(width: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "COLUMNS", width)
    tensors = list(torch.arange(36.0).view(3, 3, 4))
    result = combine(tensors, [1.0, 0.0, -2.0])
    assert_close(result, tensors[0] - 2 * tensors[2])
    assert torch.equal(tensors[0], torch.arange(12.0).view(3, 4))


def spread_over_names(V: Tensor) -> list[dict[str, Tensor]]:
    """Rows of 30 numbers as two layers and a number that stands alone."""
    return [{"a.weight": v[:12].view(3, 4), "a.bias": v[12:15], "b.weight": v[15:29].view(7, 2), "c": v[29]} for v in V]


@pytest.mark.parametrize("width", [1, 4, 5, 100])
def test_columns_are_the_vectors_in_order_of_names(width: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """In no wider chunks than are asked for, and in a limit of numbers as well."""
    V = vectors(0, 4, 0.3, 0.5)
    for limits in ({"COLUMNS": width}, {"NUMBERS": 4 * width}):
        with monkeypatch.context() as patch:
            for name, limit in limits.items():
                patch.setattr(module, name, limit)
            chunks = list(iterate_columns(spread_over_names(V), ["b.weight", "c", "a.weight"]))
        assert max(chunk.shape[1] for chunk in chunks) <= width
        assert torch.equal(torch.cat(chunks, dim=1), V[:, [*range(15, 29), 29, *range(12)]])


def test_more_vectors_than_numbers_in_a_chunk_still_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "NUMBERS", 3)
    V = vectors(0, 5, 0.3, 0.5)
    assert torch.equal(torch.cat(list(iterate_columns(spread_over_names(V), ["a.bias"])), dim=1), V[:, 12:15])


@settings(max_examples=20)
@given(seed=st.integers(0, 10**6), n=st.integers(1, 6), kappa=st.sampled_from([0.0, 0.5, 1.0]))
def test_each_group_of_names_is_a_problem_of_its_own(seed: int, n: int, kappa: float) -> None:
    """V^T w of each group's own columns, in the tensors' shapes and in whatever order the groups are."""
    V = vectors(seed, n, 0.3, 0.5)
    places = {"b.weight": slice(15, 29), "c": slice(29, 30), "a.weight": slice(0, 12), "a.bias": slice(12, 15)}
    groups = [["b.weight", "c"], ["a.weight", "a.bias"]]
    named = spread_over_names(V)
    result = align(named, groups, lambda G: alignment(G, solve_exactly(G, kappa), kappa))
    assert {name: tensor.shape for name, tensor in result.items()} == {name: t.shape for name, t in named[0].items()}
    for names in groups:
        U = torch.cat([V[:, places[name]] for name in names], dim=1)
        G = U @ U.T
        expected = U.T @ alignment(G, solve_exactly(G, kappa), kappa)
        got = torch.cat([result[name].flatten() for name in names])
        assert_close(got, expected, rtol=1e-6, atol=1e-6 * float(U.norm(dim=1).mean()))


def test_a_conflict_in_one_layer_reaches_another_only_as_one_problem() -> None:
    """The first layer's vectors are equal: alone they come out (1 + kappa) times as long."""
    pair = [{"a": torch.tensor([1.0, 0.0]), "b": torch.tensor(b)} for b in ([3.0, 0.0], [-1.0, 1.0])]
    whole, alone = (
        align(pair, groups, lambda G: alignment(G, solve_exactly(G, 0.5), 0.5))
        for groups in ([["a", "b"]], [["a"], ["b"]])
    )
    assert_close(alone["a"], torch.tensor([1.5, 0.0]))
    assert abs(float(whole["a"][0]) - 1.5) > 0.05


def test_a_gram_matrix_of_millions_of_columns() -> None:
    """Of tensors of all sizes; their products sum up to 5 million terms of one sign."""
    random = torch.Generator().manual_seed(1)
    sizes = {"large": 3_500_000, "middle": 1_400_001, "small": 33, "one": 1}
    means = (1e-3, -2e-3, 5e-4)
    rows = [{name: mean * (1 + 0.3 * torch.randn(n, generator=random)) for name, n in sizes.items()} for mean in means]
    V = [np.concatenate([tensor.numpy() for tensor in row.values()]).astype(float) for row in rows]
    true = np.array([[v @ w for w in V] for v in V])
    result = gram(iterate_columns(rows, list(sizes))).numpy()
    assert np.abs((result - true) / true).max() < 1e-5
