"""A stream on a schedule as docs/how-to/schedule.md sets it up: Prefect's server, its deployment and a worker."""

import json
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest
from mlflow import MlflowClient

from fclmodels.storage.files import is_locked
from flows.prefect import server

NIGHTLY, OFTEN = "cron: 0 2 * * *", "cron: '* * * * * */20'"  # the sixth field is seconds
pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]
WaitFor = Callable[[Callable[[], Any], Path], Any]


class Schedule:
    """A project with a deployment that is due every twenty seconds, its server and its worker."""

    def __init__(self, folder: Path, start: Callable[..., Any], wait_for: WaitFor) -> None:
        self.folder, self.start = folder, start
        self.port = server.find_free_port()
        self.url = f"http://127.0.0.1:{self.port}/api"
        self.prefect("server", "start", "--host", "127.0.0.1", "--port", str(self.port))
        wait_for(lambda: server.is_healthy(self.url), folder)
        assert self.prefect("work-pool", "create", "fcl", "--type", "process").wait() == 0
        assert self.prefect("--no-prompt", "deploy", "--all").wait() == 0

    def prefect(self, *words: str) -> Any:
        """Start a command of Prefect's."""
        environment = {
            "PREFECT_HOME": str(self.folder / "home"),
            "PREFECT_API_URL": self.url,
            "PREFECT_SERVER_ANALYTICS_ENABLED": "false",
        }
        return self.start(self.folder, "prefect", *words, **environment)

    def start_worker(self) -> Any:
        return self.prefect("worker", "start", "--pool", "fcl", "--limit", "1")

    def query(self, what: str, **filters: Any) -> Any:
        """Return what the server has of flow runs, events, artifacts."""
        url, kind = f"{self.url}/{what}/filter", {"Content-Type": "application/json"}
        with urllib.request.urlopen(urllib.request.Request(url, json.dumps(filters).encode(), kind)) as answer:
            return json.load(answer)

    def list_runs(self, *states: str) -> list[dict[str, Any]]:
        """Return the flow runs in these states, or in any, in the order in which they were due."""
        flow_runs = {"state": {"type": {"any_": states or None}}}
        return self.query("flow_runs", flow_runs=flow_runs, sort="EXPECTED_START_TIME_ASC")

    def find_champion(self) -> dict[str, str] | None:
        """Return the tags of the stream's champion, None if there is none."""
        if not (self.folder / "mlflow.db").exists():  # MLflow would create it
            return None
        registry = MlflowClient(f"sqlite:///{self.folder}/mlflow.db")
        if not registry.search_registered_models("name = 'arrivals'"):
            return None
        aliases = registry.get_registered_model("arrivals").aliases
        return registry.get_model_version_by_alias("arrivals", "champion").tags if "champion" in aliases else None


@pytest.fixture
def schedule(
    clone: Callable[[Path], Path],
    stream_settings: str,
    start: Callable[..., Any],
    wait_for: WaitFor,
    tmp_path: Path,
) -> Schedule:
    folder = clone(tmp_path / "clone")
    deployment = (folder / "prefect.yaml").read_text()
    assert NIGHTLY in deployment
    (folder / "prefect.yaml").write_text(deployment.replace(NIGHTLY, OFTEN))
    (folder / "params.yaml").write_text(stream_settings)
    (folder / "home").mkdir()
    return Schedule(folder, start, wait_for)


def test_a_task_that_arrives_is_learned_by_a_scheduled_run_and_its_model_becomes_champion(
    schedule: Schedule, wait_for: WaitFor, arrive: Callable[..., Path]
) -> None:
    schedule.start_worker()
    arrive(schedule.folder / "incoming", "first", 0, 1)
    champion = wait_for(schedule.find_champion, schedule.folder)
    assert champion["tasks"] == "1"
    runs = wait_for(lambda: schedule.list_runs("COMPLETED"), schedule.folder)
    assert all(run["auto_scheduled"] and run["deployment_id"] for run in runs)
    ended = {"event": {"name": ["fcl.stream.champion"]}}
    (event,) = wait_for(lambda: schedule.query("events", filter=ended)["events"], schedule.folder)
    assert event["payload"]["about"] == "version 1, 1 tasks"
    (artifact,) = schedule.query("artifacts", artifacts={"key": {"any_": ["stream-arrivals"]}})
    assert "champion" in artifact["data"]
    assert (schedule.folder / "data" / "streams" / "arrivals.dvc").is_file()
    assert (schedule.folder / "streams" / "arrivals" / "result.json").is_file()


@pytest.mark.parametrize("victims", ["the worker", "the worker and its run"])
def test_a_killed_worker_costs_at_most_one_interval(
    schedule: Schedule, wait_for: WaitFor, arrive: Callable[..., Path], victims: str
) -> None:
    """The run that was due next learns what arrived, and no run is cancelled."""
    worker = schedule.start_worker()
    arrive(schedule.folder / "incoming", "first", 0, 1)
    wait_for(lambda: is_locked(schedule.folder / ".fcl" / "locks" / "stream-arrivals"), schedule.folder)
    (killed,) = schedule.list_runs("RUNNING")
    family = psutil.Process(worker.pid).children(recursive=True)
    worker.kill()
    for process in family if victims == "the worker and its run" else ():
        process.kill()
    schedule.start_worker()

    (champion_of, *_) = wait_for(lambda: schedule.list_runs("COMPLETED"), schedule.folder)
    assert schedule.find_champion()
    assert [run["id"] for run in schedule.list_runs()][:2] == [killed["id"], champion_of["id"]]
    assert [run["id"] for run in schedule.list_runs("CRASHED", "CANCELLED", "FAILED")] == [killed["id"]]
    if victims == "the worker and its run":  # a run that lost its worker only says itself that it ended
        (crashed,) = schedule.list_runs("CRASHED")
        assert crashed["state"]["message"] == f"It was killed. {champion_of['name']} does its work."
        taken_over = {"event": {"name": ["fcl.stream.taken-over"]}}
        (event,) = wait_for(lambda: schedule.query("events", filter=taken_over)["events"], schedule.folder)
        assert event["payload"]["about"] == killed["name"]
