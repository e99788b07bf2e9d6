"""Two methods seed by seed: what a seed has in common (its first model, its draws) cancels in their difference.

The interval is a percentile bootstrap over the seeds (Efron and Tibshirani 1993, ch. 13): few seeds make it too narrow.
"""

from collections.abc import Mapping, Sequence
from functools import cache
from typing import NamedTuple

import numpy as np

from fclmodels.report.read_runs import Group, RunFolder

Seed = tuple[int, str]  # and the splits

FEWEST_SEEDS = 3  # in common; below that nothing is reported
DRAWS = 10_000
LEVEL = 0.95


class Pair(NamedTuple):
    """Difference between a group's accuracy and the first group's, as shares of 1."""

    group: int
    seeds: int
    mean: float
    low: float  # of the mean's interval
    high: float


def pair_groups(groups: Sequence[Group], reading: str) -> list[Pair]:
    """Compare each group's ACC with the first one's, over the seeds that both ran on the same splits."""
    return _compare_with_first([_collect_acc_by_seed(group, reading) for group in groups])


def pair_groups_by_task(groups: Sequence[Group], reading: str) -> list[list[Pair]]:
    """Compare each group's final accuracy with the first one's, task by task."""
    final = [_collect_final_accuracies_by_seed(group, reading) for group in groups]
    tasks = max((len(a) for of_group in final for a in of_group.values()), default=0)
    return [
        _compare_with_first([{key: float(a[task]) for key, a in of.items() if _is_defined(a, task)} for of in final])
        for task in range(tasks)
    ]


def estimate_interval(differences: np.ndarray) -> tuple[float, float]:
    """Return the interval of the mean of differences [n]; the draws are always the same."""
    means = differences[_draw_samples(len(differences))].mean(1)
    low, high = np.quantile(means, [(1 - LEVEL) / 2, (1 + LEVEL) / 2])
    return float(low), float(high)


@cache
def _draw_samples(n: int) -> np.ndarray:
    """Draw numbers below n with replacement [DRAWS, n]."""
    return np.random.default_rng(0).integers(n, size=(DRAWS, n))


def _compare_with_first(values: Sequence[Mapping[Seed, float]]) -> list[Pair]:
    pairs = []
    for index, own in enumerate(values[1:], start=1):
        common = sorted(own.keys() & values[0].keys())
        if len(common) >= FEWEST_SEEDS:
            differences = np.array([own[key] - values[0][key] for key in common])
            pairs.append(Pair(index, len(common), float(differences.mean()), *estimate_interval(differences)))
    return pairs


def _collect_acc_by_seed(group: Group, reading: str) -> dict[Seed, float]:
    """Return ACC by seed and splits, where it is defined."""
    accs = {_seed_of(run): run.metrics.get(reading, {}).get("acc") for run in group.runs}
    return {key: value for key, value in accs.items() if value is not None}


def _collect_final_accuracies_by_seed(group: Group, reading: str) -> dict[Seed, np.ndarray]:
    """Return accuracies [T] after the last task by seed and splits; NaN where undefined."""
    return {_seed_of(run): run.matrices[reading][-1] for run in group.runs if reading in run.matrices}


def _is_defined(accuracies: np.ndarray, task: int) -> bool:
    return task < len(accuracies) and not np.isnan(accuracies[task])


def _seed_of(run: RunFolder) -> Seed:
    return run.result.seed, str(run.result.digests.get("splits"))
