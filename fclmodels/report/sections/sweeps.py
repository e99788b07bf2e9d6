"""Sweeps of one setting of one method: accuracy against backward transfer (SPECIAL Figure 3)."""

import json
from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from fclmodels.report import labels
from fclmodels.report.charts.scatter_charts import SettingValue, SweepChart, draw_sweep
from fclmodels.report.comparison import compute_mean_and_std, list_readings
from fclmodels.report.read_runs import Group, describe_batch_size, list_distinguishing_facts

FEWEST = 3  # values of a setting that make a curve


class Sweep(NamedTuple):
    """Groups that differ in one setting, by its value; numbers come first and in their order."""

    method: str
    setting: str
    others: str  # settings that are equal here, but not in all runs of the method
    groups: dict[str, Group]


def draw_sweeps(groups: Sequence[Group]) -> list[tuple[Sweep, list[SweepChart]]]:
    """Draw each sweep in each reading that has the metrics for it."""
    charts = [
        (sweep, [_draw_sweep(sweep, reading) for reading in list_readings(sweep.groups.values())])
        for sweep in find_sweeps(groups)
    ]
    complete = [(sweep, [chart for chart in of_sweep if chart]) for sweep, of_sweep in charts]
    return [(sweep, of_sweep) for sweep, of_sweep in complete if of_sweep]


def find_sweeps(groups: Sequence[Group]) -> Iterator[Sweep]:
    """Yield sweeps in the order of the methods, and of their settings by name."""
    by_method: dict[str, list[tuple[dict[str, str], Group]]] = defaultdict(list)
    for group in groups:
        run = group.runs[0]
        by_method[run.result.method].append((list_distinguishing_facts(run), group))
    for method, variants in by_method.items():
        differing = _list_differing([facts for facts, _ in variants])
        for setting in differing:
            others = [name for name in differing if name != setting]
            by_others: dict[tuple[str | None, ...], dict[str, Group]] = defaultdict(dict)
            for facts, group in variants:
                if setting in facts:
                    by_others[tuple(facts.get(name) for name in others)][facts[setting]] = group
            for values, by_value in by_others.items():
                if len(by_value) >= FEWEST:
                    fixed = ", ".join(f"{name}: {value}" for name, value in zip(others, values, strict=True))
                    yield Sweep(
                        method, setting, fixed, {value: by_value[value] for value in sorted(by_value, key=_sort_key)}
                    )


def _list_differing(facts: Sequence[dict[str, str]]) -> list[str]:
    names = sorted({name for of in facts for name in of})
    return [name for name in names if len({of.get(name) for of in facts}) > 1]


def _sort_key(value: str) -> tuple[bool, float, str]:
    number = _parse_number(value)
    return number is None, number or 0.0, value


def _parse_number(value: str) -> float | None:
    """Return the number that a setting's text is, None where it is none."""
    try:
        number = json.loads(value)
    except ValueError:
        return None
    return float(number) if isinstance(number, int | float) and not isinstance(number, bool) else None


def _draw_sweep(sweep: Sweep, reading: str) -> SweepChart | None:
    """Draw dots shaded from the lowest number to the highest; None where a group lacks ACC or BWT."""
    numbers = [value for value in sweep.groups if _parse_number(value) is not None]
    shades = {value: (place + 1) / len(numbers) for place, value in enumerate(numbers)}
    points = []
    for value, group in sweep.groups.items():
        metrics = [run.metrics.get(reading, {}) for run in group.runs]
        (x, x_std), (y, y_std) = (
            _to_percent(compute_mean_and_std([of.get(name) for of in metrics])) for name in ("bwt", "acc")
        )
        if x is None or y is None:
            return None
        folders = [run.folder for run in group.runs]
        points.append(SettingValue(value, shades.get(value), (x, x_std), (y, y_std), folders))
    return draw_sweep(
        labels.title_reading(reading, describe_batch_size(sweep.groups.values())), points, "BWT, points", "ACC, %"
    )


def _to_percent(values: tuple[float | None, float | None]) -> tuple[float | None, float | None]:
    mean, std = values
    return mean if mean is None else 100 * mean, std if std is None else 100 * std
