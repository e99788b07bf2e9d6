"""Line charts as geometry: means over seeds, with bands of one standard deviation."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path

from fclmodels.report.charts.axes import Axes, choose_ticks, format_mean, scale_x, scale_y, set_minus

MOST_MARKS = 24  # a longer line is drawn without marks
Point = tuple[float, float, float | None]  # x, mean, standard deviation


@dataclass(frozen=True)
class Series:
    """Values of one line: a mean at each x and its standard deviation, None where there is none."""

    index: int  # place in the palette, the same for a method throughout the page
    label: str
    x: Sequence[float]
    mean: Sequence[float | None]
    std: Sequence[float | None]
    runs: Sequence[Path] = ()


@dataclass(frozen=True)
class Mark:
    """A point of a line, in the picture's coordinates, and the text that appears when it is pointed at."""

    x: float
    y: float
    text: str


@dataclass(frozen=True)
class Curve:
    """A line and its band as SVG paths."""

    index: int
    path: str
    band: str
    marks: tuple[Mark, ...]


@dataclass(frozen=True)
class LineChart(Axes):
    """A picture with one curve a method."""

    curves: tuple[Curve, ...]


def draw_line_chart(
    title: str, series: Sequence[Series], x_label: str, y_label: str, y_ticks: Sequence[float]
) -> LineChart:
    """Draw all series over a common x axis; y reaches from the first tick to the last, what lies outside is cut off."""
    xs = [x for line in series for x in line.x]
    x_range = (min(xs), max(xs)) if xs else (0, 0)
    x_ticks = [x for x in choose_ticks(x_range[0], x_range[1], most=10) if x == int(x)]
    return LineChart(
        title,
        x_label,
        y_label,
        tuple((scale_x(x, x_range), f"{x:g}") for x in x_ticks),
        tuple((scale_y(y, y_ticks), set_minus(f"{y:g}")) for y in y_ticks),
        tuple(folder for line in series for folder in line.runs),
        tuple(_draw_curve(line, x_range, y_ticks) for line in series),
    )


def _draw_curve(line: Series, x_range: tuple[float, float], y_ticks: Sequence[float]) -> Curve:
    pieces = list(_split_at_gaps(line))
    path = " ".join(
        "M" + " L".join(f"{scale_x(x, x_range):.1f},{scale_y(mean, y_ticks):.1f}" for x, mean, _ in piece)
        for piece in pieces
    )
    band = " ".join(
        "M" + " L".join(f"{scale_x(x, x_range):.1f},{scale_y(y, y_ticks):.1f}" for x, y in _draw_outline(piece)) + " Z"
        for piece in pieces
        if len(piece) > 1 and all(std is not None for _, _, std in piece)
    )
    points = [point for piece in pieces for point in piece]
    marks = tuple(
        Mark(
            round(scale_x(x, x_range), 1),
            round(scale_y(mean, y_ticks), 1),
            f"{line.label}, {x:g}: {format_mean(mean, std)}",
        )
        for x, mean, std in points
    )
    return Curve(line.index, path, band, marks if len(points) <= MOST_MARKS else ())


def _split_at_gaps(line: Series) -> Iterator[list[Point]]:
    """Yield the stretches of a line between missing values."""
    points = zip(line.x, line.mean, line.std, strict=True)
    for missing, stretch in groupby(points, key=lambda point: point[1] is None):
        if not missing:
            yield [(x, mean, std) for x, mean, std in stretch if mean is not None]


def _draw_outline(piece: Sequence[Point]) -> list[tuple[float, float]]:
    """Return the band's outline: along the upper edge and back along the lower one."""
    above = [(x, mean + (std or 0)) for x, mean, std in piece]
    below = [(x, mean - (std or 0)) for x, mean, std in piece]
    return above + below[::-1]
