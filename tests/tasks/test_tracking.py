"""The MLflow run of an experiment: one, whatever happens to the process that fills it."""

import os
import shutil
import threading
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import mlflow
import numpy as np
import pandas as pd
import polars as pl
import pytest
import torch
from mlflow import MlflowClient
from mlflow.entities import Run
from mlflow.exceptions import MlflowException

from fclmodels import state
from fclmodels.backbones.network import build
from fclmodels.backbones.spec import ModelSpec
from fclmodels.errors import UserError
from fclmodels.experiment import Experiment, digest_of
from fclmodels.federation.monitors.rows import row, table
from fclmodels.numerics.relevance import Router
from fclmodels.settings import TrackingSettings
from tasks.tracked_artifacts import Matrix, as_table, heat_map, log_model, matrices_of
from tasks.tracking import Tracking, track, tracked

SUMMARY = {"task_agnostic": {"acc": 0.5, "ft": None}}


@pytest.fixture(scope="module")
def empty_store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """MLflow takes a second to make one."""
    path = tmp_path_factory.mktemp("store") / "mlflow.db"
    MlflowClient(f"sqlite:///{path}").search_experiments()
    return path


@pytest.fixture
def settings(empty_store: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[TrackingSettings]:
    shutil.copy(empty_store, tmp_path / "mlflow.db")
    monkeypatch.chdir(tmp_path)
    tracking_uri = mlflow.get_tracking_uri()
    yield TrackingSettings(uri=f"sqlite:///{tmp_path}/mlflow.db")
    mlflow.set_tracking_uri(tracking_uri)


def experiment(faults: bool = False, **changes: Any) -> Experiment:
    """What tracking sees of an experiment."""
    facts: dict[str, Any] = {
        "label": "fedavg-0",
        "seed": 0,
        "tasks": 2,
        "settings": {"a": {"b": 1, "c": [1, 2]}, "d": None},
    }
    facts |= changes
    kinds = {
        "data": SimpleNamespace(source="digits"),
        "stream": SimpleNamespace(kind="s"),
        "partition": SimpleNamespace(kind="p"),
        "federation": SimpleNamespace(faults=SimpleNamespace(on=faults)),
    }
    return SimpleNamespace(  # type: ignore[return-value]
        **facts,
        params=SimpleNamespace(**kinds),
        splits=SimpleNamespace(digest="5" * 64, folder=Path("data/splits"), grows=False),
        step=lambda stage, before, task: SimpleNamespace(key=digest_of([stage, before, task, facts["settings"]])),
    )


def rounds(task: int, count: int = 2) -> pl.DataFrame:
    steps = range(task * count, (task + 1) * count)
    return pl.DataFrame([{"step": s, "loss": s / 2, "bytes_up": 1, "bytes_down": 2, "seconds": 0.5} for s in steps])


def all_runs(settings: TrackingSettings) -> list[Run]:
    client = MlflowClient(settings.uri)
    return list(client.search_runs([e.experiment_id for e in client.search_experiments()]))


def fill(tracking: Tracking, upto: int) -> None:
    for learned in range(1, upto + 1):
        tracking.task_learned(learned, rounds(learned - 1), SUMMARY)


def test_a_run_tells_its_settings_data_and_origin(settings: TrackingSettings, tmp_path: Path) -> None:
    with tracked(experiment(), settings, tmp_path, print):
        pass
    (run,) = all_runs(settings)
    assert run.info.run_name == "fedavg seed 0"
    assert run.data.params == {"method": "fedavg", "seed": "0", "a.b": "1", "a.c": "[1, 2]"}
    assert run.data.tags.items() >= {"method": "fedavg", "seed": "0", "scenario": "digits, s, p"}.items()
    (used,) = run.inputs.dataset_inputs
    assert used.dataset.digest == "5" * 36
    assert run.info.artifact_uri.startswith((tmp_path / "mlartifacts").as_uri())


def test_the_same_experiment_is_the_same_run_another_is_another(settings: TrackingSettings, tmp_path: Path) -> None:
    ids = []
    for made in (experiment(), experiment(), experiment(settings={"a": 2}), experiment(label="fedavg-0")):
        with tracked(made, settings, tmp_path, print) as tracking:
            ids.append(tracking.id)
    assert ids[0] == ids[1] == ids[3] != ids[2]
    assert len(all_runs(settings)) == 2


def test_a_resumed_run_has_no_number_twice(settings: TrackingSettings, tmp_path: Path) -> None:
    for upto in (1, 2, 2):
        with tracked(experiment(), settings, tmp_path, print) as tracking:
            fill(tracking, upto)
    client = MlflowClient(settings.uri)
    losses = client.get_metric_history(tracking.id, "train/loss")
    assert [(m.step, m.value) for m in losses] == [(0, 0.0), (1, 0.5), (2, 1.0), (3, 1.5)]
    assert [m.step for m in client.get_metric_history(tracking.id, "acc/task_agnostic")] == [1, 2]
    assert client.get_metric_history(tracking.id, "forgetting_ft/task_agnostic") == []


@pytest.mark.parametrize("on", [False, True])
def test_answers_are_metrics_where_clients_can_fail(on: bool, settings: TrackingSettings, tmp_path: Path) -> None:
    told = {"answers": [3, 2], "late": [0, 1], "missing": [1, 0], "lost": [0, 2]}
    seen = rounds(0).with_columns(pl.Series(name, values) for name, values in told.items())
    with tracked(experiment(faults=on), settings, tmp_path, print) as tracking:
        tracking.task_learned(1, seen, SUMMARY)
    client = MlflowClient(settings.uri)
    logged = {name: [m.value for m in client.get_metric_history(tracking.id, f"train/{name}")] for name in told}
    assert logged == (told if on else {name: [] for name in told})


def test_monitors_are_metrics_with_the_step_that_they_belong_to(settings: TrackingSettings, tmp_path: Path) -> None:
    seen = table(
        [
            row("rho", 0, 1.0, round=0),
            row("rho", 1, 0.75, round=1),
            row("beta", 1, 0.5, round=1, about=0),
            row("loss_increase", 1, 0.25, about=0),
            row("used_share", 1, 0.2, layer="backbone.fc1"),
            row("used_share", 1, 0.3),
            row("accuracy", 1, 0.5, round=1, about=0),
            row("accuracy", 1, 0.7, round=1),
            row("drift", 1, 2.0, round=0),
            row("drift_bound", 1, 9.0, round=0),
        ]
    )
    with tracked(experiment(), settings, tmp_path, print) as tracking:
        tracking.task_learned(1, rounds(0), SUMMARY)
        tracking.task_learned(2, rounds(1), SUMMARY, seen)
    client = MlflowClient(settings.uri)
    expected = {
        "oracle/rho": [(3, 0.75)],
        "oracle/beta/task-1": [(3, 0.5)],
        "oracle/loss_increase/task-1": [(2, 0.25)],
        "used_share/backbone.fc1": [(2, 0.2)],
        "used_share/mean": [(2, 0.3)],
        "accuracy/task-1": [(3, 0.5)],
        "accuracy/all-so-far": [(3, 0.7)],
        "drift": [(2, 2.0)],
        "oracle/drift_bound": [(2, 9.0)],
    }
    found = {name: [(m.step, m.value) for m in client.get_metric_history(tracking.id, name)] for name in expected}
    assert found == expected


@pytest.mark.parametrize(("problem", "status"), [(ValueError("no"), "FAILED"), (KeyboardInterrupt(), "KILLED")])
def test_a_run_that_ended_badly_says_so_until_it_goes_on(
    settings: TrackingSettings, tmp_path: Path, problem: BaseException, status: str
) -> None:
    with pytest.raises(type(problem)), tracked(experiment(), settings, tmp_path, print):
        raise problem
    (run,) = all_runs(settings)
    assert run.info.status == status
    assert type(problem).__name__ in run.data.tags["fcl.error"]
    with tracked(experiment(), settings, tmp_path, print):
        (run,) = all_runs(settings)
        assert run.info.status == "RUNNING"
        assert "fcl.error" not in run.data.tags


def test_what_mlflow_does_not_take_waits_for_it_and_is_told_once(
    settings: TrackingSettings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also to the run's end, and beyond: then the next run of the same command logs it."""

    def gone(*of: Any, **more: Any) -> None:
        raise MlflowException("connection refused\nafter 2 retries")

    said: list[str] = []
    with tracked(experiment(), settings, tmp_path, said.append) as tracking:
        with monkeypatch.context() as patch:
            patch.setattr(MlflowClient, "log_batch", gone)
            fill(tracking, 2)
            assert len(tracking.waiting) == 2
        tracking.task_learned(3, rounds(2), SUMMARY)
        assert tracking.waiting == []
    (line,) = said
    assert line.startswith(f"tracking.uri: {settings.uri} stopped answering: connection refused. The run goes on; ")
    client = MlflowClient(settings.uri)
    assert [m.step for m in client.get_metric_history(tracking.id, "train/loss")] == [*range(6)]

    other = experiment(settings={"a": 2})
    with tracked(other, settings, tmp_path, said.append) as tracking, monkeypatch.context() as patch:
        patch.setattr(MlflowClient, "log_batch", gone)
        fill(tracking, 2)
    with tracked(other, settings, tmp_path, said.append) as tracking:
        fill(tracking, 2)
    assert len(said) == 2
    assert [m.step for m in client.get_metric_history(tracking.id, "train/loss")] == [*range(4)]


def test_a_problem_of_the_run_is_told_where_mlflow_is_gone_too(
    settings: TrackingSettings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def gone(*of: Any) -> None:
        raise ConnectionError

    monkeypatch.setattr(MlflowClient, "set_terminated", gone)
    with pytest.raises(ZeroDivisionError), tracked(experiment(), settings, tmp_path, print):
        _ = 1 / 0


def test_a_complete_run_is_left_alone(settings: TrackingSettings, tmp_path: Path) -> None:
    with tracked(experiment(), settings, tmp_path, print) as tracking:
        fill(tracking, 2)
        tracking.client.set_terminated(tracking.id, "FINISHED")
    (before,) = all_runs(settings)
    with tracked(experiment(), settings, tmp_path, print) as tracking:
        assert tracking.complete
        fill(tracking, 2)
    with pytest.raises(ZeroDivisionError), tracked(experiment(), settings, tmp_path, print):
        _ = 1 / 0
    (after,) = all_runs(settings)
    assert after.to_dictionary() == before.to_dictionary()


def test_what_only_the_result_tells_is_tracked(
    settings: TrackingSettings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tasks.tracked_artifacts.log_artifacts", lambda *of: None)
    plain: dict[str, Any] = dict.fromkeys(("seconds", "bytes_up", "bytes_down", "bytes_kept"), 1)
    plain |= {"metrics": {"task_aware": {"acc": 0.5}}, "settings": {"evaluation": {"batch_size": 64}}}
    plain |= {"digests": {"state": "5"}, "command": "fcl run"}
    privacy = {"epsilon": 7.25, "delta": 1e-5, "covers": "sketches", "clip": 1.0}
    more = {"preset": {"name": "tiny"}, "scaled": {"rounds": [4, 2], "of": [20, 10]}, "privacy": privacy}
    names = ("preset", "scaled", "privacy", "mlflow.note.content")
    found = []
    for label, result in (("a-0", plain), ("b-0", plain | more | {"metrics": {"paper_task_predicted": {}}})):
        with tracked(experiment(label=label, settings={"label": label}), settings, tmp_path, print) as tracking:
            track.fn(tracking, label, tmp_path, result)
        data = tracking.client.get_run(tracking.id).data
        found.append(({name: data.tags[name] for name in names if name in data.tags}, data.metrics.get("epsilon")))
    (of_plain, none), (tags, epsilon) = found
    told = of_plain.pop("mlflow.note.content")
    assert (of_plain, none) == ({}, None)
    assert "| Task-aware&emsp; | 50.0&emsp; | –&emsp; |" in told
    assert "](get-artifact?path=accuracy.png&run_uuid=" in told
    assert told.endswith("`fcl run`")
    note = tags.pop("mlflow.note.content")
    of_privacy = "epsilon 7.25 at delta 1e-05, for sketches."
    assert (tags, epsilon) == ({"preset": "tiny", "scaled": "6 of 30 rounds", "privacy": of_privacy}, 7.25)
    assert "A batch: 64 samples" in note
    assert of_privacy in note


def test_thousands_of_numbers_and_hundreds_of_settings_fit(settings: TrackingSettings, tmp_path: Path) -> None:
    many = {f"setting_{i}": i for i in range(250)}
    with tracked(experiment(settings=many), settings, tmp_path, print) as tracking:
        tracking.task_learned(1, rounds(0, count=700), SUMMARY)
    assert len(MlflowClient(settings.uri).get_metric_history(tracking.id, "train/loss")) == 700
    assert len(all_runs(settings)[0].data.params) == 252  # and method and seed


def test_a_thread_makes_no_stray_run(settings: TrackingSettings, tmp_path: Path) -> None:
    with tracked(experiment(), settings, tmp_path, print) as tracking:
        thread = threading.Thread(target=fill, args=(tracking, 2))
        thread.start()
        thread.join()
    (run,) = all_runs(settings)
    assert run.data.metrics["train/loss"] == 1.5


def test_a_dvc_stage_is_told(settings: TrackingSettings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(os.environ, "DVC_STAGE", "experiment@fedavg-0")
    with tracked(experiment(), settings, tmp_path, print):
        pass
    assert all_runs(settings)[0].data.tags["dvc.stage"] == "experiment@fedavg-0"


@pytest.mark.slow
def test_a_database_is_there_whole_or_not_at_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """MLflow refuses what a kill leaves of one that is being set up. Behind a link it lies where that leads."""
    monkeypatch.chdir(tmp_path)
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(MlflowClient, "search_experiments", lambda *_, **__: 1 / 0)
        killed = TrackingSettings(uri="sqlite:///killed.db")
        with pytest.raises(ZeroDivisionError), tracked(experiment(), killed, tmp_path, print):
            pytest.fail("nothing to track")
    assert not Path("killed.db").exists()
    Path("there").mkdir()
    Path("mlflow.db").symlink_to("there/mlflow.db")
    Path("there/mlflow.db.new").write_text("half a database")
    settings = TrackingSettings(uri="sqlite:///mlflow.db")
    with tracked(experiment(), settings, tmp_path, print):
        pass
    assert len(all_runs(settings)) == 1
    assert Path("mlflow.db").is_symlink()
    assert not Path("there/mlflow.db.new").exists()


@pytest.mark.parametrize("uri", ["gopher://x", "sqlite:////dev/null/mlflow.db", "sqlite:///params.yaml", "./mlruns"])
def test_a_store_that_cannot_be_used_is_a_mistake(uri: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("params.yaml").write_text("no database: at all\n")
    refused = pytest.raises(UserError, match=f"^tracking.uri: {uri} cannot be used: ")
    with refused, tracked(experiment(), TrackingSettings(uri=uri), tmp_path, print):
        pytest.fail("nothing to track")


def test_the_matrix_as_table_and_picture() -> None:
    shown = Matrix("accuracy", "tasks learned", 0, "task", np.array([[0.1, np.nan], [0.9, 0.2], [0.3, 0.8]]))
    assert as_table(shown) == {
        "columns": ["tasks learned", "task 1", "task 2"],
        "data": [[0, 0.1, None], [1, 0.9, 0.2], [2, 0.3, 0.8]],
    }
    axes, bar = heat_map(shown).axes
    assert [text.get_text() for text in axes.texts] == ["10", "90", "20", "30", "80"]
    assert bar.get_ylim() == (0, 100)
    assert axes.collections[0].get_array()[1, 0] == 90


def test_the_picture_of_many_tasks_is_no_larger_than_a_screen() -> None:
    shown = Matrix("accuracy", "tasks learned", 0, "task", np.full((101, 100), 0.5))
    figure = heat_map(shown)
    width, height = figure.get_size_inches()
    assert width < 11
    assert height < 8
    assert not figure.axes[0].texts
    assert len(figure.axes[0].get_xticks()) < 30


def test_a_run_that_predicts_tasks_shows_which_it_took_for_which(tmp_path: Path) -> None:
    counts = {"task_aware": [(0, 3, 4), (1, 4, 4)], "task_agnostic": [(0, 2, 4), (1, 1, 4)]}
    accuracy = [(reading, 2, task, None, c, n) for reading, rows in counts.items() for task, c, n in rows]
    columns = ["reading", "after", "task", "client", "correct", "total"]
    pl.DataFrame(accuracy, columns, orient="row", schema_overrides={"client": pl.Int32}).write_parquet(
        tmp_path / "accuracy.parquet"
    )
    assert list(matrices_of(tmp_path)) == ["accuracy"]
    taken = [("task_predicted", 1, 0, 0, 4), ("task_predicted", 2, 0, 0, 3), ("task_predicted", 2, 0, 1, 1)]
    pl.DataFrame(taken, ["reading", "after", "task", "predicted", "count"], orient="row").write_parquet(
        tmp_path / "confusion.parquet"
    )
    found = matrices_of(tmp_path)
    assert list(found) == ["accuracy", "confusion_task_predicted"]
    assert as_table(found["confusion_task_predicted"]) == {
        "columns": ["task", "predicted task 1", "predicted task 2"],
        "data": [[1, 0.75, 0.25], [2, None, None]],
    }
    axes = heat_map(found["confusion_task_predicted"]).axes[0]
    assert [label.get_text() for label in axes.get_yticklabels()] == ["1", "2"]


@pytest.mark.parametrize("routed", [False, True], ids=["no router", "router"])
def test_the_tracked_model_answers_like_the_network(
    routed: bool, settings: TrackingSettings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MLFLOW_ALLOW_PICKLE_DESERIALIZATION", "false")
    spec = ModelSpec({"backbone": "mlp", "hidden": 8}, (1, 4, 4), "growing", ((0, 1), (2,)))
    network = build(spec, torch.Generator().manual_seed(0)).eval()
    folder = tmp_path / "model"
    state.save(dict(network.state_dict()), folder / "weights.safetensors")
    state.write_json(folder / "spec.json", spec.to_json())
    tasks = [{"name": f"task {t}", "permutation": None} for t in range(2)]
    facts = {"classes": ["ant", "bee", "cat"], "tasks": tasks, "mean": [0.5], "std": [0.25], "notes": []}
    state.write_json(folder / "serving.json", facts)
    router = Router((torch.eye(8)[:, :3], torch.eye(8)[:, 3:5]), torch.eye(2)[None], torch.ones(1, 2, dtype=torch.bool))
    if routed:
        state.save(router.to_tree(), folder / "router.safetensors")
    with tracked(experiment(), settings, tmp_path, print) as tracking:
        log_model(tracking.client, tracking.id, folder)
    (run,) = all_runs(settings)
    (logged,) = run.outputs.model_outputs

    images = np.random.default_rng(0).integers(0, 256, (20, 1, 4, 4), dtype=np.uint8)
    with torch.inference_mode():
        features = network.backbone((torch.from_numpy(images) / 255 - 0.5) / 0.25)
        answers = network.logits(features).argmax(1)
        if routed:
            unrouted, of_first = answers, network.logits(features, 0).argmax(1)
            answers = torch.where(router.sample_scores(features).argmax(1) == 0, of_first, 2)
            assert not torch.equal(answers, unrouted)
    served = mlflow.pyfunc.load_model(f"models:/{logged.model_id}")
    found = served.predict(pd.DataFrame({"image": [*images]}))
    assert found["class"].tolist() == [facts["classes"][i] for i in answers]
    assert set(served.predict(pd.DataFrame({"image": [*images]}), {"task": 2})["class"]) == {"cat"}
    assert not [path for path in (tmp_path / "mlartifacts").rglob("*") if path.suffix in (".pkl", ".pt", ".pth")]
