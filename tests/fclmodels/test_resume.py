"""kill -9 at any moment, then the same command: the end is that of a run that was never killed, bit for bit."""

import contextlib
import itertools
import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from fclmodels.data.splits import Splits

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


class Forks:
    """Runs of one experiment, each in a process of its own that may be killed."""

    def __init__(self, script: Path, params: Path, splits: Splits, root: Path) -> None:
        self.root = root
        self.order = {"params": str(params), "splits": str(splits.folder), "method": "diary", "overrides": HARD}
        self.process = subprocess.Popen(
            [sys.executable, str(script)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1
        )

    def begin(self, name: str, die: tuple[str, str, int] | None = None, **order: Any) -> int:
        """Start `name`; its process id. `die`: (point, before or after, nth call)."""
        places = {"home": str(self.root / name / "home"), "folder": str(self.root / name / "run")}
        assert self.process.stdin
        assert self.process.stdout
        print(json.dumps({**self.order, **places, "die": die, **order}), file=self.process.stdin, flush=True)
        return int(self.process.stdout.readline())

    def end(self) -> int:
        """How the run that was begun ended: 0, or minus the signal that killed it."""
        assert self.process.stdout
        return os.waitstatus_to_exitcode(int(self.process.stdout.readline()))

    def run(self, name: str, die: tuple[str, str, int] | None = None, **order: Any) -> int:
        self.begin(name, die, **order)
        return self.end()

    def calls(self, name: str) -> int:
        return int((self.root / name / "run" / "calls").read_text())


@pytest.fixture(scope="module")
def forks(
    toys: Path, params_file: Path, splits_of: Callable[..., Splits], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Forks]:
    forks = Forks(toys / "forks.py", params_file, splits_of(), tmp_path_factory.mktemp("forks"))
    yield forks
    assert forks.process.stdin
    forks.process.stdin.close()
    forks.process.wait(10)


@pytest.fixture(scope="module")
def undisturbed(forks: Forks, remains: Remains) -> dict[str, Any]:
    assert forks.run("undisturbed") == 0
    return remains(forks.root / "undisturbed" / "run")


@pytest.mark.parametrize("point", POINTS)
@pytest.mark.parametrize("when", ["before", "after"])
def test_deaths_one_after_another_at_every_kind_of_moment(
    point: str, when: str, forks: Forks, undisturbed: dict[str, Any], remains: Remains
) -> None:
    """The first run dies at its first such moment, the next at its second, and so on, until one comes through."""
    name, nth = f"{point}-{when}", 1
    while forks.run(name, (point, when, nth)) == -signal.SIGKILL:
        nth += 1
    assert nth > 1
    assert remains(forks.root / name / "run") == undisturbed


def test_deaths_at_random_times(forks: Forks, undisturbed: dict[str, Any], remains: Remains) -> None:
    assert die_at_random(forks, "random", seed=0) > 3
    assert remains(forks.root / "random" / "run") == undisturbed


def die_at_random(forks: Forks, name: str, seed: int, **order: Any) -> int:
    """Kill again and again after times that grow, so that in the end a run comes through; the number of kills."""
    clock, patience = random.Random(seed), 0.05
    for kills in itertools.count():
        pid = forks.begin(name, **order)
        time.sleep(clock.uniform(0, patience))
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
        if forks.end() == 0:
            return kills
        patience *= 1.15
    raise AssertionError


@pytest.mark.slow
@pytest.mark.parametrize("point", POINTS)
@pytest.mark.parametrize("when", ["before", "after"])
def test_a_death_at_every_single_moment(
    point: str, when: str, forks: Forks, undisturbed: dict[str, Any], remains: Remains
) -> None:
    assert forks.run(f"count-{point}-{when}", (point, when, 10**9)) == 0
    for nth in range(1, forks.calls(f"count-{point}-{when}") + 1):
        name = f"each-{point}-{when}-{nth}"
        assert forks.run(name, (point, when, nth)) == -signal.SIGKILL
        assert forks.run(name) == 0
        assert remains(forks.root / name / "run") == undisturbed, name


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(20))
def test_deaths_at_many_random_times(seed: int, forks: Forks, undisturbed: dict[str, Any], remains: Remains) -> None:
    """Checkpoints after every round, and only now and then."""
    overrides = (*HARD, f"federation.checkpoint_seconds={seed % 3 / 20}")
    die_at_random(forks, f"random-{seed}", seed, overrides=overrides)
    assert remains(forks.root / f"random-{seed}" / "run") == undisturbed


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(3))
def test_deaths_of_a_run_with_workers(seed: int, forks: Forks, undisturbed: dict[str, Any], remains: Remains) -> None:
    """Workers that outlive it for a moment write beside the next run, and change nothing."""
    overrides = (*HARD, "federation.executor=processes", "federation.workers=2")
    clock = random.Random(seed)
    for _ in range(4):
        pid = forks.begin(f"workers-{seed}", overrides=overrides)
        time.sleep(clock.uniform(0.5, 5))
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
        forks.end()
    assert forks.run(f"workers-{seed}", overrides=overrides) == 0
    assert remains(forks.root / f"workers-{seed}" / "run") == undisturbed
