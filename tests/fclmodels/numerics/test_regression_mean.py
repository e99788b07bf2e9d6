"""RegMean against worked numbers and least squares."""

import numpy as np
import pytest
import torch

from fclmodels.numerics.regression_mean import damp, multiply, sandwich, solve

GRAMS = torch.tensor([[2.0, 1], [1, 3]]).double(), torch.eye(2).double()


def merge(maps: list[torch.Tensor], grams: list[torch.Tensor]) -> torch.Tensor:
    return solve(sum(multiply(W, G) for W, G in zip(maps, grams, strict=True)), sum(grams))


@pytest.mark.parametrize(
    ("share", "of_A", "of_B"),
    [
        (1.0, [0.454545, 0.636364], [0.782609, 0.652174]),
        (0.5, [0.574468, 0.553191], [0.761905, 0.714286]),
        (0.0, [0.666667, 0.5], [0.736842, 0.789474]),
    ],
)
def test_factors_of_worked_numbers(share: float, of_A: list[float], of_B: list[float]) -> None:
    grams = [damp(G, share) for G in GRAMS]
    assert {G.ndim for G in grams} == {1 if share == 0 else 2}
    A = merge([torch.tensor([[1.0, 0]]), torch.tensor([[0.0, 2]])], grams)
    np.testing.assert_allclose(A, [of_A], atol=1e-6)
    shared = torch.tensor([[1.0, 2]])
    B = merge([torch.tensor([[1.0], [0]]), torch.tensor([[0.0], [3]])], [sandwich(shared, G) for G in grams])
    np.testing.assert_allclose(B[:, 0], of_B, atol=1e-6)


def test_a_map_of_worked_numbers_and_limits() -> None:
    grams = [damp(G, 0.5) for G in GRAMS]
    swap = torch.tensor([[0.0, 1], [1, 0]])
    np.testing.assert_allclose(
        merge([torch.eye(2), swap], grams), [[0.617021, 0.297872], [0.382979, 0.702128]], atol=1e-6
    )
    torch.testing.assert_close(merge([swap, swap], grams), swap.double())
    torch.testing.assert_close(merge([torch.eye(2), swap], [GRAMS[0]] * 2), (torch.eye(2) + swap).double() / 2)
    unseen = torch.diag(torch.tensor([1.0, 0])).double()
    np.testing.assert_allclose(merge([swap], [unseen]), [[0, 0], [1, 0]])


def test_it_is_the_least_squares_solution() -> None:
    random = np.random.default_rng(0)
    X = [random.normal(size=(n, 4)) for n in (9, 20, 3)]
    W = [random.normal(size=(2, 4)) for _ in X]
    outputs = np.concatenate([x @ w.T for x, w in zip(X, W, strict=True)])
    right = np.linalg.lstsq(np.concatenate(X), outputs)[0].T
    mine = merge([torch.tensor(w) for w in W], [torch.tensor(x.T @ x) for x in X])
    np.testing.assert_allclose(mine, right, atol=1e-9)
