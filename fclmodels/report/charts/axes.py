"""Coordinates, ticks and axes that all charts share, without a plotting library.

A few paths keep the page small, need no script, follow light, dark and paper by CSS, and stay readable on a phone,
where a wide plot would shrink its labels. macros.html.j2 draws them as SVG.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

LEFT, RIGHT, TOP, BOTTOM = 34, 350, 8, 188  # the edges of the plot in a picture of 360 x 224


@dataclass(frozen=True)
class Axes:
    """Texts and ticks of a chart, and the folders of the runs behind it; a tick is a place with its text."""

    title: str
    x_label: str
    y_label: str
    x_ticks: tuple[tuple[float, str], ...]
    y_ticks: tuple[tuple[float, str], ...]
    runs: tuple[Path, ...]


def scale_x(x: float, x_range: tuple[float, float]) -> float:
    """Return the place of x between the plot's left and right edge."""
    low, high = x_range
    return LEFT + (RIGHT - LEFT) * ((x - low) / (high - low) if high > low else 0.5)


def scale_y(y: float, y_ticks: Sequence[float]) -> float:
    """Return the place of y between the first tick at the bottom and the last at the top; what lies outside is cut."""
    low, high = y_ticks[0], y_ticks[-1]
    return BOTTOM - (BOTTOM - TOP) * min(1.0, max(0.0, (y - low) / (high - low)))


def choose_ticks(low: float, high: float, most: int = 6) -> list[float]:
    """Return multiples of 1, 2 or 5 times a power of ten from low to high, at most `most` of them."""
    if high <= low:
        return [low]
    power = 10.0 ** math.floor(math.log10((high - low) / most))
    for step in (power, 2 * power, 5 * power, 10 * power, 20 * power):
        first, last = math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9)
        if last - first + 1 <= most:
            return [round(i * step, 12) for i in range(first, last + 1)]
    raise AssertionError("one of five steps is wide enough")


def choose_ticks_from_zero(high: float) -> list[float]:
    """Return ticks from 0 whose last is at least `high`."""
    inside = choose_ticks(0, high, most=5) if high > 0 else [0.0, 1.0]
    return inside if inside[-1] >= high else [*inside, inside[-1] + inside[1] - inside[0]]


def choose_ticks_around(values: Sequence[tuple[float, float | None]]) -> list[float]:
    """Return a few ticks that enclose all of these means with their standard deviations."""
    low, high = min(mean - (std or 0) for mean, std in values), max(mean + (std or 0) for mean, std in values)
    if high - low < 1e-9:
        low, high = low - 0.5, high + 0.5
    inside = choose_ticks(low, high, most=5)
    step = inside[1] - inside[0]
    below = [inside[0] - step] if inside[0] > low else []
    above = [inside[-1] + step] if inside[-1] < high else []
    return [round(tick, 12) for tick in (*below, *inside, *above)]


def format_mean(mean: float, std: float | None) -> str:
    return set_minus(f"{mean:.1f}") + (f" ± {std:.1f}" if std is not None else "")


def set_minus(text: str) -> str:
    """Return the text with real minus signs instead of hyphens."""
    return text.replace("-", "−")
