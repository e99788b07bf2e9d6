"""Scatter charts as geometry: accuracy against cost or a setting, and prototypes on their principal plane."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import chain, count
from pathlib import Path

from fclmodels.report.charts.axes import (
    BOTTOM,
    LEFT,
    RIGHT,
    TOP,
    Axes,
    choose_ticks,
    choose_ticks_around,
    format_mean,
    scale_x,
    scale_y,
    set_minus,
)

MOST_TICKS = 6
ROOM = 1.05  # on either side of a logarithmic axis


@dataclass(frozen=True)
class SettingValue:
    """Results of the runs in which a setting has this value: mean and standard deviation in both directions."""

    value: str
    shade: float | None  # None where the value is no number
    x: tuple[float, float | None]
    y: tuple[float, float | None]
    runs: Sequence[Path] = ()


@dataclass(frozen=True)
class Dot:
    """A setting's value in the picture's coordinates."""

    x: float
    y: float
    label: str
    text: str
    shade: float | None  # None where the value is no number
    cross: str  # the standard deviations as an SVG path

    @property
    def anchor(self) -> str:
        """Return the side of the dot where its label starts: the right one, but near the right edge the left one."""
        return "end" if self.x > (LEFT + 3 * RIGHT) / 4 else "start"


@dataclass(frozen=True)
class SweepChart(Axes):
    """A picture of all values of one setting; the path joins them in their order."""

    path: str
    dots: tuple[Dot, ...]


@dataclass(frozen=True)
class Spot:
    """A mark on a plane."""

    index: int  # place in the palette
    text: str  # appears when the mark is pointed at
    x: float
    y: float
    label: str = ""
    around: tuple[float, float] | None = None  # half the width and height of an ellipse about it
    near: Sequence[tuple[float, float]] = ()  # the points that it is the mean of, drawn as dots


@dataclass(frozen=True)
class Plane(Axes):
    """A picture of spots, in its coordinates."""

    spots: tuple[Spot, ...]


@dataclass(frozen=True)
class Axis:
    """A mapping from numbers to the picture's coordinates."""

    start: float
    per_unit: float
    transform: Callable[[float], float]

    def __call__(self, value: float) -> float:
        return round(self.start + self.per_unit * self.transform(value), 1)


def draw_sweep(title: str, values: Sequence[SettingValue], x_label: str, y_label: str) -> SweepChart:
    """Draw a labelled dot for each value of a setting, and a line through those with a shade in their order."""
    x_ticks, y_ticks = choose_ticks_around([of.x for of in values]), choose_ticks_around([of.y for of in values])
    x_range = x_ticks[0], x_ticks[-1]
    dots = tuple(_draw_dot(value, x_range, y_ticks, x_label, y_label) for value in values)
    path = " L".join(f"{dot.x},{dot.y}" for dot in dots if dot.shade is not None)
    return SweepChart(
        title,
        x_label,
        y_label,
        tuple((scale_x(x, x_range), set_minus(f"{x:g}")) for x in x_ticks),
        tuple((scale_y(y, y_ticks), set_minus(f"{y:g}")) for y in y_ticks),
        tuple(folder for value in values for folder in value.runs),
        f"M{path}" if path else "",
        dots,
    )


def draw_against_cost(
    title: str, spots: Sequence[Spot], x_label: str, show: Callable[[float], str], runs: Sequence[Path]
) -> Plane:
    """Draw spots over a logarithmic x axis, whose ticks `show` writes; y is ACC in percent."""
    xs = [x for spot in spots for x, _ in ((spot.x, 0), *spot.near)]
    ys = [y for spot in spots for _, y in ((0, spot.y), *spot.near)]
    x_ticks, y_ticks = choose_log_ticks(min(xs), max(xs)), choose_ticks_around([(y, None) for y in ys])
    per_x = (RIGHT - LEFT) / math.log(x_ticks[-1] / x_ticks[0])
    per_y = (BOTTOM - TOP) / (y_ticks[-1] - y_ticks[0])
    across = Axis(LEFT, per_x, lambda x: math.log(x / x_ticks[0]))
    up = Axis(BOTTOM, -per_y, lambda y: y - y_ticks[0])
    return Plane(
        title,
        x_label,
        "ACC, %",
        tuple((across(x), show(x)) for x in x_ticks),
        tuple((up(y), set_minus(f"{y:g}")) for y in y_ticks),
        tuple(runs),
        tuple(_place_spot(spot, across, up) for spot in spots),
    )


def draw_map(title: str, spots: Sequence[Spot], x_label: str, y_label: str, runs: Sequence[Path]) -> Plane:
    """Draw spots to scale: one unit is as long across as up, and all ellipses are inside."""
    (left, right), (low, high) = (_measure_extent(spots, axis) for axis in (0, 1))
    unit = min((RIGHT - LEFT) / (right - left), (BOTTOM - TOP) / (high - low))
    across = Axis((LEFT + RIGHT) / 2, unit, lambda x: x - (left + right) / 2)
    up = Axis((TOP + BOTTOM) / 2, -unit, lambda y: y - (low + high) / 2)
    half = (RIGHT - LEFT) / 2 / unit
    middle = (left + right) / 2
    return Plane(
        title,
        x_label,
        y_label,
        tuple((across(x), set_minus(f"{x:g}")) for x in choose_ticks(middle - half, middle + half)),
        tuple((up(y), set_minus(f"{y:g}")) for y in choose_ticks(low, high, most=5)),
        tuple(runs),
        tuple(_place_spot(spot, across, up) for spot in spots),
    )


def choose_log_ticks(low: float, high: float) -> list[float]:
    """Return a few round numbers from below low > 0 to above high.

    They are evenly apart where both are of one size, else 1, 2 and 5 times powers of ten, else powers alone.
    """
    low, high = low / ROOM, high * ROOM
    if high < 3 * low:
        return choose_ticks_around([(low, None), (high, None)])
    first, last = math.floor(math.log10(low)), math.ceil(math.log10(high))
    for every, steps in chain([(1, (1, 2, 5))], ((every, (1,)) for every in count(1))):
        ticks = [step * 10.0**power for power in range(first, last + every + 1, every) for step in steps]
        start = max(place for place, tick in enumerate(ticks) if tick <= low)
        end = min(place for place, tick in enumerate(ticks) if tick >= high)
        if end - start < MOST_TICKS:
            return ticks[start : end + 1]
    raise AssertionError("two ticks far enough apart enclose all")


def _draw_dot(
    value: SettingValue, x_range: tuple[float, float], y_ticks: Sequence[float], x_label: str, y_label: str
) -> Dot:
    (x, x_std), (y, y_std) = value.x, value.y
    across, up = round(scale_x(x, x_range), 1), round(scale_y(y, y_ticks), 1)
    cross = []
    if x_std is not None:
        cross.append(f"M{scale_x(x - x_std, x_range):.1f},{up} H{scale_x(x + x_std, x_range):.1f}")
    if y_std is not None:
        cross.append(f"M{across},{scale_y(y - y_std, y_ticks):.1f} V{scale_y(y + y_std, y_ticks):.1f}")
    text = f"{value.value}: {y_label} {format_mean(*value.y)}, {x_label} {format_mean(*value.x)}"
    return Dot(across, up, value.value, text, value.shade, " ".join(cross))


def _measure_extent(spots: Sequence[Spot], axis: int) -> tuple[float, float]:
    """Return the lowest and the highest number of spots with their ellipses; never twice the same."""
    places = [(spot.x, spot.y)[axis] for spot in spots]
    around = [spot.around[axis] if spot.around else 0.0 for spot in spots]
    low = min(place - reach for place, reach in zip(places, around, strict=True))
    high = max(place + reach for place, reach in zip(places, around, strict=True))
    return (low, high) if high - low > 1e-9 else (low - 0.5, high + 0.5)


def _place_spot(spot: Spot, across: Axis, up: Axis) -> Spot:
    """Return the spot in the picture's coordinates."""
    around = spot.around and (
        round(abs(across.per_unit) * spot.around[0], 1),
        round(abs(up.per_unit) * spot.around[1], 1),
    )
    near = [(across(x), up(y)) for x, y in spot.near]
    return Spot(spot.index, spot.text, across(spot.x), up(spot.y), spot.label, around, near)
