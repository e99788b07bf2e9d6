"""The stream that goes on: nothing is done twice, a kill changes nothing, and the gate says who is the champion."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from mlflow import MlflowClient
from prefect.client.orchestration import get_client

import flows.stream
import tasks.registry
from fclmodels.data import growing
from fclmodels.data.incoming import MARKER, REASON
from fclmodels.data.splits import Splits
from fclmodels.experiment import Experiment, Step
from fclmodels.params import load
from fclmodels.store import Store
from tasks.locking import locked

TASK_1 = ["learn 0", "conclude 0", "evaluate 1", "judge 1"]
TASK_2 = ["learn 1", "conclude 1", "evaluate 2", "judge 2"]
Fcl = Callable[..., int]
Drop = Callable[..., Path]
ANY = ("--set", "arrivals.gate.acc=0", "--set", "arrivals.gate.forgetting=1", "--set", "partition.val=0.2")


@pytest.fixture
def drop(project: Path, arrive: Callable[..., Path]) -> Drop:
    """Some digits arrive in this project."""
    return lambda name, *classes: arrive(project / "incoming", name, *classes)


@pytest.fixture
def night(fcl: Fcl, project: Path, capsys: pytest.CaptureFixture[str]) -> Callable[..., list[dict[str, Any]]]:
    """One run of `fcl stream`; what it says became of each task."""

    def run(*settings: str) -> list[dict[str, Any]]:
        capsys.readouterr()
        assert fcl("stream", "-q", "--json", *ANY, *settings) == 0
        return json.loads(capsys.readouterr().out)

    return run


def registry(project: Path) -> MlflowClient:
    return MlflowClient(f"sqlite:///{project}/mlflow.db")


def aliases(project: Path) -> dict[str, str]:
    found = registry(project).get_registered_model("arrivals").aliases
    return {alias: str(version) for alias, version in found.items()}


def versions(project: Path) -> dict[str, dict[str, str]]:
    return {str(v.version): v.tags for v in registry(project).search_model_versions("name = 'arrivals'")}


def model_digest() -> str:
    return json.loads(Path("streams/arrivals/result.json").read_text())["digests"]["model"]


def test_tasks_are_learned_registered_and_gated_and_nothing_is_done_twice(
    night: Callable, drop: Drop, project: Path, steps: list[str], fcl: Fcl, capsys: pytest.CaptureFixture[str]
) -> None:
    drop("first", 0, 1)
    bad = drop("broken", 5)
    (bad / "digit 5" / "3.png").write_bytes(b"no image")
    drop("second", 2, 3)
    told = night()
    assert [(row["task"], row["became"], row["version"]) for row in told] == [
        ("first", "champion", "1"),
        ("broken", "set aside", None),
        ("second", "champion", "2"),
    ]
    assert "unreadable images: 1 (digit 5/3.png" in (bad / REASON).read_text()
    assert steps == ["begin 0", *TASK_1, *TASK_2]
    assert aliases(project) == {"task-01": "1", "task-02": "2", "champion": "2"}
    splits = growing.joined(growing.GrowingStream(project / "data/streams/arrivals").parts)[1]["digest"]
    tags = versions(project)["2"]
    assert {"method": "fedavg", "tasks": "2", "splits": splits}.items() <= tags.items()
    result = json.loads(Path("streams/arrivals/result.json").read_text())
    measured = result["metrics"]["task_predicted"]
    assert float(tags["acc"]) == pytest.approx(measured["acc"], abs=1e-4)
    assert float(tags["forgetting"]) == pytest.approx(measured["fgt"], abs=1e-4)
    assert result["digests"]["splits"] == splits
    assert result["command"] == "fcl stream --once"

    steps.clear()
    before = versions(project)
    assert night() == []
    assert steps == []
    assert versions(project) == before
    assert fcl("stream", *ANY) == 0
    assert "nothing new has arrived" in capsys.readouterr().err

    (bad / "digit 5" / "3.png").unlink()
    (bad / REASON).unlink()
    assert [(row["task"], row["version"]) for row in night()] == [("broken", "3")]
    assert steps == ["learn 2", "conclude 2", "evaluate 3", "judge 3"]


@pytest.mark.slow
def test_two_states_are_kept_the_older_one_to_fall_back_on(
    night: Callable, drop: Drop, steps: list[str], project: Path, fcl: Fcl, capsys: pytest.CaptureFixture[str]
) -> None:
    """And what the run folder is made of, of all tasks."""

    def stages() -> list[str]:
        done = [json.loads(file.read_text()) for file in Path(".fcl/store/done").iterdir()]
        return sorted(f"{o['stage']} {o['task']}" for o in done if "stage" in o)

    def states() -> set[Path]:
        done = [json.loads(file.read_text()) for file in Path(".fcl/store/done").iterdir()]
        digests = {o["objects"]["state"] for o in done if "state" in o.get("objects", {})}
        return {Path(".fcl/store", digest[:2], digest) for digest in digests}

    drop("first", 0, 1)
    drop("second", 2, 3)
    night()
    drop("third", 4, 5)
    night()
    task_3 = [step.replace("2", "3").replace("1", "2") for step in TASK_2]
    assert stages() == sorted(["evaluate 1", "judge 1", *TASK_2, *task_3])
    assert len(list(Path(".fcl/results").iterdir())) == len(stages())
    digest, tags = model_digest(), versions(project)
    done = [json.loads(file.read_text()) for file in Path(".fcl/store/done").iterdir()]
    (newest,) = [o["objects"]["state"] for o in done if o.get("stage") == "conclude" and o["task"] == 2]
    Path(".fcl/store", newest[:2], newest).unlink()
    steps.clear()
    assert night() == []
    assert "learn 2" in steps
    assert "learn 1" not in steps
    assert (model_digest(), versions(project)) == (digest, tags)
    for file in states():
        file.unlink()
    assert fcl("stream", *ANY) == 2
    assert "Delete .fcl/store/done to learn all tasks again." in capsys.readouterr().err
    shutil.rmtree(".fcl/store/done")
    assert night() == []
    assert (model_digest(), versions(project)) == (digest, tags)


def test_what_the_gate_holds_back_is_the_challenger_and_told_why(
    night: Callable, drop: Drop, project: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    drop("first", 0, 1)
    night()
    drop("second", 2, 3)
    events: list[dict[str, Any]] = []
    monkeypatch.setattr(tasks.registry, "emit_event", lambda **event: events.append(event))
    (told,) = night("--set", "arrivals.gate.acc=1", "--set", "arrivals.gate.forgetting=-1")
    assert told["became"] == "challenger"
    assert "is below arrivals.gate.acc, 100.0 %; forgetting" in told["why"]
    assert aliases(project) == {"task-01": "1", "task-02": "2", "champion": "1", "challenger": "2"}
    assert versions(project)["2"]["gate"] == f"challenger; {told['why']}"
    (event,) = events
    assert event["event"] == "fcl.stream.challenger"
    assert event["payload"] == {"about": "version 2, 2 tasks", "reasons": told["why"].split("; ")}
    with get_client(sync_client=True) as client:
        artifacts = [artifact for artifact in client.read_artifacts() if artifact.key == "stream-arrivals"]
    newest = max(artifacts, key=lambda artifact: artifact.created)
    assert newest.description == "challenger: version 2, 2 tasks"
    assert all(f"- {reason}" in str(newest.data) for reason in told["why"].split("; "))


MOMENTS = {
    "taken in": (flows.stream, "take_in"),
    "versioned": (flows.stream, "version"),
    "assembled": (flows.stream, "assembled"),
    "a step": (Step, "run"),
    "outcomes kept": (Store, "record"),
    "published": (flows.stream, "publish"),
    "tracked": (flows.stream, "track"),
    "version made": (MlflowClient, "create_model_version"),
    "alias set": (MlflowClient, "set_registered_model_alias"),
    "announced": (tasks.registry, "announce"),
}


@pytest.fixture
def whole(night: Callable, project: Path) -> Callable[[], str]:
    """The model's digest from one experiment over all tasks, without a stream."""

    def run() -> str:
        parts = growing.GrowingStream(project / "data/streams/arrivals").parts
        splits = Splits.open(growing.assembled(parts, project / "whole"))
        with Experiment(load("params.yaml"), "fedavg", 0, splits, project / "home") as experiment:
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
    whole: Callable[[], str],
    project: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It stops right after the first such moment, the next run after its second, until one comes through."""
    drop("first", 0, 1)
    drop("second", 2, 3)
    owner, name = MOMENTS[moment]
    done = getattr(owner, name)
    stops = 0
    while True:
        left = stops + 1

        def stopped(*given: Any, **more: Any) -> Any:
            nonlocal left
            outcome = done(*given, **more)
            left -= 1
            if left == 0:
                raise KeyboardInterrupt
            return outcome

        with monkeypatch.context() as patch:
            patch.setattr(owner, name, stopped)
            if fcl("stream", "-q", *ANY) == 0:
                break
        stops += 1
    assert stops >= 1
    assert model_digest() == whole()
    assert aliases(project) == {"task-01": "1", "task-02": "2", "champion": "2"}
    assert {tags["tasks"] for tags in versions(project).values()} == {"1", "2"}
    assert len(versions(project)) == 2
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
def test_another_model_begins_anew_and_is_champion_only_when_it_knows_as_much(
    night: Callable, drop: Drop, steps: list[str], project: Path
) -> None:
    drop("first", 0, 1)
    drop("second", 2, 3)
    night()
    steps.clear()
    told = night("--set", "model.hidden=9")
    assert [(row["became"], row["why"]) for row in told] == [
        ("challenger", "it knows 1 tasks, the champion 2"),
        ("champion", ""),
    ]
    assert steps.count("learn 0") == steps.count("learn 1") == 1
    assert aliases(project) == {"task-01": "3", "task-02": "4", "champion": "4", "challenger": "3"}


@pytest.mark.slow
def test_status_tells_what_the_stream_is_at(
    night: Callable, drop: Drop, fcl: Fcl, project: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def rows() -> dict[str, tuple[str, str | None, str | None]]:
        capsys.readouterr()
        assert fcl("status", "--json", *ANY) == 0
        told = json.loads(capsys.readouterr().out)
        return {row["what"]: (row["state"], row["why"], row["steps"]) for row in told if "runs/" not in row["what"]}

    before = rows()
    drop("first", 0, 1)
    (drop("later", 2, 3) / MARKER).unlink()
    waits = {
        "streams/arrivals": ("not begun", None, "0 of 0 tasks registered"),
        "incoming/first": ("waiting", None, None),
        "incoming/later": ("not complete", "has no COMPLETE yet", None),
    }
    assert rows() == before | waits
    assert fcl("status", "--set", "tracking.uri=sqlite:///none.db") == 0
    assert not Path("none.db").exists()
    (drop("broken", 5) / "digit 5" / "3.png").write_bytes(b"no image")
    night()
    with locked(project / ".fcl/locks/stream-arrivals"):
        found = rows()
    state, reason, _ = found.pop("incoming/broken")
    assert (state, "unreadable images: 1 (digit 5/3.png" in str(reason)) == ("set aside", True)
    assert found == before | {
        "streams/arrivals": ("running", None, "1 of 1 tasks registered"),
        "models:/arrivals@champion": ("version 1", None, "1 tasks learned"),
        "incoming/later": waits["incoming/later"],
    }
    assert rows()["streams/arrivals"][0] == "done"


REFUSED = {
    "partition.val=0": "partition.val is 0, and the gate judges models by val rows.",
    "federation.rounds=[2, 3]": "federation.rounds lists tasks, and a stream has no last one.",
    "arrivals.method=fedavgg": "arrivals.method: fedavgg is not a method. Did you mean fedavg?",
    "arrivals.name=My Stream": 'arrivals.name is "My Stream"; it must be',
}


@pytest.mark.parametrize(("setting", "told"), REFUSED.items(), ids=REFUSED)
def test_settings_that_cannot_be_a_streams_are_refused(
    setting: str, told: str, fcl: Fcl, project: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert fcl("stream", "--set", setting) == 2
    assert told in capsys.readouterr().err
    assert not Path("data/streams").exists()


def test_a_tracking_server_that_does_not_answer_is_told_of_before_any_work(
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
