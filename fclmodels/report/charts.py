"""Line charts as geometry; macros.html.j2 draws them as SVG. Each knows the folders of the runs that it is made of.

No plotting library: a few paths keep the page small, need no script, follow light, dark and paper by CSS, and
stay readable on a phone, where a wide plot would shrink its labels.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path

LEFT, RIGHT, TOP, BOTTOM = 34, 350, 8, 188  # the edges of the plot in a picture of 360 x 224
MOST_MARKS = 24  # a longer line is drawn without marks


@dataclass(frozen=True)
class Series:
    """One line: a mean at each x and its standard deviation, None where there is none."""

    index: int  # place in the palette, the same for a method throughout the page
    label: str
    x: Sequence[float]
    mean: Sequence[float | None]
    std: Sequence[float | None]
    runs: Sequence[Path] = ()


@dataclass(frozen=True)
class Mark:
    x: float
    y: float
    text: str


@dataclass(frozen=True)
class Curve:
    index: int
    path: str
    band: str
    marks: tuple[Mark, ...]


@dataclass(frozen=True)
class Axes:
    """What every picture has; ticks are places with their texts."""

    title: str
    x_label: str
    y_label: str
    x_ticks: tuple[tuple[float, str], ...]
    y_ticks: tuple[tuple[float, str], ...]
    runs: tuple[Path, ...]


@dataclass(frozen=True)
class Chart(Axes):
    curves: tuple[Curve, ...]


def line_chart(title: str, series: Sequence[Series], x_label: str, y_label: str, y_ticks: Sequence[float]) -> Chart:
    """All series over a common x axis; y reaches from the first tick to the last, and what lies outside is cut off."""
    xs = [x for line in series for x in line.x]
    x_range = (min(xs), max(xs)) if xs else (0, 0)
    x_ticks = [x for x in ticks(x_range[0], x_range[1], most=10) if x == int(x)]
    return Chart(
        title,
        x_label,
        y_label,
        tuple((_across(x, x_range), f"{x:g}") for x in x_ticks),
        tuple((_up(y, y_ticks), minus(f"{y:g}")) for y in y_ticks),
        _all_of(series),
        tuple(_curve(line, x_range, y_ticks) for line in series),
    )


@dataclass(frozen=True)
class Dot:
    """A point of a scatter; shade None where its value is no number. cross: its standard deviations as a path."""

    x: float
    y: float
    label: str
    text: str
    shade: float | None
    cross: str

    @property
    def anchor(self) -> str:
        """Labels stand to the right, but near the right edge to the left."""
        return "end" if self.x > (LEFT + 3 * RIGHT) / 4 else "start"


@dataclass(frozen=True)
class Scatter(Axes):
    path: str
    dots: tuple[Dot, ...]


@dataclass(frozen=True)
class Point:
    """Mean and standard deviation in both directions of the runs whose setting has this value."""

    value: str
    shade: float | None
    x: tuple[float, float | None]
    y: tuple[float, float | None]
    runs: Sequence[Path] = ()


def scatter(title: str, points: Sequence[Point], x_label: str, y_label: str) -> Scatter:
    """Points with the values that they stand for; a line joins those with a shade in their order."""
    x_ticks, y_ticks = ticks_around([p.x for p in points]), ticks_around([p.y for p in points])
    x_range = x_ticks[0], x_ticks[-1]
    dots = tuple(_dot(point, x_range, y_ticks, x_label, y_label) for point in points)
    joined = " L".join(f"{dot.x},{dot.y}" for dot in dots if dot.shade is not None)
    return Scatter(
        title,
        x_label,
        y_label,
        tuple((_across(x, x_range), minus(f"{x:g}")) for x in x_ticks),
        tuple((_up(y, y_ticks), minus(f"{y:g}")) for y in y_ticks),
        _all_of(points),
        f"M{joined}" if joined else "",
        dots,
    )


def _all_of(drawn: "Sequence[Series] | Sequence[Point]") -> tuple[Path, ...]:
    return tuple(folder for of in drawn for folder in of.runs)


def _dot(point: Point, x_range: tuple[float, float], y_ticks: Sequence[float], x_label: str, y_label: str) -> Dot:
    (x, x_std), (y, y_std) = point.x, point.y
    across, up = round(_across(x, x_range), 1), round(_up(y, y_ticks), 1)
    cross = []
    if x_std is not None:
        cross.append(f"M{_across(x - x_std, x_range):.1f},{up} H{_across(x + x_std, x_range):.1f}")
    if y_std is not None:
        cross.append(f"M{across},{_up(y - y_std, y_ticks):.1f} V{_up(y + y_std, y_ticks):.1f}")
    text = f"{point.value}: {y_label} {_amount(*point.y)}, {x_label} {_amount(*point.x)}"
    return Dot(across, up, point.value, text, point.shade, " ".join(cross))


def _amount(mean: float, std: float | None) -> str:
    return minus(f"{mean:.1f}") + (f" ± {std:.1f}" if std is not None else "")


def minus(text: str) -> str:
    return text.replace("-", "−")


def ticks_around(values: Sequence[tuple[float, float | None]]) -> list[float]:
    """A few ticks, from at or below the lowest mean less its deviation to at or above the highest with its own."""
    low, high = min(mean - (std or 0) for mean, std in values), max(mean + (std or 0) for mean, std in values)
    if high - low < 1e-9:
        low, high = low - 0.5, high + 0.5
    inside = ticks(low, high, most=5)
    step = inside[1] - inside[0]
    below = [inside[0] - step] if inside[0] > low else []
    above = [inside[-1] + step] if inside[-1] < high else []
    return [round(tick, 12) for tick in (*below, *inside, *above)]


def ticks(low: float, high: float, most: int = 6) -> list[float]:
    """Multiples of 1, 2 or 5 times a power of ten from low to high, at most `most` of them."""
    if high <= low:
        return [low]
    power = 10.0 ** math.floor(math.log10((high - low) / most))
    for step in (power, 2 * power, 5 * power, 10 * power, 20 * power):
        first, last = math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9)
        if last - first + 1 <= most:
            return [round(i * step, 12) for i in range(first, last + 1)]
    raise AssertionError("one of five steps is wide enough")


def ticks_above(high: float) -> list[float]:
    """Ticks from 0 whose last is at least `high`."""
    inside = ticks(0, high, most=5) if high > 0 else [0.0, 1.0]
    return inside if inside[-1] >= high else [*inside, inside[-1] + inside[1] - inside[0]]


def _curve(line: Series, x_range: tuple[float, float], y_ticks: Sequence[float]) -> Curve:
    pieces = list(_unbroken(line))
    path = " ".join(
        "M" + " L".join(f"{_across(x, x_range):.1f},{_up(mean, y_ticks):.1f}" for x, mean, _ in piece)
        for piece in pieces
    )
    band = " ".join(
        "M" + " L".join(f"{_across(x, x_range):.1f},{_up(y, y_ticks):.1f}" for x, y in _outline(piece)) + " Z"
        for piece in pieces
        if len(piece) > 1 and all(std is not None for _, _, std in piece)
    )
    points = [point for piece in pieces for point in piece]
    marks = tuple(
        Mark(
            round(_across(x, x_range), 1),
            round(_up(mean, y_ticks), 1),
            f"{line.label}, {x:g}: {_amount(mean, std)}",
        )
        for x, mean, std in points
    )
    return Curve(line.index, path, band, marks if len(points) <= MOST_MARKS else ())


def _unbroken(line: Series) -> Iterator[list[tuple[float, float, float | None]]]:
    """The stretches of a line between missing values."""
    points = zip(line.x, line.mean, line.std, strict=True)
    for missing, stretch in groupby(points, key=lambda point: point[1] is None):
        if not missing:
            yield [(x, mean, std) for x, mean, std in stretch if mean is not None]


def _outline(piece: Sequence[tuple[float, float, float | None]]) -> list[tuple[float, float]]:
    above = [(x, mean + (std or 0)) for x, mean, std in piece]
    below = [(x, mean - (std or 0)) for x, mean, std in piece]
    return above + below[::-1]


def _across(x: float, x_range: tuple[float, float]) -> float:
    low, high = x_range
    return LEFT + (RIGHT - LEFT) * ((x - low) / (high - low) if high > low else 0.5)


def _up(y: float, y_ticks: Sequence[float]) -> float:
    low, high = y_ticks[0], y_ticks[-1]
    return BOTTOM - (BOTTOM - TOP) * min(1.0, max(0.0, (y - low) / (high - low)))
