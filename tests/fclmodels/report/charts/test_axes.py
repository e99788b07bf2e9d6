"""Ticks: few, round, and enclosing what is drawn."""

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fclmodels.report.charts.axes import choose_ticks, choose_ticks_around, choose_ticks_from_zero


@given(st.floats(-1e6, 1e6), st.floats(1e-6, 1e6), st.integers(2, 12))
def test_ticks_are_few_round_and_inside(low, span, most):
    high = low + span
    ticks = choose_ticks(low, high, most)
    assert len(ticks) <= most
    assert ticks == sorted(set(ticks))
    assert all(low - 1e-6 * span <= tick <= high + 1e-6 * span for tick in ticks)


@given(st.floats(1e-3, 1e6))
def test_ticks_above_start_at_zero_and_cover(high):
    ticks = choose_ticks_from_zero(high)
    assert ticks[0] == 0
    assert ticks[-1] >= high
    assert ticks[-1] - (ticks[1] - ticks[0]) <= high
    assert 2 <= len(ticks) <= 6


def test_known_ticks():
    assert choose_ticks(1, 5, most=10) == [1, 1.5, 2, 2.5, 3, 3.5, 4, 4.5, 5]
    assert choose_ticks(0, 100) == [0, 20, 40, 60, 80, 100]
    assert choose_ticks_from_zero(2.04) == [0, 0.5, 1, 1.5, 2, 2.5]
    assert choose_ticks_from_zero(0) == [0, 1]


@given(st.lists(st.tuples(st.floats(-1e3, 1e3), st.none() | st.floats(0, 1e3)), min_size=1))
def test_ticks_around_hold_all_values_with_their_deviations(values: list[tuple[float, float | None]]) -> None:
    ticks = choose_ticks_around(values)
    low, high = min(m - (s or 0) for m, s in values), max(m + (s or 0) for m, s in values)
    assert 2 <= len(ticks) <= 7
    steps = [b - a for a, b in itertools.pairwise(ticks)]
    assert steps == pytest.approx([steps[0]] * len(steps), rel=1e-3)
    assert ticks[0] <= low + 1e-6 * steps[0]
    assert ticks[-1] >= high - 1e-6 * steps[0]
