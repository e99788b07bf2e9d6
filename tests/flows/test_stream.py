"""The stream of arrivals: no step is repeated, a kill changes nothing, and the gate decides on the champion."""

import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from mlflow import MlflowClient
from prefect.client.orchestration import get_client

import flows.stream
import tasks.mlflow.registry
from fclmodels.data.arrivals import growing_stream
from fclmodels.data.arrivals.arrival_folders import MARKER, REASON
from fclmodels.data.splits.split_reader import Splits
from fclmodels.experiment.experiment import Experiment
from fclmodels.experiment.stages import Step
from fclmodels.settings.load import load_params
from fclmodels.storage.files import lock_file
from fclmodels.storage.object_store import Store

TASK_1 = ["learn 0", "conclude 0", "evaluate 1", "judge 1"]
TASK_2 = ["learn 1", "conclude 1", "evaluate 2", "judge 2"]
Fcl = Callable[..., int]
Drop = Callable[..., Path]
ANY = ("--set", "arrivals.gate.acc=0", "--set", "arrivals.gate.forgetting=1", "--set", "partition.val=0.2")


@pytest.fixture
def drop(project: Path, arrive: Callable[..., Path]) -> Drop:
    """Return a function with which some digits arrive in this project."""
    return lambda name, *classes: arrive(project / "incoming", name, *classes)


@pytest.fixture
def night(fcl: Fcl, project: Path, capsys: pytest.CaptureFixture[str]) -> Callable[..., list[dict[str, Any]]]:
    """Return a function that runs `fcl stream` once and returns its rows."""

    def run(*settings: str) -> list[dict[str, Any]]:
        capsys.readouterr()
        assert fcl("stream", "-q", "--json", *ANY, *settings) == 0
        return json.loads(capsys.readouterr().out)

    return run


def connect(project: Path) -> MlflowClient:
    return MlflowClient(f"sqlite:///{project}/mlflow.db")


def read_aliases(project: Path) -> dict[str, str]:
    aliases = connect(project).get_registered_model("arrivals").aliases
    return {alias: str(version) for alias, version in aliases.items()}


def read_versions(project: Path) -> dict[str, dict[str, str]]:
    return {str(v.version): v.tags for v in connect(project).search_model_versions("name = 'arrivals'")}


def read_model_digest() -> str:
    return json.loads(Path("streams/arrivals/result.json").read_text())["digests"]["model"]


def test_tasks_are_learned_registered_and_gated_and_nothing_is_done_twice(
    night: Callable, drop: Drop, project: Path, steps: list[str], fcl: Fcl, capsys: pytest.CaptureFixture[str]
) -> None:
    drop("first", 0, 1)
    bad = drop("broken", 5)
    (bad / "digit 5" / "3.png").write_bytes(b"no image")
    drop("second", 2, 3)
    rows = night()
    assert [(row["task"], row["became"], row["version"]) for row in rows] == [
        ("first", "champion", "1"),
        ("broken", "set aside", None),
        ("second", "champion", "2"),
    ]
    assert "unreadable images: 1 (digit 5/3.png" in (bad / REASON).read_text()
    assert steps == ["begin 0", *TASK_1, *TASK_2]
    assert read_aliases(project) == {"task-01": "1", "task-02": "2", "champion": "2"}
    splits = growing_stream.join_parts(growing_stream.GrowingStream(project / "data/streams/arrivals").parts)[1][
        "digest"
    ]
    tags = read_versions(project)["2"]
    assert {"method": "fedavg", "tasks": "2", "splits": splits}.items() <= tags.items()
    result = json.loads(Path("streams/arrivals/result.json").read_text())
    measured = result["metrics"]["task_predicted"]
    assert float(tags["acc"]) == pytest.approx(measured["acc"], abs=1e-4)
    assert float(tags["forgetting"]) == pytest.approx(measured["fgt"], abs=1e-4)
    assert result["digests"]["splits"] == splits
    assert result["command"] == "fcl stream --once"

    steps.clear()
    before = read_versions(project)
    assert night() == []
    assert steps == []
    assert read_versions(project) == before
    assert fcl("stream", *ANY) == 0
    assert "nothing new has arrived" in capsys.readouterr().err

    (bad / "digit 5" / "3.png").unlink()
    (bad / REASON).unlink()
    assert [(row["task"], row["version"]) for row in night()] == [("broken", "3")]
    assert steps == ["learn 2", "conclude 2", "evaluate 3", "judge 3"]


@pytest.mark.slow
def test_two_states_are_stored_the_older_one_to_fall_back_on(
    night: Callable, drop: Drop, steps: list[str], project: Path, fcl: Fcl, capsys: pytest.CaptureFixture[str]
) -> None:
    """And the tables of all tasks, from which the run folder is made."""

    def stages() -> list[str]:
        records = [json.loads(file.read_text()) for file in Path(".fcl/store/done").iterdir()]
        return sorted(f"{o['stage']} {o['task']}" for o in records if "stage" in o)

    def states() -> set[Path]:
        records = [json.loads(file.read_text()) for file in Path(".fcl/store/done").iterdir()]
        digests = {o["objects"]["state"] for o in records if "state" in o.get("objects", {})}
        return {Path(".fcl/store", digest[:2], digest) for digest in digests}

    drop("first", 0, 1)
    drop("second", 2, 3)
    night()
    drop("third", 4, 5)
    night()
    task_3 = [step.replace("2", "3").replace("1", "2") for step in TASK_2]
    assert stages() == sorted(["evaluate 1", "judge 1", *TASK_2, *task_3])
    assert len(list(Path(".fcl/results").iterdir())) == len(stages())
    digest, tags = read_model_digest(), read_versions(project)
    records = [json.loads(file.read_text()) for file in Path(".fcl/store/done").iterdir()]
    (newest,) = [o["objects"]["state"] for o in records if o.get("stage") == "conclude" and o["task"] == 2]
    Path(".fcl/store", newest[:2], newest).unlink()
    steps.clear()
    assert night() == []
    assert "learn 2" in steps
    assert "learn 1" not in steps
    assert (read_model_digest(), read_versions(project)) == (digest, tags)
    for file in states():
        file.unlink()
    assert fcl("stream", *ANY) == 2
    assert "Delete .fcl/store/done to learn all tasks again." in capsys.readouterr().err
    shutil.rmtree(".fcl/store/done")
    assert night() == []
    assert (read_model_digest(), read_versions(project)) == (digest, tags)


def test_a_model_that_the_gate_rejects_is_the_challenger_with_the_reasons(
    night: Callable, drop: Drop, project: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    drop("first", 0, 1)
    night()
    drop("second", 2, 3)
    events: list[dict[str, Any]] = []
    monkeypatch.setattr(tasks.mlflow.registry, "emit_event", lambda **event: events.append(event))
    (row,) = night("--set", "arrivals.gate.acc=1", "--set", "arrivals.gate.forgetting=-1")
    assert row["became"] == "challenger"
    assert "is below arrivals.gate.acc, 100.0 %; forgetting" in row["why"]
    assert read_aliases(project) == {"task-01": "1", "task-02": "2", "champion": "1", "challenger": "2"}
    assert read_versions(project)["2"]["gate"] == f"challenger; {row['why']}"
    (event,) = events
    assert event["event"] == "fcl.stream.challenger"
    assert event["payload"] == {"about": "version 2, 2 tasks", "reasons": row["why"].split("; ")}
    with get_client(sync_client=True) as client:
        artifacts = [artifact for artifact in client.read_artifacts() if artifact.key == "stream-arrivals"]
    newest = max(artifacts, key=lambda artifact: artifact.created)
    assert newest.description == "challenger: version 2, 2 tasks"
    assert all(f"- {reason}" in str(newest.data) for reason in row["why"].split("; "))


def test_a_project_with_dvc_and_without_git_is_told_in_one_line_what_to_do(
    night: Callable, drop: Drop, project: Path, fcl: Fcl, capsys: pytest.CaptureFixture[str]
) -> None:
    (project / ".dvc").mkdir()
    drop("first", 0, 1)
    assert fcl("stream", "-q", *ANY) == 2
    assert capsys.readouterr().err == (
        f"dvc add data/streams/arrivals: {project} is not a git repository, and the project has a folder .dvc. "
        "Run git init, or dvc config core.no_scm true to do without.\n"
    )
    subprocess.run([sys.executable, "-m", "dvc", "config", "core.no_scm", "true"], check=True)
    assert [row["became"] for row in night()] == ["champion"]
    assert (project / "data/streams/arrivals.dvc").is_file()


MOMENTS = {
    "taken in": (flows.stream, "take_in"),
    "versioned": (flows.stream, "add_to_dvc"),
    "assembled": (flows.stream, "assemble"),
    "a step": (Step, "run"),
    "outcomes recorded": (Store, "record"),
    "published": (flows.stream, "publish"),
    "tracked": (flows.stream, "log_result"),
    "version made": (MlflowClient, "create_model_version"),
    "alias set": (MlflowClient, "set_registered_model_alias"),
    "announced": (tasks.mlflow.registry, "announce"),
}


@pytest.fixture
def train_without_stream(project: Path) -> Callable[[], str]:
    """Return a function that runs one experiment over all tasks and returns the model's digest."""

    def run() -> str:
        parts = growing_stream.GrowingStream(project / "data/streams/arrivals").parts
        splits = Splits.open(growing_stream.assemble(parts, project / "all-tasks"))
        with Experiment(load_params("params.yaml"), "fedavg", 0, splits, project / "home") as experiment:
            return experiment.run(project / "alone")["digests"]["model"]

    return run


@pytest.mark.timeout(300)
@pytest.mark.slow
@pytest.mark.parametrize("moment", MOMENTS)
def test_a_stream_that_is_stopped_again_and_again_ends_as_if_it_never_was(
    moment: str,
    fcl: Fcl,
    night: Callable,
    drop: Drop,
    train_without_stream: Callable[[], str],
    project: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It stops right after the first such moment, the next run after its second, until one ends."""
    drop("first", 0, 1)
    drop("second", 2, 3)
    owner, name = MOMENTS[moment]
    original = getattr(owner, name)
    stops = 0
    while True:
        remaining = stops + 1

        def stop(*positional: Any, **named: Any) -> Any:
            nonlocal remaining
            outcome = original(*positional, **named)
            remaining -= 1
            if remaining == 0:
                raise KeyboardInterrupt
            return outcome

        with monkeypatch.context() as patch:
            patch.setattr(owner, name, stop)
            if fcl("stream", "-q", *ANY) == 0:
                break
        stops += 1
    assert stops >= 1
    assert read_model_digest() == train_without_stream()
    assert read_aliases(project) == {"task-01": "1", "task-02": "2", "champion": "2"}
    assert {tags["tasks"] for tags in read_versions(project).values()} == {"1", "2"}
    assert len(read_versions(project)) == 2
    assert night() == []


@pytest.mark.slow
def test_the_next_task_starts_from_the_newest_state_whatever_else_was_changed(
    night: Callable, drop: Drop, steps: list[str], project: Path
) -> None:
    drop("first", 0, 1)
    night()
    steps.clear()
    drop("second", 2, 3)
    assert [row["version"] for row in night("--set", "optimizer.lr=0.01")] == ["2"]
    assert steps == TASK_2


@pytest.mark.slow
def test_another_model_begins_anew_and_is_champion_only_when_it_knows_as_many_tasks(
    night: Callable, drop: Drop, steps: list[str], project: Path
) -> None:
    drop("first", 0, 1)
    drop("second", 2, 3)
    night()
    steps.clear()
    rows = night("--set", "model.hidden=9")
    assert [(row["became"], row["why"]) for row in rows] == [
        ("challenger", "it knows 1 tasks, the champion 2"),
        ("champion", ""),
    ]
    assert steps.count("learn 0") == steps.count("learn 1") == 1
    assert read_aliases(project) == {"task-01": "3", "task-02": "4", "champion": "4", "challenger": "3"}


@pytest.mark.slow
def test_status_shows_the_state_of_the_stream(
    night: Callable, drop: Drop, fcl: Fcl, project: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def read_rows() -> dict[str, tuple[str, str | None, str | None]]:
        capsys.readouterr()
        assert fcl("status", "--json", *ANY) == 0
        table = json.loads(capsys.readouterr().out)
        return {row["what"]: (row["state"], row["why"], row["steps"]) for row in table if "runs/" not in row["what"]}

    before = read_rows()
    drop("first", 0, 1)
    (drop("later", 2, 3) / MARKER).unlink()
    waits = {
        "streams/arrivals": ("not begun", None, "0 of 0 tasks registered"),
        "incoming/first": ("waiting", None, None),
        "incoming/later": ("not complete", "has no COMPLETE yet", None),
    }
    assert read_rows() == before | waits
    assert fcl("status", "--set", "tracking.uri=sqlite:///none.db") == 0
    assert not Path("none.db").exists()
    (drop("broken", 5) / "digit 5" / "3.png").write_bytes(b"no image")
    night()
    with lock_file(project / ".fcl/locks/stream-arrivals"):
        current = read_rows()
    state, reason, _ = current.pop("incoming/broken")
    assert (state, "unreadable images: 1 (digit 5/3.png" in str(reason)) == ("set aside", True)
    assert current == before | {
        "streams/arrivals": ("running", None, "1 of 1 tasks registered"),
        "models:/arrivals@champion": ("version 1", None, "1 tasks learned"),
        "incoming/later": waits["incoming/later"],
    }
    assert read_rows()["streams/arrivals"][0] == "done"


REFUSED = {
    "partition.val=0": "partition.val is 0, and the gate judges models by val rows.",
    "federation.rounds=[2, 3]": "federation.rounds lists tasks, and a stream has no last one.",
    "arrivals.method=fedavgg": "arrivals.method: fedavgg is not a method. Did you mean fedavg?",
    "arrivals.name=My Stream": 'arrivals.name is "My Stream"; it must be',
}


@pytest.mark.parametrize(("setting", "message"), REFUSED.items(), ids=REFUSED)
def test_settings_that_cannot_be_a_streams_are_refused(
    setting: str, message: str, fcl: Fcl, project: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert fcl("stream", "--set", setting) == 2
    assert message in capsys.readouterr().err
    assert not Path("data/streams").exists()


def test_a_tracking_server_that_does_not_answer_is_reported_before_any_work(
    drop: Drop, fcl: Fcl, project: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    drop("first", 0, 1)
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
    assert fcl("stream", *ANY, "--set", "tracking.uri=http://127.0.0.1:9") == 2
    assert "tracking.uri: http://127.0.0.1:9 cannot be used: " in capsys.readouterr().err
    assert not Path("data/streams").exists()


def test_a_stream_cannot_change_its_clients_on_the_way(
    night: Callable, drop: Drop, fcl: Fcl, project: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    drop("first", 0, 1)
    night()
    assert fcl("stream", *ANY, "--set", "partition.clients=5") == 2
    assert "partition.clients is 5, and data/streams/arrivals began with 3." in capsys.readouterr().err
