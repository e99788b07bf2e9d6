"""Differences seed by seed: known answers, and what is not paired."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from run_folders import write_run
from scipy.stats import bootstrap

from fclmodels.report.page import render_page
from fclmodels.report.paired_differences import estimate_interval, pair_groups, pair_groups_by_task


def group(values: dict[int, float | None], splits: str = "a") -> Any:
    """Runs with this ACC of each seed."""
    runs = [
        SimpleNamespace(
            result=SimpleNamespace(seed=seed, digests={"splits": splits}), metrics={"task_aware": {"acc": value}}
        )
        for seed, value in values.items()
    ]
    return SimpleNamespace(runs=runs)


def test_what_a_seed_adds_to_both_is_in_no_difference() -> None:
    base = {0: 0.1, 1: 0.5, 2: 0.9, 3: 0.3}
    (pair,) = pair_groups([group(base), group({seed: value + 0.02 for seed, value in base.items()})], "task_aware")
    assert (pair.group, pair.seeds) == (1, 4)
    assert (pair.mean, pair.low, pair.high) == pytest.approx((0.02, 0.02, 0.02))


def test_the_interval_is_that_of_scipy_up_to_chance() -> None:
    differences = np.random.default_rng(1).normal(0.03, 0.02, 8)
    theirs = bootstrap((differences,), np.mean, method="percentile", n_resamples=20_000, rng=2).confidence_interval
    assert estimate_interval(differences) == pytest.approx((theirs.low, theirs.high), abs=5e-4)


@pytest.mark.parametrize(
    "other",
    [
        group({0: 0.2, 1: 0.2}),
        group({0: 0.2, 1: 0.2, 7: 0.2, 8: 0.2}),
        group({0: 0.2, 1: 0.2, 2: None}),
        group({0: 0.2, 1: 0.2, 2: 0.2}, splits="b"),
    ],
    ids=["two seeds", "two shared", "one undefined", "other splits"],
)
def test_fewer_than_three_pairs_say_nothing(other: Any) -> None:
    assert pair_groups([group({0: 0.1, 1: 0.1, 2: 0.1}), other], "task_aware") == []


def test_tasks_are_paired_one_by_one() -> None:
    """A matrix has a row more than tasks; its last one counts, where it is defined."""

    def of(final: dict[int, list[float]]) -> Any:
        runs_of_group = group(dict.fromkeys(final, 0.0))
        for run, accuracies in zip(runs_of_group.runs, final.values(), strict=True):
            run.matrices = {"task_aware": np.array([[9.0] * len(accuracies), accuracies])}
        return runs_of_group

    first = of({0: [0.1, 0.5], 1: [0.2, 0.5], 2: [0.3, 0.5]})
    better = of({0: [0.2, 0.5], 1: [0.4, 0.5], 2: [0.6, np.nan]})
    shorter = of({0: [0.0], 1: [0.1], 2: [0.2]})
    (task, other), second = pair_groups_by_task([first, better, shorter], "task_aware")
    assert (task.group, task.seeds, task.mean) == (1, 3, pytest.approx(0.2))
    assert (task.low, task.high) == pytest.approx(estimate_interval(np.array([0.1, 0.2, 0.3])))
    assert other.group == 2
    assert (other.mean, other.low, other.high) == pytest.approx((-0.1, -0.1, -0.1))
    assert second == []  # two seeds are too few, and the third method has one task


def test_page_shows_differences_seed_by_seed_from_three_seeds_on(tmp_path):
    folders = [tmp_path / f"{method}-{seed}" for seed in range(3) for method in ("fedavg", "fedprox")]
    for folder in folders:
        method, seed = folder.name.split("-")
        write_run(folder, method=method, seed=int(seed))
    assert "Seed by seed" in render_page(folders)
    assert "Seed by seed" not in render_page(folders[:4])
