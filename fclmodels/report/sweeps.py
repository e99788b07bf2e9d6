"""Runs of one method that differ in one setting: accuracy against backward transfer (SPECIAL Figure 3)."""

import json
from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from fclmodels.report import words
from fclmodels.report.charts import Point, Scatter, scatter
from fclmodels.report.runs import Group, batch_size, telling_facts
from fclmodels.report.tables import readings, spread

FEWEST = 3  # values of a setting that make a curve


class Sweep(NamedTuple):
    """The groups by the value of the setting that tells them apart, numbers in their order and first."""

    method: str
    setting: str
    others: str  # the same in all, but not in all runs of the method
    groups: dict[str, Group]


def charts(groups: Sequence[Group]) -> list[tuple[Sweep, list[Scatter]]]:
    """Each sweep with a chart for each reading that has what it needs."""
    found = [
        (sweep, [_chart(sweep, reading) for reading in readings(sweep.groups.values())]) for sweep in sweeps(groups)
    ]
    drawn = [(sweep, [chart for chart in of if chart]) for sweep, of in found]
    return [(sweep, of) for sweep, of in drawn if of]


def sweeps(groups: Sequence[Group]) -> Iterator[Sweep]:
    """In the order of the methods, and of their settings by name."""
    of_method: dict[str, list[tuple[dict[str, str], Group]]] = defaultdict(list)
    for group in groups:
        run = group.runs[0]
        of_method[run.result.method].append((telling_facts(run), group))
    for method, siblings in of_method.items():
        differing = _differing([facts for facts, _ in siblings])
        for setting in differing:
            others = [name for name in differing if name != setting]
            alike: dict[tuple[str | None, ...], dict[str, Group]] = defaultdict(dict)
            for facts, group in siblings:
                if setting in facts:
                    alike[tuple(facts.get(name) for name in others)][facts[setting]] = group
            for values, by_value in alike.items():
                if len(by_value) >= FEWEST:
                    fixed = ", ".join(f"{name}: {value}" for name, value in zip(others, values, strict=True))
                    yield Sweep(
                        method, setting, fixed, {value: by_value[value] for value in sorted(by_value, key=_rank)}
                    )


def _differing(facts: Sequence[dict[str, str]]) -> list[str]:
    names = sorted({name for of in facts for name in of})
    return [name for name in names if len({of.get(name) for of in facts}) > 1]


def _rank(value: str) -> tuple[bool, float, str]:
    number = _number(value)
    return number is None, number or 0.0, value


def _number(value: str) -> float | None:
    """What a setting's text says, where that is a number."""
    try:
        number = json.loads(value)
    except ValueError:
        return None
    return float(number) if isinstance(number, int | float) and not isinstance(number, bool) else None


def _chart(sweep: Sweep, reading: str) -> Scatter | None:
    """Shaded from the lowest number to the highest; None where a group lacks ACC or BWT."""
    numbers = [value for value in sweep.groups if _number(value) is not None]
    shades = {value: (place + 1) / len(numbers) for place, value in enumerate(numbers)}
    points = []
    for value, group in sweep.groups.items():
        metrics = [run.result.metrics.get(reading, {}) for run in group.runs]
        (x, x_std), (y, y_std) = (_percent(spread([of.get(name) for of in metrics])) for name in ("bwt", "acc"))
        if x is None or y is None:
            return None
        folders = [run.folder for run in group.runs]
        points.append(Point(value, shades.get(value), (x, x_std), (y, y_std), folders))
    return scatter(words.title(reading, batch_size(sweep.groups.values())), points, "BWT, points", "ACC, %")


def _percent(values: tuple[float | None, float | None]) -> tuple[float | None, float | None]:
    mean, std = values
    return mean if mean is None else 100 * mean, std if std is None else 100 * std
