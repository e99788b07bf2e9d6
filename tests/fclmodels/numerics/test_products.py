"""Products of matrices by oneDNN: those of NumPy, for every layout."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fclmodels.numerics.products import STEP, filled, product

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
    whole = filled(X)
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
