"""`fcl stream` as processes of their own: killed at random moments, several at once, by the clock."""

import json
import os
import random
import signal
import subprocess
import time
from collections.abc import Callable
from contextlib import suppress
from hashlib import sha256
from pathlib import Path
from typing import Any

import psutil
import pytest
from mlflow import MlflowClient
from mlflow.entities import Run

from fclmodels.data.arrivals.arrival_folders import REASON
from fclmodels.storage.files import is_locked, lock_file

KILLS = 4
LOCK = Path(".fcl/locks/stream-arrivals")
pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]
Arrive = Callable[..., Path]
Start = Callable[..., "subprocess.Popen[str]"]
WaitFor = Callable[[Callable[[], Any], Path], Any]


@pytest.fixture
def project(tmp_path: Path, stream_settings: str) -> Path:
    return make_project(tmp_path / "project", stream_settings)


def make_project(folder: Path, settings: str) -> Path:
    folder.mkdir()
    (folder / "params.yaml").write_text(settings)
    return folder


def add_arrivals(folder: Path, arrive: Arrive) -> Path:
    """Add two arrivals that can be learned, and between them one that cannot, with fixed times; return the folder."""
    for moment, (name, *classes) in enumerate([("first", 0, 1), ("broken", 5), ("second", 2, 3)]):
        tree = arrive(folder / "incoming", name, *classes)
        os.utime(tree / "COMPLETE", ns=(10**18 + moment,) * 2)
    (folder / "incoming" / "broken" / "digit 5" / "3.png").write_bytes(b"no image")
    return folder


def read_logs(folder: Path) -> list[str]:
    """Return the output of each start of `fcl`."""
    return [log.read_text() for log in sorted(folder.glob("fcl-*.log"))]


def test_a_stream_killed_at_random_moments_ends_as_if_it_never_was(
    project: Path,
    tmp_path: Path,
    stream_settings: str,
    start: Start,
    server: str,
    wait_for: WaitFor,
    arrive: Arrive,
) -> None:
    def start_stream(folder: Path) -> "subprocess.Popen[str]":
        process = start(folder, "fcl", "stream", "--once", PREFECT_API_URL=server)
        wait_for(lambda: is_locked(folder / LOCK) or process.poll() is not None, folder)
        return process

    undisturbed = add_arrivals(make_project(tmp_path / "undisturbed", stream_settings), arrive)
    process, started = start_stream(undisturbed), time.monotonic()
    assert process.wait() == 0, read_logs(undisturbed)
    seconds = time.monotonic() - started

    add_arrivals(project, arrive)
    moments = random.Random(0)
    for _ in range(KILLS):
        process = start_stream(project)
        with suppress(subprocess.TimeoutExpired):
            process.wait(moments.uniform(0, 0.6) * seconds)
        process.kill()
        assert process.wait() in (0, -signal.SIGKILL), read_logs(project)
    assert start_stream(project).wait() == 0, read_logs(project)
    assert start_stream(project).wait() == 0
    assert read_logs(project)[-1] == "nothing new has arrived\n"
    assert read_outcome(project) == read_outcome(undisturbed)


def read_outcome(folder: Path) -> dict[str, Any]:
    """Return all that a stream leaves, without times, ids, paths and what depends on them."""
    client = MlflowClient(f"sqlite:///{folder}/mlflow.db")
    runs = client.search_runs([experiment.experiment_id for experiment in client.search_experiments()])
    number = {run.info.run_id: run.data.tags["splits"] for run in runs}
    assert len(set(number.values())) == len(runs)
    result = json.loads((folder / "streams/arrivals/result.json").read_text())
    versions = client.search_model_versions("name = 'arrivals'")
    return {
        "stream": digest_files(folder / "data/streams"),
        "run folder": digest_files(folder / "streams", without=("rounds.parquet", "result.json")),
        "result": {name: value for name, value in result.items() if name not in VARYING},
        "steps": sorted(done.name for done in (folder / ".fcl/store/done").iterdir()),
        "aliases": {name: str(v) for name, v in client.get_registered_model("arrivals").aliases.items()},
        "versions": {str(version.version): (version.tags, number[version.run_id]) for version in versions},
        "runs": {number[run.info.run_id]: read_run(client, run) for run in runs},
        "reason": (folder / "incoming/broken" / REASON).read_text(),
        "leftovers": sorted(path.name for path in (folder / "data").rglob(".*")),
    }


VARYING = ("seconds", "timings", "peaks", "files", "seal")


def digest_files(folder: Path, without: tuple[str, ...] = ()) -> dict[str, str]:
    files = [path for path in sorted(folder.rglob("*")) if path.is_file() and path.name not in without]
    return {str(path.relative_to(folder)): sha256(path.read_bytes()).hexdigest() for path in files}


def read_run(client: MlflowClient, run: Run) -> dict[str, Any]:
    """Return MLflow's content of a run: tags, params, each point of each curve, models, artifacts."""
    history = {name: client.get_metric_history(run.info.run_id, name) for name in run.data.metrics}
    models = client.search_logged_models([run.info.experiment_id], f"source_run_id = '{run.info.run_id}'")
    assert run.outputs is not None
    assert run.inputs is not None
    return {
        "status": run.info.status,
        "params": run.data.params,
        "tags": {name: run.data.tags[name] for name in ("method", "seed", "fcl.identity", "fcl.learned")},
        "curves": {
            name: [(m.step, None if name.endswith("seconds") or "peak_" in name else m.value) for m in metrics]
            for name, metrics in history.items()
        },
        "models": [str(model.status) for model in models],
        "outputs": len(run.outputs.model_outputs),
        "data": [entry.dataset.name for entry in run.inputs.dataset_inputs],
        "artifacts": sorted(file.path for file in client.list_artifacts(run.info.run_id)),
    }


def test_several_at_once_wait_for_each_other_and_one_of_them_learns(
    project: Path, start: Start, server: str, wait_for: WaitFor, arrive: Arrive
) -> None:
    arrive(project / "incoming", "first", 0, 1)
    waiting = "arrivals: waiting for another fcl stream\n"
    with lock_file(project / LOCK):
        nights = [start(project, "fcl", "stream", "--once", PREFECT_API_URL=server) for _ in range(2)]
        wait_for(lambda: read_logs(project) == [waiting] * 2, project)
    assert [night.wait() for night in nights] == [0, 0]
    learner, idler = sorted(read_logs(project), key=len, reverse=True)
    assert "arrivals: version 1 is the champion.\n" in learner
    assert idler == f"{waiting}nothing new has arrived\n"


def test_a_stream_that_serves_itself_goes_on_after_a_kill_and_ends_when_asked_to(
    project: Path, start: Start, wait_for: WaitFor, arrive: Arrive
) -> None:
    """On the project's own server. The process of a scheduled run is killed; the next one does its work."""

    def serve() -> "subprocess.Popen[str]":
        return start(project, "fcl", "stream", "--serve", "--cron", "* * * * * */10")  # the sixth field is seconds

    arrive(project / "incoming", "first", 0, 1)
    serving = serve()
    wait_for(lambda: is_locked(project / LOCK), project)
    for child in psutil.Process(serving.pid).children():
        if "spawn_main" in " ".join(child.cmdline()):
            child.kill()
    wait_for(lambda: "version 1 is the champion" in read_logs(project)[0], project)
    end_with(serving, signal.SIGTERM)

    arrive(project / "incoming", "second", 2, 3)
    serving = serve()
    wait_for(lambda: "version 2 is the champion" in read_logs(project)[1], project)
    end_with(serving, signal.SIGINT)
    assert not any(word in "".join(read_logs(project)) for word in ("Traceback", "Warning"))
    assert [row.version for row in MlflowClient(f"sqlite:///{project}/mlflow.db").search_model_versions()] == [2, 1]


def end_with(process: "subprocess.Popen[str]", end: signal.Signals) -> None:
    """Send a signal, and check that the process succeeds and that none of its family is left."""
    family = [psutil.Process(process.pid), *psutil.Process(process.pid).children(recursive=True)]
    process.send_signal(end)
    assert process.wait(300) == 0
    _, survivors = psutil.wait_procs(family, 60)
    assert survivors == []


def test_a_wrong_schedule_is_reported_in_one_line(project: Path, start: Start, server: str) -> None:
    assert start(project, "fcl", "stream", "--serve", "--cron", "at two", PREFECT_API_URL=server).wait() == 2
    right = 'minute, hour, day, month, weekday, as "0 2 * * *"'
    assert read_logs(project) == [f'--cron: "at two" is not a schedule. Right: {right}.\n']
