"""A trial: a method learns the stream with some settings and is judged on val rows; no test row is read.

A trial works in a folder of its own, which is removed when it ends: a search makes hundreds of models for nobody.
What val rows said stays in the store, so a trial is not done again, and one that was killed resumes.
"""

import shutil
from collections.abc import Callable, Generator, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from fclmodels.data.splits.split_reader import Rows, Splits
from fclmodels.errors import UserError
from fclmodels.experiment.experiment import Experiment
from fclmodels.experiment.stages import Outcome, Stage
from fclmodels.metrics import accuracy_matrix
from fclmodels.settings.load import collect_settings
from fclmodels.settings.schema import MonitorSettings, Params
from fclmodels.storage.digests import digest_json
from fclmodels.storage.files import lock_file
from fclmodels.storage.object_store import Store
from fclmodels.study.plan import Point

PRUNED = "pruned"
TRIALS = "trials"  # folder of the trials that are under way


class Look(NamedTuple):
    """What val rows say after some tasks."""

    learned: int
    value: float | None  # ACC of the study's reading; None where it is undefined
    seconds: float  # of training and judging so far


class TriedPoint(NamedTuple):
    """A choice of settings, tried with the tuning seeds."""

    point: Point
    values: tuple[float | None, ...]  # one of each seed; None where the run ended early or was pruned
    seconds: float
    problem: str = ""  # why it ended early: with the first seed that does

    @property
    def value(self) -> float | None:
        """Return the mean over the seeds; None where one is missing."""
        values = [value for value in self.values if value is not None]
        return float(np.mean(values)) if len(values) == len(self.values) else None


class SplitsWithoutTest(Splits):
    """Splits whose test rows cannot be read."""

    def select_rows(self, task: int, split: str, client: int | None = None) -> Rows:
        if split == "test":
            raise RuntimeError("a trial reads no test rows")
        return super().select_rows(task, split, client)


def watch_trial(
    params: Params, method: str, seed: int, splits: Path, home: Path, reading: str, each_task: bool = True
) -> Generator[Look]:
    """Yield what val rows say after each task, or after the last one alone; one that is closed earlier is pruned."""
    params = params.model_copy(update={"monitors": MonitorSettings()})  # some of them read test rows
    opened = SplitsWithoutTest.open(splits)
    name = digest_json([method, seed, opened.digest, collect_settings(params, method)])
    place = home / TRIALS / name
    with (
        lock_file(home / "locks" / f"trial-{name}"),
        Experiment(params, method, seed, opened, home, place=place) as run,
    ):
        try:
            yield from _look(run, Store(home / "store"), reading, each_task)
        except (GeneratorExit, UserError):  # pruned, or ended early: nobody goes on with it
            shutil.rmtree(place, ignore_errors=True)
            raise
    shutil.rmtree(place, ignore_errors=True)


def _look(run: Experiment, store: Store, reading: str, each_task: bool) -> Generator[Look]:
    """Yield the looks at an experiment that `store` has, and those that training it gives."""
    progress = _Progress(run)
    for learned in range(1 if each_task else run.tasks, run.tasks + 1):
        key = _identify_look(run, learned)
        outcome = store.recall(key) or progress.judge(learned, key, store)
        table = store.get_table(outcome["objects"]["val_accuracy"])
        accuracies = accuracy_matrix(table, reading)[learned, :learned]
        value = None if np.isnan(accuracies).any() else float(accuracies.mean())
        yield Look(learned, value, outcome["seconds"])


class _Progress:
    """How far a trial's experiment has come: its state, and the seconds that it took."""

    def __init__(self, run: Experiment) -> None:
        self.run = run
        self.state: str | None = None
        self.seconds = 0.0
        self.pending: list[tuple[Stage, int]] = [("begin", 0)]
        for task in range(run.tasks):
            self.pending += [("learn", task), ("conclude", task)]

    def judge(self, learned: int, key: str, store: Store) -> Outcome:
        """Run the steps up to so many tasks, judge on val rows, and record that in `store`; return the outcome."""
        while len(self.pending) > 2 * (self.run.tasks - learned):
            self._run_step(*self.pending.pop(0))
        table = self._run_step("judge", learned)["objects"]["val_accuracy"]
        digest = store.put_table(self.run.store.get_table(table))
        store.record(key, {"objects": {"val_accuracy": digest}, "seconds": self.seconds})
        return {"objects": {"val_accuracy": digest}, "seconds": self.seconds}

    def _run_step(self, stage: Stage, task: int) -> Outcome:
        step = self.run.step(stage, self.state, task)
        outcome = step.recall() or step.run()
        self.state = outcome["objects"].get("state", self.state)
        self.seconds += outcome["seconds"]
        return outcome


def try_point(
    looks: Sequence[Generator[Look]],
    point: Point,
    is_hopeless: Callable[[int, float], bool] = lambda step, value: False,
) -> TriedPoint:
    """Run a choice's trials, one of each tuning seed after another; a hopeless look, numbered from 1, ends them all."""
    values: list[float | None] = []
    seconds, step = 0.0, 0
    for of_seed in looks:
        look = None
        try:
            for look in of_seed:
                step += 1
                if look.value is not None and is_hopeless(step, look.value):
                    of_seed.close()
                    rest = [None] * (len(looks) - len(values))
                    return TriedPoint(point, (*values, *rest), seconds + look.seconds, PRUNED)
        except UserError as error:  # such as one that diverges
            rest = [None] * (len(looks) - len(values))
            return TriedPoint(point, (*values, *rest), seconds + (look.seconds if look else 0.0), str(error))
        values.append(look.value if look else None)
        seconds += look.seconds if look else 0.0
    return TriedPoint(point, tuple(values), seconds)


def choose(label: str, trials: Sequence[TriedPoint]) -> TriedPoint:
    """Return the trial with the best mean on val rows, the first of equals; UserError where none ran to its end."""
    whole = [trial for trial in trials if trial.value is not None]
    if not whole:
        reason = next((trial.problem for trial in trials if trial.problem), "the reading has no value on val rows")
        raise UserError(f"rows.{label}: no choice of settings ran to its end with every tuning seed: {reason}")
    return max(whole, key=lambda trial: trial.value or 0.0)


def _identify_look(run: Experiment, learned: int) -> str:
    """Return a digest of all that a look after so many tasks depends on."""
    keys = [run.step("learn", None, task).key for task in range(learned)]
    return digest_json(["trial", *keys, run.step("conclude", None, 0).key, run.step("judge", None, learned).key])
