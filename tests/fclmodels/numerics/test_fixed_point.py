"""Fixed point: sums within their bound of the exact ones, in any order; what does not fit is refused, never wrapped."""

from fractions import Fraction

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fclmodels.numerics.fixed_point import RANGE, choose_scale, decode, encode

limits = st.floats(1, 1e12)


@given(limit=limits, shares=st.lists(st.floats(-1, 1), min_size=2, max_size=40))
def test_a_sum_is_the_exact_one_to_half_a_step_a_client(limit: float, shares: list[float]) -> None:
    n, numbers = len(shares), [limit * share for share in shares]
    total = sum(encode(torch.tensor([x], dtype=torch.float64), limit, n) for x in numbers)
    assert isinstance(total, torch.Tensor)
    scale, exact = Fraction(choose_scale(limit, n)), sum(map(Fraction, numbers))
    assert abs(Fraction(int(total)) / scale - exact) <= n / (2 * scale)
    assert decode(total, torch.float64, limit, n).item() == pytest.approx(float(exact), rel=1e-9, abs=n / float(scale))


@given(limit=limits, n=st.integers(2, 100_000))
def test_the_largest_sum_fits_and_one_bit_finer_would_not_be_sure_to(limit: float, n: int) -> None:
    most = int(encode(torch.tensor([limit], dtype=torch.float64), limit, n))
    assert n * most <= 2**RANGE < 8 * n * most
    assert choose_scale(limit, n).as_integer_ratio()[0].bit_count() == 1


@pytest.mark.parametrize("wrong", [1.001e3, -1.001e3, torch.inf, -torch.inf, torch.nan])
def test_what_does_not_fit_is_refused(wrong: float) -> None:
    fits = torch.tensor([1e3, -1e3, 0.0])
    assert torch.equal(decode(encode(fits, 1e3, 7), torch.float32, 1e3, 7), fits)
    with pytest.raises(OverflowError, match="is not within"):
        encode(torch.tensor([0.5, wrong]), 1e3, 7)


def test_whole_numbers_go_as_they_are() -> None:
    counts, most = torch.tensor([[3, -(2**40)]]), 2**RANGE // 10
    assert torch.equal(decode(sum(encode(counts, 1, 10) for _ in range(10)), torch.int64, 1, 10), 10 * counts)
    assert decode(encode(counts[:, :1].int(), 1, 10), torch.int32, 1, 10).dtype == torch.int32
    with pytest.raises(OverflowError):
        encode(torch.tensor([most + 1]), 1, 10)


def test_nothing_is_encoded_too() -> None:
    assert encode(torch.zeros(0, 3), 1, 2).shape == (0, 3)
    assert encode(torch.zeros(0, dtype=torch.int32), 1, 2).shape == (0,)
