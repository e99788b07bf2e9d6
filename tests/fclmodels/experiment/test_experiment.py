"""One method, one seed, all tasks: what is done again and what is not, and what a result may not depend on."""

import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pytest
import torch
from polars.testing import assert_frame_equal
from safetensors.torch import save_file

from fclmodels.data.splits.split_reader import Rows, Splits
from fclmodels.errors import UserError
from fclmodels.experiment import experiment as module
from fclmodels.experiment import step_keys
from fclmodels.experiment.experiment import Experiment
from fclmodels.federation.engine.listener import Listener
from fclmodels.storage import trees

MakeExperiment = Callable[..., Experiment]
DAILY = ("fedavg", "joint", "er", "special", "stamp")
OTHERS = ("fedprox", "single-task", "agem", "ewc", "lwf", "flwf-2t", "special-c", "ema", "prox-anchor", "fedomg")
METHODS = [*DAILY, *(pytest.param(name, marks=pytest.mark.slow) for name in OTHERS)]
AUTO = ("methods.special.lambda=auto",)
PERSONAL = ("model.backbone=resnet18", "methods.fedavg.batch_norm=local")
ALL = ["begin 0", "evaluate 0", "learn 0", "conclude 0", "evaluate 1", "learn 1", "conclude 1", "evaluate 2"]


def lasting(result: dict[str, Any]) -> dict[str, Any]:
    """What must be the same whenever and wherever the run was made."""
    return {key: result[key] for key in ("metrics", "digests", "bytes_up", "bytes_down", "bytes_kept")}


def test_a_second_run_trains_nothing_and_says_the_same(
    experiment_of: MakeExperiment, tmp_path: Path, steps: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    home = tmp_path / "home"
    first = experiment_of(home=home).run(tmp_path / "run")
    assert steps == ALL
    before = {file: file.stat().st_mtime_ns for file in home.rglob("*")}
    steps.clear()
    monkeypatch.setattr(module, "Serial", None)
    monkeypatch.setattr(module, "Processes", None)
    again = experiment_of("federation.executor=processes", home=home)
    second = again.run(tmp_path / "again")
    assert steps == []
    assert again._executor is None
    assert lasting(second) == lasting(first)
    assert second["seconds"] == first["seconds"]
    assert {file: file.stat().st_mtime_ns for file in home.rglob("*")} == before


CHANGES: dict[str, tuple[tuple[str, ...], list[str]]] = {
    "evaluation": (("evaluation.batch_size=3",), ["evaluate 0", "evaluate 1", "evaluate 2"]),
    "rounds of the second task": (("federation.rounds=[2, 3]",), ["learn 1", "conclude 1", "evaluate 2"]),
    "the same rounds as a list": (("federation.rounds=[2, 2]",), []),
    "checkpoints": (("federation.checkpoint_seconds=0",), []),
    "number of workers": (("federation.workers=2",), []),
    "how the splits were made": (("partition.seed=3", "stream.seed=3", "partition.val=0.3"), []),
    "device that auto finds": (("device=auto",), []),
    "other methods": (("methods.fedprox.mu=3", "experiment.methods=[joint]"), []),
    "tracking": (("tracking.uri=http://localhost:1",), []),
    "how often monitors that are off look": (("monitors.every=3",), []),
    "a monitor of rounds": (("monitors.gradients=true",), ["learn 0", "learn 1"]),
    "a monitor of ends": (("monitors.used_share=true",), ["conclude 0", "conclude 1"]),
    "threads": (("federation.threads=2",), ALL),
    "learning rate": (("optimizer.lr=0.2",), ALL),
    "weighting": (("federation.weighting=uniform",), ALL),
    "batch size": (("federation.batch_size=5",), ALL),
    "augmentation": (("augment.flip=true",), ALL),
    "the method's own": (("methods.fedavg.batch_norm=frozen",), ALL),
    "backbone": (("model.hidden=13",), ALL),
}


@pytest.mark.parametrize(("change", "anew"), CHANGES.values(), ids=CHANGES)
def test_a_change_reruns_what_depends_on_it(
    change: tuple[str, ...], anew: list[str], experiment_of: MakeExperiment, tmp_path: Path, steps: list[str]
) -> None:
    experiment_of(home=tmp_path / "home").run(tmp_path / "run")
    steps.clear()
    experiment_of(*change, home=tmp_path / "home").run(tmp_path / "run")
    assert steps == anew


def test_another_seed_method_or_other_splits_share_nothing(
    experiment_of: MakeExperiment, tmp_path: Path, steps: list[str], splits_of: Callable[..., Splits]
) -> None:
    home = tmp_path / "home"
    experiment_of(home=home).run(tmp_path / "run")
    for others in ({"seed": 1}, {"method": "fedprox"}, {"splits": splits_of(train=9)}):
        steps.clear()
        experiment_of(home=home, **others).run(tmp_path / "other")
        assert steps == ALL


def test_an_edited_source_reruns_everything(
    experiment_of: MakeExperiment, tmp_path: Path, steps: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Which sources count: test_source_digest.py."""
    experiment_of(home=tmp_path / "home").run(tmp_path / "run")
    steps.clear()
    monkeypatch.setattr(step_keys, "digest_sources", lambda *modules: f"edited {modules}")
    experiment_of(home=tmp_path / "home").run(tmp_path / "run")
    assert steps == ALL


def test_other_weights_in_the_same_file_rerun_everything(
    experiment_of: MakeExperiment, tmp_path: Path, steps: list[str], method_of: Callable
) -> None:
    weights = method_of().create_server().weights
    backbone = {name.removeprefix("backbone."): w for name, w in weights.items() if name.startswith("backbone.")}
    for scale in (1.0, 2.0):
        save_file({name: w * scale for name, w in backbone.items()}, tmp_path / "weights.safetensors")
        steps.clear()
        experiment_of(f"model.weights={tmp_path}/weights.safetensors", home=tmp_path / "home").run(tmp_path / "run")
        assert steps == ALL


@pytest.mark.parametrize("settings", [(), PERSONAL], ids=["mlp", "memories"])
def test_whatever_the_store_loses_is_made_again(
    settings: tuple[str, ...], experiment_of: MakeExperiment, tmp_path: Path
) -> None:
    home = tmp_path / "home"
    first = experiment_of(*settings, home=home).run(tmp_path / "run")
    objects = [file for file in (home / "store").rglob("*") if file.is_file()]
    assert len(objects) > 16
    for lost in objects[:: 3 if settings else 1]:
        lost.unlink(missing_ok=True)
        assert lasting(experiment_of(*settings, home=home).run(tmp_path / "again")) == lasting(first)


@pytest.mark.parametrize("method", METHODS)
def test_ambient_seeds_change_nothing(method: str, experiment_of: MakeExperiment, tmp_path: Path) -> None:
    settings = (
        "model.dropout=[0.2, 0.5]",
        "augment.crop_padding=1",
        "augment.flip=true",
        "federation.clients_per_round=2",
    )
    results = []
    for seed in (1, 2):
        torch.manual_seed(seed)
        np.random.seed(seed)  # noqa: NPY002
        random.seed(seed)
        results.append(experiment_of(*settings, method=method).run(tmp_path / f"{seed}"))
    assert lasting(results[0]) == lasting(results[1])
    other = experiment_of(*settings, method=method, seed=1).run(tmp_path / "other")
    assert lasting(other)["digests"]["model"] != lasting(results[0])["digests"]["model"]


def test_a_memory_that_was_changed_on_disk_is_not_learnt_from(experiment_of: MakeExperiment, tmp_path: Path) -> None:
    experiment = experiment_of(*PERSONAL, home=tmp_path / "home")
    begun = experiment.step("begin", None, 0).run()
    learned = experiment.step("learn", begun["objects"]["state"], 0).run()
    file = experiment.store.find_path(learned["objects"]["memory-2"])
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)
    with pytest.raises(UserError, match=f"{file} does not match its digest"):
        experiment.step("conclude", learned["objects"]["state"], 0).run()


def noisy(splits: Splits, split: str) -> Splits:
    """The same splits with the images of these rows replaced by noise, under the old digests."""
    rows = pl.read_parquet(splits.folder / "manifest.parquet").filter(pl.col("split") == split)["sample"].to_numpy()
    path = splits.folder / "../prepared/images.npy"
    images = np.load(path)
    images[rows] = np.random.default_rng(0).integers(0, 256, images[rows].shape, np.uint8)
    np.save(path, images)
    return Splits.open(splits.folder)


def learnt(experiment: Experiment, folder: Path) -> tuple[list[dict[str, str]], list[str]]:
    """Digests of every state, memory, knowledge and table of rounds, and of the accuracy tables."""
    experiment.run(folder)
    outcomes = [json.loads(file.read_text()) for file in (experiment.home / "store" / "done").iterdir()]
    outcomes.sort(key=lambda outcome: (outcome["task"], outcome["stage"]))
    accuracy = [outcome["objects"].pop("accuracy") for outcome in outcomes if "accuracy" in outcome["objects"]]
    for outcome in outcomes:
        if "rounds" in outcome["objects"]:
            table = experiment.store.get_table(outcome["objects"].pop("rounds"))
            outcome["objects"]["losses"] = table["loss"].to_list()
    return [outcome["objects"] for outcome in outcomes], accuracy


READING = [("fedavg", PERSONAL), ("special", AUTO), *((name, ()) for name in DAILY)]
READING_TOO = [pytest.param(name, (), marks=pytest.mark.slow) for name in OTHERS]


@pytest.mark.parametrize(("method", "settings"), [*READING, *READING_TOO])
def test_test_rows_are_read_by_the_evaluation_only(
    method: str,
    settings: tuple[str, ...],
    own_splits: Callable[..., Splits],
    experiment_of: MakeExperiment,
    tmp_path: Path,
) -> None:
    """With noise in their place every model, memory, knowledge and loss stays the same to the bit."""
    plain, noise_in_test, noise_in_train = (
        learnt(experiment_of(*settings, method=method, splits=splits), tmp_path / f"{number}")
        for number, splits in enumerate(
            (own_splits(val=2), noisy(own_splits(val=2), "test"), noisy(own_splits(val=2), "train"))
        )
    )
    assert noise_in_test[0] == plain[0]
    assert noise_in_test[1] != plain[1]
    assert noise_in_train[0] != plain[0]


class OnVal(Splits):
    """Splits whose evaluation reads val rows."""

    def select_test_rows(self, task: int, client: int | None = None) -> Rows:
        return self.select_rows(task, "val", client)


@pytest.mark.parametrize("settings", [(), PERSONAL], ids=["shared model", "personal models"])
def test_judge_is_evaluate_on_val_rows(
    settings: tuple[str, ...], own_splits: Callable[..., Splits], experiment_of: MakeExperiment, tmp_path: Path
) -> None:
    """So the gate stays the same to the bit whatever the test rows hold."""

    def judged(splits: Splits, stage: str) -> pl.DataFrame:
        with experiment_of(*settings, splits=splits) as experiment:
            state, tables = experiment.step("begin", None, 0).run()["objects"]["state"], []
            for task in range(2):
                for learning in ("learn", "conclude"):
                    state = experiment.step(learning, state, task).run()["objects"]["state"]
                (table,) = experiment.step(stage, state, task + 1).run()["objects"].values()
                tables.append(experiment.store.get_table(table))
            return pl.concat(tables)

    splits = own_splits(val=2)
    expected = judged(OnVal.open(splits.folder), "evaluate")
    assert_frame_equal(judged(splits, "judge"), expected)
    assert_frame_equal(judged(noisy(own_splits(val=2), "test"), "judge"), expected)
    assert not judged(noisy(own_splits(val=2), "val"), "judge").equals(expected)


class Second(Listener):
    """Starts the same experiment again in the middle of a round of the first."""

    def __init__(self, start: Callable[[], object]) -> None:
        self.start = start
        self.error: UserError | None = None

    def on_client_done(self, task: int, round: int, done: int, of: int) -> None:
        if (task, round, done) == (1, 1, 2):
            with pytest.raises(UserError) as caught:
                self.start()
            self.error = caught.value


def test_of_two_runs_at_once_the_second_ends_in_one_line(experiment_of: MakeExperiment, tmp_path: Path) -> None:
    home = tmp_path / "home"
    listener = Second(lambda: experiment_of(home=home).run(tmp_path / "second"))
    first = experiment_of(home=home, listener=listener).run(tmp_path / "first")
    assert listener.error is not None
    assert "in use by another run" in str(listener.error)
    assert "\n" not in str(listener.error)
    assert not (tmp_path / "second").exists()
    assert lasting(first) == lasting(experiment_of().run(tmp_path / "alone"))


def test_settings_that_cannot_be_are_refused_before_any_work(experiment_of: MakeExperiment, tmp_path: Path) -> None:
    wrong = {
        "federation.rounds=[2, 3, 4]": "lists 3 tasks, the stream has 2",
        "model.freeze=[conv7]": "conv7 is not a block of mlp",
        "device=cuda": "sees no GPU",
    }
    for override, message in wrong.items():
        with pytest.raises(UserError, match=message):
            experiment_of(override, home=tmp_path / "home").run(tmp_path / "run")
        assert not (tmp_path / "home" / "store").exists()
        assert not (tmp_path / "run").exists()
    with pytest.raises(UserError, match="Did you mean fedavg"):
        experiment_of(method="fedavgg")


def test_nothing_is_left_of_checkpoints_and_workers(experiment_of: MakeExperiment, tmp_path: Path) -> None:
    home = tmp_path / "home"
    with experiment_of(*PERSONAL, home=home) as experiment:
        experiment.run(tmp_path / "run")
    assert not list((home / "checkpoints").iterdir())
    assert not list(home.glob("workers/*"))


class Log(Listener):
    def __init__(self) -> None:
        self.calls: list[tuple] = []

    def on_task_start(self, task: int, rounds: int) -> None:
        self.calls.append(("task", task, rounds))

    def on_client_done(self, task: int, round: int, done: int, of: int) -> None:
        self.calls.append(("client", task, round, done, of))

    def on_round_done(self, row: dict[str, Any]) -> None:
        self.calls.append(("round", row["task"], row["round"], row["step"], row["clients"]))


def test_a_listener_hears_all_in_turn(experiment_of: MakeExperiment, tmp_path: Path) -> None:
    listener = Log()
    experiment_of("federation.rounds=[1, 2]", "federation.clients_per_round=3", listener=listener).run(tmp_path / "run")
    clients = [[("client", task, number, done, 3) for done in (1, 2, 3)] for task, number in ((0, 0), (1, 0), (1, 1))]
    assert listener.calls == [
        ("task", 0, 1),
        *clients[0],
        ("round", 0, 0, 0, 3),
        ("task", 1, 2),
        *clients[1],
        ("round", 1, 0, 1, 3),
        *clients[2],
        ("round", 1, 1, 2, 3),
    ]


MISSING = {(0, 0): 1, (0, 1): 9, (0, 3): 2, (1, 0): 6, (1, 2): 1}


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize(
    "settings", [(), ("federation.clients_per_round=2",), PERSONAL], ids=["all", "two", "memories"]
)
def test_clients_with_a_single_sample_and_clients_that_miss_a_task(
    method: str,
    settings: tuple[str, ...],
    experiment_of: MakeExperiment,
    splits_of: Callable[..., Splits],
    tmp_path: Path,
) -> None:
    splits = splits_of(train=MISSING)
    result = experiment_of(*settings, method=method, splits=splits).run(tmp_path / "run")
    assert all(
        value is not None for value in (result["metrics"]["task_agnostic"][k] for k in ("acc", "fgt", "learning_acc"))
    )
    ledger = pl.read_parquet(tmp_path / "run" / "ledger.parquet")
    ledger = ledger.filter(pl.col("part") == "update", pl.col("direction") == "up")
    if method == "joint":
        return
    for (task, number), rows in ledger.group_by("task", "round"):
        able = {client for t, client in MISSING if t == task}
        assert set(rows["client"]) <= able
        assert len(rows) == (min(2, len(able)) if "clients_per_round" in str(settings) else len(able)), number


def test_weights_stay_finite_and_digests_are_those_of_the_files(experiment_of: MakeExperiment, tmp_path: Path) -> None:
    experiment = experiment_of()
    result = experiment.run(tmp_path / "run")
    weights = trees.load(tmp_path / "run" / "model" / "weights.safetensors")
    assert trees.digest(weights) == result["digests"]["model"]
    assert all(torch.isfinite(w).all() for w in weights.values())
    assert result["digests"]["splits"] == experiment.splits.digest


@pytest.mark.parametrize("head", ["growing", "per-task"])
def test_tasks_of_a_single_class(
    head: str, experiment_of: MakeExperiment, splits_of: Callable[..., Splits], tmp_path: Path
) -> None:
    """The rows of its head, one with one bias, are written and read like others."""
    result = experiment_of(f"model.head={head}", splits=splits_of(classes=1)).run(tmp_path / "run")
    assert result["metrics"]["task_agnostic"]["acc"] >= 0.5
