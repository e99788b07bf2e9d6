"""Two methods seed by seed: what is common to a seed (its model at the start, its draws) leaves their difference.

The interval is a percentile bootstrap over the seeds (Efron and Tibshirani 1993, ch. 13): few seeds make it too narrow.
"""

from collections.abc import Mapping, Sequence
from functools import cache
from typing import NamedTuple

import numpy as np

from fclmodels.report.runs import Group, Run

Seed = tuple[int, str]  # and the splits

LEAST = 3  # seeds in common, below which nothing is said
DRAWS = 10_000
LEVEL = 0.95


class Pair(NamedTuple):
    """An accuracy of a group less that of the first one, and where the mean of such differences lies; shares of 1."""

    group: int
    seeds: int
    mean: float
    low: float
    high: float


def pairs(groups: Sequence[Group], reading: str) -> list[Pair]:
    """Each group against the first, over the seeds that both ran on the same splits."""
    return _against_the_first([_by_seed(group, reading) for group in groups])


def pairs_by_task(groups: Sequence[Group], reading: str) -> list[list[Pair]]:
    """The same of the final accuracy on each task."""
    final = [_final_by_seed(group, reading) for group in groups]
    tasks = max((len(a) for of_group in final for a in of_group.values()), default=0)
    return [
        _against_the_first([{key: float(a[task]) for key, a in of.items() if _defined(a, task)} for of in final])
        for task in range(tasks)
    ]


def _against_the_first(values: Sequence[Mapping[Seed, float]]) -> list[Pair]:
    found = []
    for index, own in enumerate(values[1:], start=1):
        shared = sorted(own.keys() & values[0].keys())
        if len(shared) >= LEAST:
            differences = np.array([own[key] - values[0][key] for key in shared])
            found.append(Pair(index, len(shared), float(differences.mean()), *interval(differences)))
    return found


def interval(differences: np.ndarray) -> tuple[float, float]:
    """Of the mean of these [n]; the same draws whenever it is asked for."""
    low, high = np.quantile(differences[draws(len(differences))].mean(1), [(1 - LEVEL) / 2, (1 + LEVEL) / 2])
    return float(low), float(high)


@cache
def draws(n: int) -> np.ndarray:
    return np.random.default_rng(0).integers(n, size=(DRAWS, n))


def _by_seed(group: Group, reading: str) -> dict[Seed, float]:
    """ACC by seed and splits, where it is defined."""
    found = {_seed(run): run.result.metrics.get(reading, {}).get("acc") for run in group.runs}
    return {key: value for key, value in found.items() if value is not None}


def _final_by_seed(group: Group, reading: str) -> dict[Seed, np.ndarray]:
    """Accuracy on each task after the last one; NaN where it is not defined."""
    return {_seed(run): run.matrices[reading][-1] for run in group.runs if reading in run.matrices}


def _defined(accuracies: np.ndarray, task: int) -> bool:
    return task < len(accuracies) and not np.isnan(accuracies[task])


def _seed(run: Run) -> Seed:
    return run.result.seed, str(run.result.digests.get("splits"))
