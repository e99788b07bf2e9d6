"""Marks on a plane as geometry: what a method reaches against what it costs, and where prototypes lie."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import chain, count
from pathlib import Path

from fclmodels.report.charts import BOTTOM, LEFT, RIGHT, TOP, Axes, minus, ticks, ticks_around

MOST_TICKS = 6
ROOM = 1.05  # on either side of a logarithmic axis


@dataclass(frozen=True)
class Spot:
    """A mark. around: half the width and height of an ellipse about it; near: what it is the mean of, as dots."""

    index: int  # place in the palette
    text: str  # what it tells when it is pointed at
    x: float
    y: float
    label: str = ""
    around: tuple[float, float] | None = None
    near: Sequence[tuple[float, float]] = ()


@dataclass(frozen=True)
class Plane(Axes):
    """Spots are in the picture's coordinates."""

    spots: tuple[Spot, ...]


@dataclass(frozen=True)
class Axis:
    """From numbers to the picture's coordinates."""

    start: float
    per_unit: float
    place: Callable[[float], float]

    def __call__(self, value: float) -> float:
        return round(self.start + self.per_unit * self.place(value), 1)


def against_cost(
    title: str, spots: Sequence[Spot], x_label: str, show: Callable[[float], str], runs: Sequence[Path]
) -> Plane:
    """x on a logarithmic axis, y in percent."""
    xs = [x for spot in spots for x, _ in ((spot.x, 0), *spot.near)]
    ys = [y for spot in spots for _, y in ((0, spot.y), *spot.near)]
    x_ticks, y_ticks = log_ticks(min(xs), max(xs)), ticks_around([(y, None) for y in ys])
    per_x = (RIGHT - LEFT) / math.log(x_ticks[-1] / x_ticks[0])
    per_y = (BOTTOM - TOP) / (y_ticks[-1] - y_ticks[0])
    across = Axis(LEFT, per_x, lambda x: math.log(x / x_ticks[0]))
    up = Axis(BOTTOM, -per_y, lambda y: y - y_ticks[0])
    return Plane(
        title,
        x_label,
        "ACC, %",
        tuple((across(x), show(x)) for x in x_ticks),
        tuple((up(y), minus(f"{y:g}")) for y in y_ticks),
        tuple(runs),
        tuple(_moved(spot, across, up) for spot in spots),
    )


def like_a_map(title: str, spots: Sequence[Spot], x_label: str, y_label: str, runs: Sequence[Path]) -> Plane:
    """One unit is as long across as up, and all ellipses are inside."""
    (left, right), (low, high) = (_reach(spots, axis) for axis in (0, 1))
    unit = min((RIGHT - LEFT) / (right - left), (BOTTOM - TOP) / (high - low))
    across = Axis((LEFT + RIGHT) / 2, unit, lambda x: x - (left + right) / 2)
    up = Axis((TOP + BOTTOM) / 2, -unit, lambda y: y - (low + high) / 2)
    half = (RIGHT - LEFT) / 2 / unit
    middle = (left + right) / 2
    return Plane(
        title,
        x_label,
        y_label,
        tuple((across(x), minus(f"{x:g}")) for x in ticks(middle - half, middle + half)),
        tuple((up(y), minus(f"{y:g}")) for y in ticks(low, high, most=5)),
        tuple(runs),
        tuple(_moved(spot, across, up) for spot in spots),
    )


def log_ticks(low: float, high: float) -> list[float]:
    """A few round numbers from below low > 0 to above high: evenly apart where both are of one size, else 1, 2 and 5
    times powers of ten, else powers alone."""
    low, high = low / ROOM, high * ROOM
    if high < 3 * low:
        return ticks_around([(low, None), (high, None)])
    first, last = math.floor(math.log10(low)), math.ceil(math.log10(high))
    for every, steps in chain([(1, (1, 2, 5))], ((every, (1,)) for every in count(1))):
        known = [step * 10.0**power for power in range(first, last + every + 1, every) for step in steps]
        start = max(place for place, tick in enumerate(known) if tick <= low)
        end = min(place for place, tick in enumerate(known) if tick >= high)
        if end - start < MOST_TICKS:
            return known[start : end + 1]
    raise AssertionError("two ticks far enough apart hold all")


def _reach(spots: Sequence[Spot], axis: int) -> tuple[float, float]:
    """From the lowest to the highest that is to be seen, never the same."""
    places = [(spot.x, spot.y)[axis] for spot in spots]
    around = [spot.around[axis] if spot.around else 0.0 for spot in spots]
    low = min(place - reach for place, reach in zip(places, around, strict=True))
    high = max(place + reach for place, reach in zip(places, around, strict=True))
    return (low, high) if high - low > 1e-9 else (low - 0.5, high + 0.5)


def _moved(spot: Spot, across: Axis, up: Axis) -> Spot:
    around = spot.around and (
        round(abs(across.per_unit) * spot.around[0], 1),
        round(abs(up.per_unit) * spot.around[1], 1),
    )
    near = [(across(x), up(y)) for x, y in spot.near]
    return Spot(spot.index, spot.text, across(spot.x), up(spot.y), spot.label, around, near)
