"""Two methods seed by seed: what is common to a seed (its model at the start, its draws) leaves their difference.

The interval is a percentile bootstrap over the seeds (Efron and Tibshirani 1993, ch. 13): few seeds make it too narrow.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from fclmodels.report.runs import Group

LEAST = 3  # seeds in common, below which nothing is said
DRAWS = 10_000
LEVEL = 0.95


class Pair(NamedTuple):
    """ACC of a group less that of the first one, and where the mean of such differences lies; shares of 1."""

    group: int
    seeds: int
    mean: float
    low: float
    high: float


def pairs(groups: Sequence[Group], reading: str) -> list[Pair]:
    """Each group against the first, over the seeds that both ran on the same splits."""
    values = [_by_seed(group, reading) for group in groups]
    found = []
    for index, own in enumerate(values[1:], start=1):
        shared = sorted(own.keys() & values[0].keys())
        if len(shared) >= LEAST:
            differences = np.array([own[key] - values[0][key] for key in shared])
            found.append(Pair(index, len(shared), float(differences.mean()), *interval(differences)))
    return found


def interval(differences: np.ndarray) -> tuple[float, float]:
    """Of the mean of these [n]; the same draws whenever it is asked for."""
    draws = np.random.default_rng(0).integers(len(differences), size=(DRAWS, len(differences)))
    low, high = np.quantile(differences[draws].mean(1), [(1 - LEVEL) / 2, (1 + LEVEL) / 2])
    return float(low), float(high)


def _by_seed(group: Group, reading: str) -> dict[tuple[int, str], float]:
    """ACC by seed and splits, where it is defined."""
    found = {
        (run.result.seed, str(run.result.digests.get("splits"))): run.result.metrics.get(reading, {}).get("acc")
        for run in group.runs
    }
    return {key: value for key, value in found.items() if value is not None}
