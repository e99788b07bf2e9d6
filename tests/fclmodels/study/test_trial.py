"""Trials: val rows alone, the value by hand, resumed after a kill, pruned, and the choice among them."""

from collections.abc import Callable, Generator
from pathlib import Path

import numpy as np
import pytest

from fclmodels.data.splits.split_reader import Rows, Splits
from fclmodels.errors import UserError
from fclmodels.experiment.experiment import Experiment
from fclmodels.experiment.run_folder import gather_tables
from fclmodels.experiment.stages import Step
from fclmodels.settings.schema import Params
from fclmodels.study.trial import Look, SplitsWithoutTest, TriedPoint, choose, try_point, watch_trial
from fclmodels.testing.tiny_splits import load_tiny_params, write_splits


@pytest.fixture(scope="module")
def splits(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_splits(tmp_path_factory.mktemp("splits"), val=8, test=4).folder


@pytest.fixture
def watch(splits: Path, tmp_path: Path) -> Callable[..., Generator[Look]]:
    """Return a function that starts a trial of FedAvg in a home of this test."""

    def start(*overrides: str, method: str = "fedavg", each_task: bool = True) -> Generator[Look]:
        params: Params = load_tiny_params(*overrides)
        return watch_trial(params, method, 100, splits, tmp_path / "home", "task_agnostic", each_task)

    return start


@pytest.mark.parametrize("method", ["fedprotip", "joint", "pfeddil"])
def test_test_rows_are_not_read_while_tuning(
    watch: Callable[..., Generator[Look]], method: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever asks for them, in any way, is seen; monitors that would are off."""
    asked = []
    select = Splits.select_rows

    def select_rows(self: Splits, task: int, split: str, client: int | None = None) -> Rows:
        asked.append(split)
        return select(self, task, split, client)

    monkeypatch.setattr(Splits, "select_rows", select_rows)
    assert [look.learned for look in watch("monitors.accuracy=true", method=method)] == [1, 2]
    assert {"train", "val"} <= set(asked) <= {"train", "val"}


def test_what_asks_for_test_rows_fails(splits: Path) -> None:
    opened = SplitsWithoutTest.open(splits)
    for ask in (lambda: opened.select_test_rows(0), lambda: opened.select_held_out_rows("test", 0)):
        with pytest.raises(RuntimeError, match="a trial reads no test rows"):
            ask()
    assert len(opened.select_rows(0, "val"))


def test_the_value_is_the_accuracy_on_val_rows_as_the_gate_counts_it(
    watch: Callable[..., Generator[Look]], splits: Path, tmp_path: Path
) -> None:
    looks = list(watch())
    with Experiment(load_tiny_params(), "fedavg", 100, Splits.open(splits), tmp_path / "other") as run:
        outcomes = [outcome for outcome in run.run_steps() if outcome["stage"] == "conclude"]
        judged = [run.step("judge", o["objects"]["state"], task + 1).run() for task, o in enumerate(outcomes)]
        table = gather_tables(run.store, judged, ("val_accuracy",))["val_accuracy"]
    rows = table.filter(table["client"].is_null(), table["reading"] == "task_agnostic").sort("after", "task")
    shares = {(r["after"], r["task"]): r["correct"] / r["total"] for r in rows.iter_rows(named=True)}
    assert looks[0].value == shares[1, 0]
    assert looks[1].value == np.mean([shares[2, 0], shares[2, 1]])
    assert [look.value for look in watch(each_task=False)] == [looks[1].value]


def test_a_killed_trial_goes_on_and_a_finished_one_is_not_repeated(
    watch: Callable[..., Generator[Look]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = [look.value for look in watch("optimizer.lr=0.2")]
    ran: list[tuple[str, int]] = []
    run = Step.run

    def count(step: Step) -> object:
        if ("learn", 0) in ran and step.stage == "learn" and "killed" not in str(ran):
            ran.append(("killed", step.task))
            raise KeyboardInterrupt
        ran.append((step.stage, step.task))
        return run(step)

    monkeypatch.setattr(Step, "run", count)
    with pytest.raises(KeyboardInterrupt):
        list(watch("optimizer.lr=0.3"))
    ran.append(("resumed", 0))
    resumed = list(watch("optimizer.lr=0.3"))
    after = ran[ran.index(("resumed", 0)) + 1 :]
    assert after == [("learn", 1), ("conclude", 1), ("judge", 2)]
    ran.append(("again", 0))
    assert list(watch("optimizer.lr=0.3")) == resumed  # to the bit, the seconds too
    assert [look.value for look in watch("optimizer.lr=0.2")] == whole
    assert ran[-1] == ("again", 0)
    assert not list((tmp_path / "home" / "trials").iterdir())  # nothing stays but what val rows said


def test_a_hopeless_trial_is_pruned_and_leaves_no_folder(watch: Callable[..., Generator[Look]], tmp_path: Path) -> None:
    steps = []

    def is_hopeless(step: int, value: float) -> bool:
        steps.append(step)
        return step == 3

    trial = try_point([watch(), watch("optimizer.lr=0.2")], ("x=1",), is_hopeless)
    assert steps == [1, 2, 3]
    assert (trial.problem, trial.value, len(trial.values)) == ("pruned", None, 2)
    assert trial.values[0] == list(watch())[-1].value
    assert not list((tmp_path / "home" / "trials").iterdir())


def test_a_trial_that_diverges_leaves_no_folder(watch: Callable[..., Generator[Look]], tmp_path: Path) -> None:
    trial = try_point([watch("optimizer.lr=1.0e+20"), watch()], ("optimizer.lr=1.0e+20",))
    assert (trial.value, trial.values) == (None, (None, None))
    assert "training diverged" in trial.problem
    assert not list((tmp_path / "home" / "trials").iterdir())


def test_the_choice_by_hand() -> None:
    first, second = TriedPoint(("a=1",), (0.5, 0.7), 1.0), TriedPoint(("a=2",), (0.7, 0.5), 1.0)
    failed, worse = TriedPoint(("a=3",), (0.9, None), 1.0, "NaN"), TriedPoint(("a=4",), (0.9, 0.1), 1.0)
    assert choose("A", [worse, failed, first, second]) is first
    assert choose("A", [TriedPoint(("a=0",), (0.0,), 1.0)]).value == 0.0
    with pytest.raises(UserError, match=r"rows\.A: no choice of settings ran to its end with every tuning seed: NaN"):
        choose("A", [failed])


def test_a_choice_that_ends_early_has_no_value_and_its_other_seeds_are_spared() -> None:
    def diverge() -> Generator[Look]:
        yield Look(1, 0.5, 3.0)
        raise UserError("it diverges")

    def never() -> Generator[Look]:
        raise AssertionError
        yield

    trial = try_point([diverge(), never()], ("a=1",))
    assert trial == TriedPoint(("a=1",), (None, None), 3.0, "it diverges")
