"""kill -9 at any moment, then the same command: the end is that of a run that was never killed, bit for bit."""

import contextlib
import itertools
import os
import random
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from fclmodels.data.splits.split_reader import Splits

HARD = (
    "model.backbone=noisy",
    "methods.diary.batch_norm=local",
    "augment.crop_padding=1",
    "optimizer.momentum=0.9",
    "federation.clients_per_round=3",
    "federation.checkpoint_seconds=0",
)
Remains = Callable[[Path], dict[str, Any]]
POINTS = ["replace", "batch", "put", "record", "rmtree", "publish"]


@pytest.fixture(scope="module")
def diary(splits_of: Callable[..., Splits]) -> dict[str, Any]:
    return {"method": "diary", "splits": splits_of(), "overrides": HARD}


@pytest.fixture(scope="module")
def undisturbed(forks: Any, diary: dict[str, Any], remains: Remains) -> dict[str, Any]:
    assert forks.run("undisturbed", **diary) == 0
    return remains(forks.folder("undisturbed"))


@pytest.mark.parametrize(
    ("point", "when"), [(point, ("before", "after")[number % 2]) for number, point in enumerate(POINTS)]
)
def test_deaths_one_after_another_at_every_kind_of_moment(
    point: str, when: str, forks: Any, diary: dict[str, Any], undisturbed: dict[str, Any], remains: Remains
) -> None:
    """The first run dies at its first such moment, the next at its second, and so on, until one comes through."""
    name, nth = f"{point}-{when}", 1
    while forks.run(name, **diary, die=(point, when, nth)) == -signal.SIGKILL:
        nth += 1
    assert nth > 1
    assert remains(forks.folder(name)) == undisturbed


def test_deaths_at_random_times(
    forks: Any, diary: dict[str, Any], undisturbed: dict[str, Any], remains: Remains
) -> None:
    assert die_at_random(forks, "random", 0, diary, 1.5) > 3
    assert remains(forks.folder("random")) == undisturbed


def die_at_random(forks: Any, name: str, seed: int, order: dict[str, Any], growth: float = 1.15) -> int:
    """Kill again and again, after times that grow, so that in the end a run comes through; the number of kills."""
    clock, patience = random.Random(seed), 0.05
    for kills in itertools.count():
        pid = forks.begin(name, **order)
        time.sleep(clock.uniform(0, patience))
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
        if forks.end() == 0:
            return kills
        patience *= growth
    raise AssertionError


@pytest.mark.slow
@pytest.mark.parametrize("point", POINTS)
@pytest.mark.parametrize("when", ["before", "after"])
def test_a_death_at_every_single_moment(
    point: str, when: str, forks: Any, diary: dict[str, Any], undisturbed: dict[str, Any], remains: Remains
) -> None:
    assert forks.run(f"count-{point}-{when}", **diary, die=(point, when, 10**9)) == 0
    for nth in range(1, forks.calls(f"count-{point}-{when}") + 1):
        name = f"each-{point}-{when}-{nth}"
        assert forks.run(name, **diary, die=(point, when, nth)) == -signal.SIGKILL
        assert forks.run(name, **diary) == 0
        assert remains(forks.folder(name)) == undisturbed, name


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(20))
def test_deaths_at_many_random_times(
    seed: int, forks: Any, diary: dict[str, Any], undisturbed: dict[str, Any], remains: Remains
) -> None:
    """Checkpoints after every round, and only now and then."""
    overrides = (*HARD, f"federation.checkpoint_seconds={seed % 3 / 20}")
    die_at_random(forks, f"random-{seed}", seed, diary | {"overrides": overrides})
    assert remains(forks.folder(f"random-{seed}")) == undisturbed


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(3))
def test_deaths_of_a_run_with_workers(
    seed: int, forks: Any, diary: dict[str, Any], undisturbed: dict[str, Any], remains: Remains
) -> None:
    """Workers that outlive it for a moment write beside the next run, and change nothing."""
    order = diary | {"overrides": (*HARD, "federation.executor=processes", "federation.workers=2")}
    clock = random.Random(seed)
    for _ in range(4):
        pid = forks.begin(f"workers-{seed}", **order)
        time.sleep(clock.uniform(0.5, 5))
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
        forks.end()
    assert forks.run(f"workers-{seed}", **order) == 0
    assert remains(forks.folder(f"workers-{seed}")) == undisturbed
