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

from fclmodels.data.incoming import REASON
from tasks.locking import held, locked

KILLS = 4
LOCK = Path(".fcl/locks/stream-arrivals")
pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]
Arrive = Callable[..., Path]
Start = Callable[..., "subprocess.Popen[str]"]
WaitFor = Callable[[Callable[[], Any], Path], Any]


@pytest.fixture
def project(tmp_path: Path, stream_settings: str) -> Path:
    return made(tmp_path / "project", stream_settings)


def made(folder: Path, settings: str) -> Path:
    folder.mkdir()
    (folder / "params.yaml").write_text(settings)
    return folder


def with_arrivals(folder: Path, arrive: Arrive) -> Path:
    """Two that can be learned, and one that cannot between them; at the same moments in every folder."""
    for moment, (name, *classes) in enumerate([("first", 0, 1), ("broken", 5), ("second", 2, 3)]):
        tree = arrive(folder / "incoming", name, *classes)
        os.utime(tree / "COMPLETE", ns=(10**18 + moment,) * 2)
    (folder / "incoming" / "broken" / "digit 5" / "3.png").write_bytes(b"no image")
    return folder


def said(folder: Path) -> list[str]:
    """What `fcl` printed, start by start."""
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
    def at_work(folder: Path) -> "subprocess.Popen[str]":
        process = start(folder, "fcl", "stream", "--once", PREFECT_API_URL=server)
        wait_for(lambda: held(folder / LOCK) or process.poll() is not None, folder)
        return process

    whole = with_arrivals(made(tmp_path / "whole", stream_settings), arrive)
    undisturbed, begun = at_work(whole), time.monotonic()
    assert undisturbed.wait() == 0, said(whole)
    seconds = time.monotonic() - begun

    with_arrivals(project, arrive)
    moments = random.Random(0)
    for _ in range(KILLS):
        process = at_work(project)
        with suppress(subprocess.TimeoutExpired):
            process.wait(moments.uniform(0, 0.6) * seconds)
        process.kill()
        assert process.wait() in (0, -signal.SIGKILL), said(project)
    assert at_work(project).wait() == 0, said(project)
    assert at_work(project).wait() == 0
    assert said(project)[-1] == "nothing new has arrived\n"
    assert outcome(project) == outcome(whole)


def outcome(folder: Path) -> dict[str, Any]:
    """All that a stream leaves behind but times, and what names them: ids, paths, hours."""
    client = MlflowClient(f"sqlite:///{folder}/mlflow.db")
    runs = client.search_runs([experiment.experiment_id for experiment in client.search_experiments()])
    number = {run.info.run_id: run.data.tags["splits"] for run in runs}
    assert len(set(number.values())) == len(runs)
    result = json.loads((folder / "streams/arrivals/result.json").read_text())
    versions = client.search_model_versions("name = 'arrivals'")
    return {
        "stream": digests(folder / "data/streams"),
        "run folder": digests(folder / "streams", without=("rounds.parquet", "result.json")),
        "result": {name: value for name, value in result.items() if name not in UNLIKE},
        "steps": sorted(done.name for done in (folder / ".fcl/store/done").iterdir()),
        "aliases": {name: str(v) for name, v in client.get_registered_model("arrivals").aliases.items()},
        "versions": {str(version.version): (version.tags, number[version.run_id]) for version in versions},
        "runs": {number[run.info.run_id]: tracked(client, run) for run in runs},
        "reason": (folder / "incoming/broken" / REASON).read_text(),
        "left over": sorted(path.name for path in (folder / "data").rglob(".*")),
    }


UNLIKE = ("seconds", "timings", "files", "seal")


def digests(folder: Path, without: tuple[str, ...] = ()) -> dict[str, str]:
    files = [path for path in sorted(folder.rglob("*")) if path.is_file() and path.name not in without]
    return {str(path.relative_to(folder)): sha256(path.read_bytes()).hexdigest() for path in files}


def tracked(client: MlflowClient, run: Run) -> dict[str, Any]:
    """What MLflow holds of a run, each point of each curve and each model once."""
    history = {name: client.get_metric_history(run.info.run_id, name) for name in run.data.metrics}
    models = client.search_logged_models([run.info.experiment_id], f"source_run_id = '{run.info.run_id}'")
    assert run.outputs is not None
    assert run.inputs is not None
    return {
        "status": run.info.status,
        "params": run.data.params,
        "tags": {name: run.data.tags[name] for name in ("method", "seed", "fcl.identity", "fcl.learned")},
        "curves": {
            name: [(m.step, None if name.endswith("seconds") else m.value) for m in metrics]
            for name, metrics in history.items()
        },
        "models": [str(model.status) for model in models],
        "outputs": len(run.outputs.model_outputs),
        "data": [of.dataset.name for of in run.inputs.dataset_inputs],
        "artifacts": sorted(file.path for file in client.list_artifacts(run.info.run_id)),
    }


def test_several_at_once_wait_for_each_other_and_one_of_them_learns(
    project: Path, start: Start, server: str, wait_for: WaitFor, arrive: Arrive
) -> None:
    arrive(project / "incoming", "first", 0, 1)
    waiting = "arrivals: another fcl stream is at it; waiting\n"
    with locked(project / LOCK):
        nights = [start(project, "fcl", "stream", "--once", PREFECT_API_URL=server) for _ in range(2)]
        wait_for(lambda: said(project) == [waiting] * 2, project)
    assert [night.wait() for night in nights] == [0, 0]
    learned, found_nothing = sorted(said(project), key=len, reverse=True)
    assert "arrivals: version 1 is the champion.\n" in learned
    assert found_nothing == f"{waiting}nothing new has arrived\n"


def test_a_stream_that_serves_itself_goes_on_after_a_kill_and_ends_when_asked_to(
    project: Path, start: Start, wait_for: WaitFor, arrive: Arrive
) -> None:
    """On the project's own server. The process of a scheduled run is killed; the next one does its work."""

    def serve() -> "subprocess.Popen[str]":
        return start(project, "fcl", "stream", "--serve", "--cron", "* * * * * */10")  # the sixth field is seconds

    arrive(project / "incoming", "first", 0, 1)
    serving = serve()
    wait_for(lambda: held(project / LOCK), project)
    for child in psutil.Process(serving.pid).children():
        if "spawn_main" in " ".join(child.cmdline()):
            child.kill()
    wait_for(lambda: "version 1 is the champion" in said(project)[0], project)
    ended_by(serving, signal.SIGTERM)

    arrive(project / "incoming", "second", 2, 3)
    serving = serve()
    wait_for(lambda: "version 2 is the champion" in said(project)[1], project)
    ended_by(serving, signal.SIGINT)
    assert not any(word in "".join(said(project)) for word in ("Traceback", "Warning"))
    assert [row.version for row in MlflowClient(f"sqlite:///{project}/mlflow.db").search_model_versions()] == [2, 1]


def ended_by(process: "subprocess.Popen[str]", end: signal.Signals) -> None:
    """It ends well, and nothing of it is left."""
    family = [psutil.Process(process.pid), *psutil.Process(process.pid).children(recursive=True)]
    process.send_signal(end)
    assert process.wait(300) == 0
    _, left = psutil.wait_procs(family, 60)
    assert left == []


def test_no_schedule_is_told_in_one_line(project: Path, start: Start, server: str) -> None:
    assert start(project, "fcl", "stream", "--serve", "--cron", "at two", PREFECT_API_URL=server).wait() == 2
    right = 'minute, hour, day, month, weekday, as "0 2 * * *"'
    assert said(project) == [f'--cron: "at two" is no schedule. Right: {right}.\n']
