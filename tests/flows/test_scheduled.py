"""A stream by the clock, with the real tools: prefect server, work pool, deploy and worker, DVC, MLflow."""

import json
import os
import shutil
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from mlflow import MlflowClient

from flows import servers

ROOT = Path(__file__).parents[2]
SETTINGS = """
data: {source: image-folder}
partition: {kind: iid, clients: 3, val: 0.2}
model: {backbone: mlp, hidden: 8}
federation: {rounds: 2, executor: serial, threads: 1}
device: cpu
arrivals: {method: fedavg, gate: {acc: 0, forgetting: 1}}
"""
NIGHTLY, OFTEN = "cron: 0 2 * * *", "cron: '* * * * * */20'"  # the sixth field is seconds
PATIENCE = 300  # seconds, for a machine that does much else
pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]
Start = Callable[..., "subprocess.Popen[bytes]"]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A git repository with DVC and this project, whose deployment is due every twenty seconds."""
    for name in ("flows", "tasks", "fclmodels", ".dvc"):
        shutil.copytree(ROOT / name, tmp_path / name, ignore=shutil.ignore_patterns("__pycache__", "tmp", "cache"))
    deployment = (ROOT / "prefect.yaml").read_text()
    assert NIGHTLY in deployment
    (tmp_path / "prefect.yaml").write_text(deployment.replace(NIGHTLY, OFTEN))
    (tmp_path / "params.yaml").write_text(SETTINGS)
    (tmp_path / "home").mkdir()
    subprocess.run(["git", "init", "-q"], cwd=tmp_path, check=True)
    return tmp_path


@pytest.fixture
def port() -> int:
    return servers.free_port()


@pytest.fixture
def prefect(folder: Path, port: int) -> Iterator[Start]:
    """Starts `prefect ...`; what still runs at the end of the test is ended."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("PREFECT_", "MLFLOW_"))}
    environment = kept | {
        "PYTHONPATH": os.pathsep.join([str(folder), *filter(None, sys.path)]),
        "PREFECT_HOME": str(folder / "home"),
        "PREFECT_API_URL": f"http://127.0.0.1:{port}/api",
        "PREFECT_SERVER_ANALYTICS_ENABLED": "false",
        "PREFECT_CLI_PROMPT": "false",
    }
    started: list[subprocess.Popen[bytes]] = []

    def start(*words: str) -> "subprocess.Popen[bytes]":
        with open(folder / "home" / f"{words[0]}.log", "wb") as log:
            command = [sys.executable, "-m", "prefect", *words]
            process = subprocess.Popen(
                command, cwd=folder, env=environment, stdin=subprocess.DEVNULL, stdout=log, stderr=log
            )
        started.append(process)
        return process

    yield start
    for process in reversed(started):  # the worker before the server
        process.terminate()
        try:
            process.wait(30)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def wait_for(what: Callable[[], Any], logs: Path) -> Any:
    """What it gives, as soon as that is something."""
    end = time.monotonic() + PATIENCE
    while time.monotonic() < end:
        if found := what():
            return found
        time.sleep(0.5)
    raise AssertionError("\n".join(log.read_text()[-3000:] for log in logs.glob("*.log")))


def asked(port: int, what: str, **filters: Any) -> Any:
    request = urllib.request.Request(
        f"http://127.0.0.1:{port}/api/{what}/filter", json.dumps(filters).encode(), {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request) as answer:
        return json.load(answer)


def test_a_task_that_arrives_is_learned_by_a_scheduled_run_and_its_model_becomes_champion(
    folder: Path, port: int, prefect: Start, arrive: Callable[..., Path]
) -> None:
    logs = folder / "home"
    prefect("server", "start", "--host", "127.0.0.1", "--port", str(port))
    wait_for(lambda: servers.healthy(f"http://127.0.0.1:{port}/api"), logs)
    assert prefect("work-pool", "create", "fcl", "--type", "process").wait() == 0
    assert prefect("deploy", "--all").wait() == 0, (logs / "deploy.log").read_text()
    prefect("worker", "start", "--pool", "fcl")
    arrive(folder / "incoming", "first", 0, 1)

    store = folder / "mlflow.db"

    def champion() -> dict[str, str] | None:
        if not store.exists():  # MLflow would make it
            return None
        registry = MlflowClient(f"sqlite:///{store}")
        if not registry.search_registered_models("name = 'arrivals'"):
            return None
        aliases = registry.get_registered_model("arrivals").aliases
        return registry.get_model_version_by_alias("arrivals", "champion").tags if "champion" in aliases else None

    assert wait_for(champion, logs)["tasks"] == "1"
    completed = {"flow_runs": {"state": {"type": {"any_": ["COMPLETED"]}}}, "sort": "END_TIME_DESC"}
    runs = wait_for(lambda: asked(port, "flow_runs", **completed), logs)
    assert all(run["auto_scheduled"] and run["deployment_id"] for run in runs)
    ended = {"event": {"name": ["fcl.stream.champion"]}}
    (event,) = wait_for(lambda: asked(port, "events", filter=ended)["events"], logs)
    assert event["payload"]["about"] == "version 1, 1 tasks"
    (artifact,) = asked(port, "artifacts", artifacts={"key": {"any_": ["stream-arrivals"]}})
    assert "champion" in artifact["data"]
    assert (folder / "data" / "streams" / "arrivals.dvc").is_file()
    assert (folder / "streams" / "arrivals" / "result.json").is_file()
