"""Products of matrices by oneDNN, for every layout, and in blocks: those of NumPy."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fclmodels.numerics.products import (
    BLOCK,
    STEP,
    add_gram,
    gram_of,
    mirror,
    multiply_lower_,
    pad_columns,
    product,
)

WIDTHS = (1, 2, BLOCK - 1, BLOCK, BLOCK + 1, 3 * BLOCK + 7)
LAYOUTS = {
    "rows": lambda m: m.contiguous(),
    "columns": lambda m: m.T.contiguous().T,
    "strided": lambda m: m.repeat_interleave(2, 0).repeat_interleave(3, 1)[::2, ::3],
}


@given(
    sizes=st.tuples(st.integers(0, 9), st.integers(0, 9), st.integers(0, 9)),
    layouts=st.tuples(st.sampled_from(list(LAYOUTS)), st.sampled_from(list(LAYOUTS))),
    dtype=st.sampled_from([torch.float32, torch.float64]),
)
def test_is_the_product_in_every_layout(sizes, layouts, dtype):
    m, k, n = sizes
    random = np.random.default_rng(m + 10 * k + 100 * n)
    A, B = random.standard_normal((m, k)), random.standard_normal((k, n))
    left, right = (LAYOUTS[layout](torch.from_numpy(X).to(dtype)) for layout, X in zip(layouts, (A, B), strict=True))
    result = product(left, right)
    assert result.dtype == dtype
    assert result.is_contiguous()
    np.testing.assert_allclose(result, A @ B, atol=1e-4 if dtype == torch.float32 else 1e-12)


@pytest.mark.parametrize(("n", "expected"), [(0, 0), (1, STEP), (STEP, STEP), (STEP + 1, 2 * STEP)])
def test_columns_of_zeros_fill_a_matrix_up(n, expected):
    X = torch.randn(3, n)
    whole = pad_columns(X)
    assert whole.shape == (3, expected)
    assert torch.equal(whole[:, :n], X)
    assert not whole[:, n:].any()


def test_float32_is_not_rounded_to_less():
    A, B = torch.randn(64, 2304), torch.randn(2304, 48)
    exact = A.double() @ B.double()
    assert (product(A, B) - exact).norm() < 3e-6 * exact.norm()


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_works_on_tensors_of_inference(mode):
    with torch.inference_mode():
        B = torch.eye(5)
    with mode():
        assert torch.equal(product(torch.ones(2, 5), B), torch.ones(2, 5))


def drawn(*shape: int) -> np.ndarray:
    return np.random.default_rng(sum(shape)).standard_normal(shape)


@pytest.mark.parametrize("d", WIDTHS)
@pytest.mark.parametrize("n", [0, 1, 50])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_gram_matrices(d, n, dtype):
    X = drawn(d, n)
    for matrix in (torch.from_numpy(X).to(dtype), torch.from_numpy(X.T.copy()).to(dtype).T):
        result = gram_of(matrix)
        assert result.dtype == dtype
        np.testing.assert_allclose(result, X @ X.T, atol=1e-4 if dtype == torch.float32 else 1e-12)


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
    assert multiply_lower_(torch.from_numpy(F), given) is given
    np.testing.assert_allclose(given, F @ Z, atol=1e-12)
