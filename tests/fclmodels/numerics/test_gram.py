"""Blocked products against whole ones of NumPy."""

import numpy as np
import pytest
import torch

from fclmodels.numerics.gram import BLOCK, add_gram, gram_of, lower_times_, mirror

WIDTHS = (1, 2, BLOCK - 1, BLOCK, BLOCK + 1, 3 * BLOCK + 7)


def drawn(*shape: int) -> np.ndarray:
    return np.random.default_rng(sum(shape)).standard_normal(shape)


@pytest.mark.parametrize("d", WIDTHS)
@pytest.mark.parametrize("n", [0, 1, 50])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_gram_matrices(d, n, dtype):
    X = drawn(d, n)
    for given in (torch.from_numpy(X).to(dtype), torch.from_numpy(X.T.copy()).to(dtype).T):
        found = gram_of(given)
        assert found.dtype == dtype
        np.testing.assert_allclose(found, X @ X.T, atol=1e-4 if dtype == torch.float32 else 1e-12)


@pytest.mark.parametrize("d", WIDTHS)
def test_parts_add_up_in_double_precision(d):
    parts = [drawn(d, n).astype(np.float32) for n in (3, 40, 11)]
    total = torch.zeros(d, d, dtype=torch.float64)
    for part in parts:
        add_gram(total, torch.from_numpy(part))
    mirror(total)
    np.testing.assert_allclose(total, sum(X.astype(float) @ X.T for X in parts), atol=1e-4)


def test_the_sum_keeps_what_float32_would_lose():
    total = torch.zeros(1, 1, dtype=torch.float64)
    for _ in range(100):
        add_gram(total, torch.full((1, 1), 4096.0))
        add_gram(total, torch.full((1, 1), 0.5))
    assert total.item() == 100 * (4096**2 + 0.25)


@pytest.mark.parametrize("d", WIDTHS)
def test_lower_triangular_products(d):
    F, Z = np.tril(drawn(d, d)), drawn(d, 5)
    given = torch.from_numpy(Z.copy())
    assert lower_times_(torch.from_numpy(F), given) is given
    np.testing.assert_allclose(given, F @ Z, atol=1e-12)
