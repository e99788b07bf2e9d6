"""Marks on a plane: crosses, maps to scale, and logarithmic axes."""

import itertools
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fclmodels.report.charts.axes import BOTTOM, LEFT, RIGHT, TOP
from fclmodels.report.charts.scatter_charts import (
    MOST_TICKS,
    SettingValue,
    Spot,
    choose_log_ticks,
    draw_against_cost,
    draw_map,
    draw_sweep,
)


def test_deviations_are_a_cross_inside_the_plot() -> None:
    points = [SettingValue("1", 1.0, (0.0, 10.0), (50.0, 5.0)), SettingValue("2", 0.5, (20.0, None), (60.0, None))]
    first, second = draw_sweep("t", points, "x", "y").dots
    assert second.cross == ""
    across, up = first.cross.split(" M")
    left, right = (float(number) for number in across.removeprefix("M").replace(f",{first.y}", "").split(" H"))
    assert LEFT <= left < first.x < right <= RIGHT
    assert first.x - left == pytest.approx(right - first.x, abs=0.2)
    bottom, top = (float(number) for number in up.removeprefix(f"{first.x},").split(" V"))
    assert TOP <= top < first.y < bottom <= BOTTOM


def test_a_map_keeps_angles_and_holds_all_ellipses() -> None:
    spots = [Spot(0, "", 0.0, 0.0, around=(1.0, 2.0)), Spot(1, "", 10.0, 1.0, around=(0.5, 0.5)), Spot(2, "", 0.0, 5.0)]
    plane = draw_map("t", spots, "x", "y", [])
    first, second, third = plane.spots
    unit = (second.x - first.x) / 10
    assert (third.y - first.y) / 5 == pytest.approx(-unit, abs=0.05)
    assert first.around == pytest.approx((unit, 2 * unit), abs=0.1)
    for spot in plane.spots:
        rx, ry = spot.around or (0, 0)
        assert LEFT - 0.2 <= spot.x - rx < spot.x + rx <= RIGHT + 0.2 or not rx
        assert TOP - 0.2 <= spot.y - ry <= spot.y + ry <= BOTTOM + 0.2


@given(st.floats(1e-3, 1e12), st.floats(1, 1e9))
def test_logarithmic_ticks_are_few_and_hold_what_is_drawn(low: float, ratio: float) -> None:
    ticks = choose_log_ticks(low, low * ratio)
    assert 2 <= len(ticks) <= MOST_TICKS + 1
    assert ticks[0] > 0
    assert ticks[0] <= low
    assert ticks[-1] >= low * ratio
    assert all(a < b for a, b in itertools.pairwise(ticks))


def test_known_logarithmic_ticks() -> None:
    assert choose_log_ticks(1.5, 40) == [1, 2, 5, 10, 20, 50]
    assert choose_log_ticks(2, 900) == [1, 10, 100, 1000]
    assert choose_log_ticks(20e6, 22e6) == pytest.approx([19e6, 20e6, 21e6, 22e6, 23e6, 24e6])


def test_ten_times_the_cost_is_as_far_wherever_it_starts() -> None:
    spots = [Spot(0, "", 10.0, 50.0, near=((10.0, 40.0), (100.0, 60.0))), Spot(1, "", 1000.0, 50.0)]
    plane = draw_against_cost("t", spots, "x", "{:g}".format, [])
    first, last = plane.spots
    (_, low), (middle, high) = first.near
    assert middle - first.x == pytest.approx(last.x - middle, abs=0.2)
    assert low > first.y > high
    ticks = {text: x for x, text in plane.x_ticks}
    assert first.x == pytest.approx(ticks["10"], abs=0.1)
    width = math.log10(1000 / 10) / math.log10(float(plane.x_ticks[-1][1]) / float(plane.x_ticks[0][1]))
    assert last.x - first.x == pytest.approx(width * (RIGHT - LEFT), abs=0.2)
