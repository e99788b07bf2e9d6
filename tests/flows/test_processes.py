"""Commands as processes of their own: the state that Ctrl-C or kill -9 leaves, and how a run resumes from it."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from mlflow import MlflowClient

from fclmodels.data.splits.split_reader import Splits
from fclmodels.experiment.experiment import Experiment
from fclmodels.settings.load import load_params
from flows.prefect import server

ROOT = Path(__file__).parents[2]
SETTINGS = """
data: {source: digits}
stream: {kind: class-incremental, tasks: 2}
partition: {kind: iid, clients: 4}
model: {backbone: mlp, hidden: 8}
federation: {rounds: 60, executor: EXECUTOR, workers: 2, threads: 1}
device: cpu
"""
pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]
Command = Callable[..., "subprocess.Popen[str]"]


@pytest.fixture
def command(tmp_path: Path) -> Iterator[Command]:
    """Return a function that starts `fcl` in this test's folder; its processes end with the test."""
    inherited = {name: value for name, value in os.environ.items() if not name.startswith(("PREFECT_", "MLFLOW_"))}
    environment = inherited | {"PYTHONPATH": str(ROOT), "FCL_SERVER_IDLE_SECONDS": "3"}
    started: list[subprocess.Popen[str]] = []

    def start(*arguments: str, **more: str) -> "subprocess.Popen[str]":
        line = [sys.executable, "-m", "flows.cli.app", *arguments]
        pipe = subprocess.PIPE
        process = subprocess.Popen(
            line, cwd=tmp_path, env=environment | more, stdout=pipe, stderr=subprocess.STDOUT, text=True
        )
        started.append(process)
        return process

    yield start
    for process in started:
        process.kill()
        process.wait()


@pytest.mark.parametrize(
    ("end", "executor"), [(signal.SIGINT, "processes"), (signal.SIGTERM, "serial"), (signal.SIGKILL, "processes")]
)
def test_a_run_that_was_ended_goes_on_and_ends_as_if_it_never_was(
    command: Command, server: str, tmp_path: Path, executor: str, end: signal.Signals
) -> None:
    (tmp_path / "params.yaml").write_text(SETTINGS.replace("EXECUTOR", executor))

    def run() -> "subprocess.Popen[str]":
        return command("run", "-m", "fedavg", "--out", "resumed", PREFECT_API_URL=server)

    ended = run()
    done = tmp_path / ".fcl" / "store" / "done"
    while not done.exists() or len(list(done.iterdir())) < 5:
        time.sleep(0.01)
        assert ended.poll() is None, ended.communicate()
    time.sleep(0.2)  # into the rounds of the second task
    ended.send_signal(end)
    printed, _ = ended.communicate()
    assert ended.returncode == {signal.SIGINT: 130, signal.SIGTERM: -15, signal.SIGKILL: -9}[end]
    assert "Traceback" not in printed
    assert "Warning" not in printed
    assert printed.endswith("from the last checkpoint\n") == (end == signal.SIGINT)
    assert not (tmp_path / "resumed").exists()

    second = run()
    printed, _ = second.communicate()
    assert second.returncode == 0, printed
    assert "task 1 of 2 learned" in printed
    assert "(cached)" in printed
    (splits,) = (tmp_path / ".fcl" / "data").glob("splits-*")
    settings = load_params(tmp_path / "params.yaml", ["federation.executor=serial"])
    with Experiment(settings, "fedavg", 0, Splits.open(splits), tmp_path / "home") as experiment:
        uninterrupted = experiment.run(tmp_path / "uninterrupted")
    resumed = json.loads((tmp_path / "resumed" / "result.json").read_text())
    assert resumed["metrics"] == uninterrupted["metrics"]
    assert resumed["digests"] == uninterrupted["digests"]
    client = MlflowClient(f"sqlite:///{tmp_path}/mlflow.db")
    (tracked,) = client.search_runs([experiment.experiment_id for experiment in client.search_experiments()])
    assert tracked.info.status == "FINISHED"


@pytest.mark.parametrize("end", [signal.SIGINT, signal.SIGKILL])
def test_ui_shows_both_pages_and_leaves_no_server(command: Command, tmp_path: Path, end: signal.Signals) -> None:
    (tmp_path / "params.yaml").write_text(SETTINGS.replace("EXECUTOR", "serial"))
    ui = command("ui")
    assert ui.stdout is not None
    mlflow = ui.stdout.readline().split()[-1]
    prefect = ui.stdout.readline().split()[-1]
    assert server.is_healthy(mlflow)
    assert server.is_healthy(f"{prefect}/api")
    ui.send_signal(end)
    assert ui.wait() == (0 if end == signal.SIGINT else -signal.SIGKILL)
    until = time.monotonic() + 30
    while (server.is_healthy(mlflow) or server.is_healthy(f"{prefect}/api")) and time.monotonic() < until:
        time.sleep(0.2)
    assert not server.is_healthy(mlflow)
    assert not server.is_healthy(f"{prefect}/api")
