"""The table of a study: means with intervals over seeds, paired differences, ranks, and the seconds that it took.

Intervals are Student's t of level 0.95: over few draws they are wide, and say so.
"""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from scipy.special import stdtrit
from scipy.stats import rankdata

from fclmodels.metrics import MATRIX_METRICS
from fclmodels.report import labels
from fclmodels.report.read_runs import RunFolder
from fclmodels.study.plan import Point, Study
from fclmodels.study.trial import TriedPoint

LEVEL = 0.95
COSTS = ("seconds", "seconds_per_round", "rounds_to_best", "bytes_up", "bytes_down", "bytes_kept")
Draw = tuple[int, str]  # a seed and its splits: what two rows have in common there cancels in their difference


class DrawMean(NamedTuple):
    """A mean over draws and half the width of its interval, None for a single draw."""

    mean: float
    half: float | None
    draws: int


class Judged(NamedTuple):
    """A row's runs, and how its settings were chosen."""

    runs: list[RunFolder]
    problems: list[str]  # of runs that ended early
    trials: Sequence[TriedPoint]
    point: Point


class Standing(NamedTuple):
    """A row of the table; accuracies are shares of 1."""

    label: str
    method: str
    draws: int
    early: int  # runs that ended early
    problem: str  # of the first of them
    metrics: dict[str, DrawMean | None]
    difference: DrawMean | None  # of the first metric, from the reference
    rank: float | None  # mean over the draws that all rows have, 1 is best
    costs: dict[str, float | None]  # means over runs
    tried: int  # choices of settings
    tuning_seconds: float
    settings: Point  # chosen, and the row's own
    after_each: dict[str, list[DrawMean | None]]


def estimate_mean(values: Sequence[float]) -> DrawMean:
    """Return mean and half interval t(0.975, n - 1) s / sqrt(n)."""
    n = len(values)
    half = float(stdtrit(n - 1, (1 + LEVEL) / 2) * np.std(values, ddof=1) / np.sqrt(n)) if n > 1 else None
    return DrawMean(float(np.mean(values)), half, n)


def rank_rows(values: Mapping[str, Mapping[Draw, float]], sign: int = 1) -> dict[str, float | None]:
    """Return each row's mean rank over the draws that all rows have; equals share the mean of their ranks.

    sign: 1 where more is better, -1 where less is.
    """
    judged = {label: of for label, of in values.items() if of}
    common = sorted(set.intersection(*(set(of) for of in judged.values()))) if judged else []
    if not common:
        return dict.fromkeys(values)
    ranks = rankdata([[-sign * of[draw] for draw in common] for of in judged.values()], axis=0).mean(axis=1)
    return dict.fromkeys(values) | dict(zip(judged, ranks.tolist(), strict=True))


def build_table(study: Study, judged: Mapping[str, Judged]) -> list[Standing]:
    """Return the rows of the table, in the study's order."""
    first = {label: _collect_values(study, of.runs, study.metrics[0]) for label, of in judged.items()}
    ranks, reference = rank_rows(first, find_sign(study.metrics[0])), first.get(study.compared_with, {})
    return [
        Standing(
            label,
            study.rows[label].method,
            len(of.runs),
            len(of.problems),
            next(iter(of.problems), ""),
            {name: _estimate(_collect_values(study, of.runs, name)) for name in study.metrics},
            None if label == study.compared_with else _estimate(subtract(first[label], reference)),
            ranks[label],
            {name: _average([run.costs[name] for run in of.runs]) for name in COSTS},
            len(of.trials),
            sum(trial.seconds for trial in of.trials),
            (*of.point, *study.rows[label].set),
            {name: _measure_after_each(study, of.runs, name) for name in study.after_each},
        )
        for label, of in judged.items()
    ]


def find_sign(metric: str) -> int:
    """Return 1 where more of a metric is better, -1 where less is."""
    label = labels.METRICS.get(metric.rpartition(".")[2])
    return -1 if label is not None and label.better == "↓" else 1


def subtract(values: Mapping[Draw, float], reference: Mapping[Draw, float]) -> dict[Draw, float]:
    """Return the differences over the draws that both have."""
    return {draw: value - reference[draw] for draw, value in values.items() if draw in reference}


def to_json(standing: Standing) -> dict[str, Any]:
    """Return a row as JSON values."""
    content = standing._asdict()
    content["metrics"] = {name: e and e._asdict() for name, e in standing.metrics.items()}
    content["difference"] = standing.difference and standing.difference._asdict()
    content["after_each"] = {name: [e and e._asdict() for e in of] for name, of in standing.after_each.items()}
    return content


def _collect_values(study: Study, runs: Sequence[RunFolder], metric: str) -> dict[Draw, float]:
    """Return a metric of the study's reading, or, as reading.metric, of another, by draw where it is defined."""
    reading, _, name = metric.rpartition(".")
    values = {_get_draw(run): run.result.metrics.get(reading or study.reading, {}).get(name) for run in runs}
    return {draw: value for draw, value in values.items() if value is not None}


def _get_draw(run: RunFolder) -> Draw:
    return run.result.seed, str(run.result.digests.get("splits"))


def _estimate(values: Mapping[Draw, float]) -> DrawMean | None:
    return estimate_mean(list(values.values())) if values else None


def _average(values: Sequence[float | None]) -> float | None:
    numbers = [value for value in values if value is not None]
    return float(np.mean(numbers)) if numbers and len(numbers) == len(values) else None


def _measure_after_each(study: Study, runs: Sequence[RunFolder], name: str) -> list[DrawMean | None]:
    """Return a metric after 1 to T tasks: of the accuracies at that time on the tasks learned so far."""
    matrices = [run.matrices[study.reading] for run in runs if study.reading in run.matrices]
    tasks = min((matrix.shape[1] for matrix in matrices), default=0)
    stood = ([MATRIX_METRICS[name](a[: t + 1, :t]) for a in matrices] for t in range(1, tasks + 1))
    return [None if None in values else estimate_mean([v for v in values if v is not None]) for values in stood]
