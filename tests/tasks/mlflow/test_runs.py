"""The MLflow run of an experiment: one, whatever happens to the process that fills it."""

import json
import os
import shutil
import threading
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from urllib.parse import parse_qs, urlsplit

import mlflow
import numpy as np
import pandas as pd
import polars as pl
import pytest
import torch
from mlflow import MlflowClient
from mlflow.entities import Run
from mlflow.exceptions import MlflowException

from fclmodels.backbones.model.network import build_network
from fclmodels.backbones.model.spec import ModelSpec
from fclmodels.errors import UserError
from fclmodels.experiment.experiment import Experiment
from fclmodels.federation.monitors.rows import make_row, make_table
from fclmodels.numerics.task_relevance import Router
from fclmodels.settings.schema import TrackingSettings
from fclmodels.storage import trees
from fclmodels.storage.digests import digest_json
from fclmodels.storage.sealed_json import write_json
from tasks.mlflow.artifacts import Matrix, draw_heat_map, log_model, read_matrices, to_table
from tasks.mlflow.runs import Tracking, log_result, track_experiment
from tasks.mlflow.saved_view import VIEW, list_addresses

SUMMARY = {"task_agnostic": {"acc": 0.5, "ft": None}}


@pytest.fixture(scope="module")
def empty_store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return an empty store, which takes MLflow a second to create."""
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


def make_experiment(faults: bool = False, **changes: Any) -> Experiment:
    """Return a stand-in with all that tracking uses of an experiment."""
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
        step=lambda stage, before, task: SimpleNamespace(key=digest_json([stage, before, task, facts["settings"]])),
    )


def make_rounds(task: int, count: int = 2) -> pl.DataFrame:
    steps = range(task * count, (task + 1) * count)
    return pl.DataFrame([{"step": s, "loss": s / 2, "bytes_up": 1, "bytes_down": 2, "seconds": 0.5} for s in steps])


def find_runs(settings: TrackingSettings) -> list[Run]:
    client = MlflowClient(settings.uri)
    return list(client.search_runs([e.experiment_id for e in client.search_experiments()]))


def log_tasks(tracking: Tracking, upto: int) -> None:
    for learned in range(1, upto + 1):
        tracking.log_task(learned, make_rounds(learned - 1), SUMMARY)


def test_a_run_has_its_settings_data_and_origin(settings: TrackingSettings, tmp_path: Path) -> None:
    with track_experiment(make_experiment(), settings, tmp_path, print):
        pass
    (run,) = find_runs(settings)
    assert run.info.run_name == "fedavg seed 0"
    assert run.data.params == {"method": "fedavg", "seed": "0", "a.b": "1", "a.c": "[1, 2]"}
    assert run.data.tags.items() >= {"method": "fedavg", "seed": "0", "scenario": "digits, s, p"}.items()
    (used,) = run.inputs.dataset_inputs
    assert used.dataset.digest == "5" * 36
    assert run.info.artifact_uri.startswith((tmp_path / "mlartifacts").as_uri())


def test_an_experiment_is_model_training_and_has_a_view_which_stays_as_someone_changed_it(
    settings: TrackingSettings, tmp_path: Path
) -> None:
    client = MlflowClient(settings.uri)
    old = client.create_experiment("digits s")  # before there were views

    def track() -> dict[str, str]:
        with track_experiment(make_experiment(), settings, tmp_path, print):
            return client.get_experiment(old).tags

    assert list_addresses(client, "http://there") == {}
    tags = track()
    assert tags["mlflow.experimentKind"] == "custom_model_development"
    state = json.loads(json.loads(tags[VIEW])["state"])
    sections = {section["uuid"] for section in state["compareRunSections"]}
    assert sections == {chart["metricSectionId"] for chart in state["compareRunCharts"]}
    (key,) = parse_qs(urlsplit(list_addresses(client, "http://there")["digits s"]).fragment)["viewStateShareKey"]
    assert VIEW.endswith(f".{key}")
    client.set_experiment_tag(old, VIEW, "mine")
    assert track()[VIEW] == "mine"


def test_the_same_experiment_is_the_same_run_another_is_another(settings: TrackingSettings, tmp_path: Path) -> None:
    ids = []
    for each in (
        make_experiment(),
        make_experiment(),
        make_experiment(settings={"a": 2}),
        make_experiment(label="fedavg-0"),
    ):
        with track_experiment(each, settings, tmp_path, print) as tracking:
            ids.append(tracking.id)
    assert ids[0] == ids[1] == ids[3] != ids[2]
    assert len(find_runs(settings)) == 2


def test_a_resumed_run_has_no_number_twice(settings: TrackingSettings, tmp_path: Path) -> None:
    for upto in (1, 2, 2):
        with track_experiment(make_experiment(), settings, tmp_path, print) as tracking:
            log_tasks(tracking, upto)
    client = MlflowClient(settings.uri)
    losses = client.get_metric_history(tracking.id, "train/loss")
    assert [(m.step, m.value) for m in losses] == [(0, 0.0), (1, 0.5), (2, 1.0), (3, 1.5)]
    assert [m.step for m in client.get_metric_history(tracking.id, "acc/task_agnostic")] == [1, 2]
    assert client.get_metric_history(tracking.id, "forgetting_ft/task_agnostic") == []


@pytest.mark.parametrize("on", [False, True])
def test_answers_are_metrics_where_clients_can_fail(on: bool, settings: TrackingSettings, tmp_path: Path) -> None:
    counts = {"answers": [3, 2], "late": [0, 1], "missing": [1, 0], "lost": [0, 2]}
    rounds = make_rounds(0).with_columns(pl.Series(name, values) for name, values in counts.items())
    with track_experiment(make_experiment(faults=on), settings, tmp_path, print) as tracking:
        tracking.log_task(1, rounds, SUMMARY)
    client = MlflowClient(settings.uri)
    logged = {name: [m.value for m in client.get_metric_history(tracking.id, f"train/{name}")] for name in counts}
    assert logged == (counts if on else {name: [] for name in counts})


def test_monitors_are_metrics_with_the_step_that_they_belong_to(settings: TrackingSettings, tmp_path: Path) -> None:
    monitored = make_table(
        [
            make_row("rho", 0, 1.0, round=0),
            make_row("rho", 1, 0.75, round=1),
            make_row("beta", 1, 0.5, round=1, about=0),
            make_row("loss_increase", 1, 0.25, about=0),
            make_row("used_share", 1, 0.2, layer="backbone.fc1"),
            make_row("used_share", 1, 0.3),
            make_row("accuracy", 1, 0.5, round=1, about=0),
            make_row("accuracy", 1, 0.7, round=1),
            make_row("drift", 1, 2.0, round=0),
            make_row("drift_bound", 1, 9.0, round=0),
        ]
    )
    with track_experiment(make_experiment(), settings, tmp_path, print) as tracking:
        tracking.log_task(1, make_rounds(0), SUMMARY)
        tracking.log_task(2, make_rounds(1), SUMMARY, monitored)
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
    logged = {name: [(m.step, m.value) for m in client.get_metric_history(tracking.id, name)] for name in expected}
    assert logged == expected


@pytest.mark.parametrize(("problem", "status"), [(ValueError("no"), "FAILED"), (KeyboardInterrupt(), "KILLED")])
def test_a_run_that_ended_badly_says_so_until_it_goes_on(
    settings: TrackingSettings, tmp_path: Path, problem: BaseException, status: str
) -> None:
    with pytest.raises(type(problem)), track_experiment(make_experiment(), settings, tmp_path, print):
        raise problem
    (run,) = find_runs(settings)
    assert run.info.status == status
    assert type(problem).__name__ in run.data.tags["fcl.error"]
    with track_experiment(make_experiment(), settings, tmp_path, print):
        (run,) = find_runs(settings)
        assert run.info.status == "RUNNING"
        assert "fcl.error" not in run.data.tags


def test_what_mlflow_does_not_answer_is_pending_and_reported_once(
    settings: TrackingSettings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also to the run's end: then the next run of the same command logs it."""

    def fail(*_: Any, **__: Any) -> None:
        raise MlflowException("connection refused\nafter 2 retries")

    messages: list[str] = []
    with track_experiment(make_experiment(), settings, tmp_path, messages.append) as tracking:
        with monkeypatch.context() as patch:
            patch.setattr(MlflowClient, "log_batch", fail)
            log_tasks(tracking, 2)
            assert len(tracking.pending) == 2
        tracking.log_task(3, make_rounds(2), SUMMARY)
        assert tracking.pending == []
    (line,) = messages
    assert line.startswith(f"tracking.uri: {settings.uri} stopped answering: connection refused. The run goes on ")
    client = MlflowClient(settings.uri)
    assert [m.step for m in client.get_metric_history(tracking.id, "train/loss")] == [*range(6)]

    other = make_experiment(settings={"a": 2})
    with track_experiment(other, settings, tmp_path, messages.append) as tracking, monkeypatch.context() as patch:
        patch.setattr(MlflowClient, "log_batch", fail)
        log_tasks(tracking, 2)
    with track_experiment(other, settings, tmp_path, messages.append) as tracking:
        log_tasks(tracking, 2)
    assert len(messages) == 2
    assert [m.step for m in client.get_metric_history(tracking.id, "train/loss")] == [*range(4)]


def test_an_error_of_the_run_is_raised_even_if_mlflow_does_not_answer(
    settings: TrackingSettings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any) -> None:
        raise ConnectionError

    monkeypatch.setattr(MlflowClient, "set_terminated", fail)
    with pytest.raises(ZeroDivisionError), track_experiment(make_experiment(), settings, tmp_path, print):
        _ = 1 / 0


def test_a_complete_run_is_left_alone(settings: TrackingSettings, tmp_path: Path) -> None:
    with track_experiment(make_experiment(), settings, tmp_path, print) as tracking:
        log_tasks(tracking, 2)
        tracking.client.set_terminated(tracking.id, "FINISHED")
    (before,) = find_runs(settings)
    with track_experiment(make_experiment(), settings, tmp_path, print) as tracking:
        assert tracking.complete
        log_tasks(tracking, 2)
    with pytest.raises(ZeroDivisionError), track_experiment(make_experiment(), settings, tmp_path, print):
        _ = 1 / 0
    (after,) = find_runs(settings)
    assert after.to_dictionary() == before.to_dictionary()


def test_facts_of_the_result_are_tracked(
    settings: TrackingSettings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tasks.mlflow.artifacts.log_artifacts", lambda *_: None)
    plain: dict[str, Any] = dict.fromkeys(("seconds", "bytes_up", "bytes_down", "bytes_kept"), 1)
    plain |= {"metrics": {"task_aware": {"acc": 0.5}}, "settings": {"evaluation": {"batch_size": 64}}}
    plain |= {"digests": {"state": "5"}, "command": "fcl run", "peaks": {}, "client_bytes": {}}
    privacy = {"epsilon": 7.25, "delta": 1e-5, "covers": "sketches", "clip": 1.0}
    more = {"preset": {"name": "tiny"}, "scaled": {"rounds": [4, 2], "of": [20, 10]}, "privacy": privacy}
    names = ("preset", "scaled", "privacy", "mlflow.note.content")
    tracked = []
    for label, result in (("a-0", plain), ("b-0", plain | more | {"metrics": {"paper_task_predicted": {}}})):
        with track_experiment(
            make_experiment(label=label, settings={"label": label}), settings, tmp_path, print
        ) as tracking:
            log_result.fn(tracking, label, tmp_path, result)
        data = tracking.client.get_run(tracking.id).data
        tracked.append(({name: data.tags[name] for name in names if name in data.tags}, data.metrics.get("epsilon")))
    (of_plain, none), (tags, epsilon) = tracked
    note = of_plain.pop("mlflow.note.content")
    assert (of_plain, none) == ({}, None)
    assert "| Task-aware&emsp; | 50.0&emsp; | –&emsp; |" in note
    assert "](get-artifact?path=accuracy.png&run_uuid=" in note
    assert note.endswith("`fcl run`")
    note = tags.pop("mlflow.note.content")
    of_privacy = "epsilon 7.25 at delta 1e-05, for sketches."
    assert (tags, epsilon) == ({"preset": "tiny", "scaled": "6 of 30 rounds", "privacy": of_privacy}, 7.25)
    assert "A batch: 64 samples" in note
    assert of_privacy in note


def test_thousands_of_numbers_and_hundreds_of_settings_fit(settings: TrackingSettings, tmp_path: Path) -> None:
    many = {f"setting_{i}": i for i in range(250)}
    with track_experiment(make_experiment(settings=many), settings, tmp_path, print) as tracking:
        tracking.log_task(1, make_rounds(0, count=700), SUMMARY)
    assert len(MlflowClient(settings.uri).get_metric_history(tracking.id, "train/loss")) == 700
    assert len(find_runs(settings)[0].data.params) == 252  # and method and seed


def test_a_thread_makes_no_stray_run(settings: TrackingSettings, tmp_path: Path) -> None:
    with track_experiment(make_experiment(), settings, tmp_path, print) as tracking:
        thread = threading.Thread(target=log_tasks, args=(tracking, 2))
        thread.start()
        thread.join()
    (run,) = find_runs(settings)
    assert run.data.metrics["train/loss"] == 1.5


def test_a_dvc_stage_is_a_tag(settings: TrackingSettings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(os.environ, "DVC_STAGE", "experiment@fedavg-0")
    with track_experiment(make_experiment(), settings, tmp_path, print):
        pass
    assert find_runs(settings)[0].data.tags["dvc.stage"] == "experiment@fedavg-0"


@pytest.mark.slow
def test_a_database_is_created_completely_or_not_at_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """MLflow refuses one whose creation was killed. Behind a link it lies at the link's target."""
    monkeypatch.chdir(tmp_path)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(MlflowClient, "search_experiments", lambda *_, **__: 1 / 0)
        killed = TrackingSettings(uri="sqlite:///killed.db")
        with pytest.raises(ZeroDivisionError), track_experiment(make_experiment(), killed, tmp_path, print):
            pytest.fail("nothing to track")
    assert not list(tmp_path.glob("*killed.db*"))
    Path("there").mkdir()
    Path("mlflow.db").symlink_to("there/mlflow.db")
    settings = TrackingSettings(uri="sqlite:///mlflow.db")
    with track_experiment(make_experiment(), settings, tmp_path, print):
        pass
    assert len(find_runs(settings)) == 1
    assert Path("mlflow.db").is_symlink()
    assert sorted(path.name for path in Path("there").iterdir()) == ["mlflow.db"]


@pytest.mark.parametrize("uri", ["gopher://x", "sqlite:////dev/null/mlflow.db", "sqlite:///params.yaml", "./mlruns"])
def test_a_store_that_cannot_be_used_is_a_mistake(uri: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("params.yaml").write_text("no database: at all\n")
    refused = pytest.raises(UserError, match=f"^tracking.uri: {uri} cannot be used: ")
    with refused, track_experiment(make_experiment(), TrackingSettings(uri=uri), tmp_path, print):
        pytest.fail("nothing to track")


def test_the_matrix_as_table_and_picture() -> None:
    matrix = Matrix("accuracy", "tasks learned", 0, "task", np.array([[0.1, np.nan], [0.9, 0.2], [0.3, 0.8]]))
    assert to_table(matrix) == {
        "columns": ["tasks learned", "task 1", "task 2"],
        "data": [[0, 0.1, None], [1, 0.9, 0.2], [2, 0.3, 0.8]],
    }
    axes, bar = draw_heat_map(matrix).axes
    assert [text.get_text() for text in axes.texts] == ["10", "90", "20", "30", "80"]
    assert bar.get_ylim() == (0, 100)
    assert axes.collections[0].get_array()[1, 0] == 90


def test_the_picture_of_many_tasks_is_no_larger_than_a_screen() -> None:
    matrix = Matrix("accuracy", "tasks learned", 0, "task", np.full((101, 100), 0.5))
    figure = draw_heat_map(matrix)
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
    assert list(read_matrices(tmp_path)) == ["accuracy"]
    confusion = [("task_predicted", 1, 0, 0, 4), ("task_predicted", 2, 0, 0, 3), ("task_predicted", 2, 0, 1, 1)]
    pl.DataFrame(confusion, ["reading", "after", "task", "predicted", "count"], orient="row").write_parquet(
        tmp_path / "confusion.parquet"
    )
    matrices = read_matrices(tmp_path)
    assert list(matrices) == ["accuracy", "confusion_task_predicted"]
    assert to_table(matrices["confusion_task_predicted"]) == {
        "columns": ["task", "predicted task 1", "predicted task 2"],
        "data": [[1, 0.75, 0.25], [2, None, None]],
    }
    axes = draw_heat_map(matrices["confusion_task_predicted"]).axes[0]
    assert [label.get_text() for label in axes.get_yticklabels()] == ["1", "2"]


@pytest.mark.parametrize("routed", [False, True], ids=["no router", "router"])
def test_the_tracked_model_answers_like_the_network(
    routed: bool, settings: TrackingSettings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MLFLOW_ALLOW_PICKLE_DESERIALIZATION", "false")
    spec = ModelSpec({"backbone": "mlp", "hidden": 8}, (1, 4, 4), "growing", ((0, 1), (2,)))
    network = build_network(spec, torch.Generator().manual_seed(0)).eval()
    folder = tmp_path / "model"
    trees.save(dict(network.state_dict()), folder / "weights.safetensors")
    write_json(folder / "spec.json", spec.to_json())
    tasks = [{"name": f"task {t}", "permutation": None} for t in range(2)]
    facts = {
        "method": "fedavg",
        "classes": ["ant", "bee", "cat"],
        "tasks": tasks,
        "mean": [0.5],
        "std": [0.25],
        "notes": [],
    }
    write_json(folder / "serving.json", facts)
    router = Router((torch.eye(8)[:, :3], torch.eye(8)[:, 3:5]), torch.eye(2)[None], torch.ones(1, 2, dtype=torch.bool))
    if routed:
        trees.save(router.to_tree(), folder / "router.safetensors")
    with track_experiment(make_experiment(), settings, tmp_path, print) as tracking:
        log_model(tracking.client, tracking.id, folder)
    (run,) = find_runs(settings)
    (logged,) = run.outputs.model_outputs

    images = np.random.default_rng(0).integers(0, 256, (20, 1, 4, 4), dtype=np.uint8)
    with torch.inference_mode():
        features = network.backbone((torch.from_numpy(images) / 255 - 0.5) / 0.25)
        answers = network.compute_logits(features).argmax(1)
        if routed:
            unrouted, of_first = answers, network.compute_logits(features, 0).argmax(1)
            answers = torch.where(router.score_samples(features).argmax(1) == 0, of_first, 2)
            assert not torch.equal(answers, unrouted)
    served = mlflow.pyfunc.load_model(f"models:/{logged.model_id}")
    rows = served.predict(pd.DataFrame({"image": [*images]}))
    assert rows["class"].tolist() == [facts["classes"][i] for i in answers]
    assert set(served.predict(pd.DataFrame({"image": [*images]}), {"task": 2})["class"]) == {"cat"}
    assert not [path for path in (tmp_path / "mlartifacts").rglob("*") if path.suffix in (".pkl", ".pt", ".pth")]
