"""A project folder with tiny data and settings, and one Prefect server for all tests of flows."""

import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
from mlflow import MlflowClient
from PIL import Image
from prefect.settings import PREFECT_API_URL, PREFECT_FLOWS_HEARTBEAT_FREQUENCY, temporary_settings
from prefect.settings import PREFECT_RESULTS_DEFAULT_SERIALIZER as SERIALIZER
from prefect.settings import PREFECT_RESULTS_LOCAL_STORAGE_PATH as RESULTS
from prefect.testing.utilities import prefect_test_harness
from sklearn.datasets import load_digits

from fclmodels.data.arrivals.arrival_folders import MARKER
from flows.cli.app import app, run_command_line

SETTINGS = """
data: {source: digits}
stream: {kind: class-incremental, tasks: 2}
partition: {kind: iid, clients: 3}
model: {backbone: mlp, hidden: 8}
federation: {rounds: 2, executor: serial, threads: 1}
device: cpu
methods: {fedavg: {}, fedprox: {mu: 0.01}}
experiment: {methods: [fedavg], seeds: [0]}
"""

ROOT = Path(__file__).parents[2]
COPIED = ("flows", "tasks", "fclmodels", ".dvc", ".dvcignore", ".gitignore", "dvc.yaml", "params.yaml", "prefect.yaml")
SMALLER = {
    "rounds: 10": "rounds: 2",
    "  tasks: 5": "  tasks: 2",
    "backbone: cnn": "backbone: mlp",
    "  - fot\n  - fedprotip\n  - special\n  - stamp\n  - er\n  - joint\n": "  - fedprox\n  - joint\n",
}
PATIENCE = 600  # seconds, for a busy machine

Fcl = Callable[..., int]
Start = Callable[..., "subprocess.Popen[str]"]
Arrive = Callable[..., Path]


@pytest.fixture(scope="session")
def tiny_settings() -> str:
    """Return the content of a params.yaml with which a run takes a second."""
    return SETTINGS


@pytest.fixture(scope="session")
def server() -> Iterator[str]:
    """Return the address of a Prefect server that runs for the whole session."""
    with prefect_test_harness(server_startup_timeout=120):
        yield str(PREFECT_API_URL.value())


@pytest.fixture(scope="session")
def fcl() -> Fcl:
    """Return a function that runs a command in this process and returns its exit code."""
    return lambda *arguments: run_command_line(app, arguments)


@pytest.fixture(scope="session")
def arrive() -> Arrive:
    """Return a function that writes some of scikit-learn's digits as a complete arrival and returns its folder."""
    digits = load_digits()

    def make(incoming: Path, name: str, *classes: int) -> Path:
        for digit in classes:
            place = incoming / name / f"digit {digit}"
            place.mkdir(parents=True)
            for number, image in enumerate(digits.images[digits.target == digit][:30]):
                Image.fromarray((image * 15.9).astype(np.uint8)).save(place / f"{number}.png")
        (incoming / name / MARKER).touch()
        return incoming / name

    return make


@pytest.fixture(scope="session")
def stream_settings() -> str:
    """Return settings of a stream that learns fast and whose gate accepts every model."""
    return """
data: {source: image-folder}
partition: {kind: iid, clients: 3, val: 0.2}
model: {backbone: mlp, hidden: 8}
federation: {rounds: 4, executor: serial, threads: 1}
device: cpu
arrivals: {method: fedavg, gate: {acc: 0, forgetting: 1}}
experiment: {methods: [fedavg], seeds: [0]} # DVC reads dvc.yaml with it
"""


@pytest.fixture(scope="session")
def clone() -> Callable[[Path], Path]:
    """Return a function that copies this project into a git repository with a smaller experiment and `fcl` in .bin."""

    def make(folder: Path) -> Path:
        for name in COPIED:
            if (ROOT / name).is_dir():
                caches = shutil.ignore_patterns("__pycache__", "tmp", "cache")
                shutil.copytree(ROOT / name, folder / name, ignore=caches)
            else:
                shutil.copy(ROOT / name, folder / name)
        settings = (folder / "params.yaml").read_text()
        for old, new in SMALLER.items():
            assert old in settings
            settings = settings.replace(old, new)
        (folder / "params.yaml").write_text(settings)
        fcl = folder / ".bin" / "fcl"
        fcl.parent.mkdir()
        fcl.write_text(f'#!/bin/sh\nexec "{sys.executable}" -m flows.cli.app "$@"\n')
        fcl.chmod(0o755)
        for words in (["init", "-q"], ["add", "."], ["commit", "-qm", "start"]):
            subprocess.run(["git", *words], cwd=folder, check=True)
        return folder

    return make


def make_environment(folder: Path) -> dict[str, str]:
    """Return the environment of a user whose project is this folder."""
    inherited = {name: value for name, value in os.environ.items() if not name.startswith(("PREFECT_", "MLFLOW_"))}
    root = folder if (folder / "flows").is_dir() else ROOT
    return inherited | {"PATH": f"{folder}/.bin:{os.environ['PATH']}", "PYTHONPATH": str(root)}


def make_command(*words: str) -> list[str]:
    """Return a command line in which Python's tools are those of this Python."""
    modules = {"fcl": "flows.cli.app", "dvc": "dvc", "prefect": "prefect", "mlflow": "mlflow"}
    return [sys.executable, "-m", modules[words[0]], *words[1:]] if words[0] in modules else list(words)


@pytest.fixture(scope="session")
def tool() -> Callable[..., str]:
    """Return a function that runs `fcl`, `git`, `dvc` ... in a folder and returns the output, of `fcl` stdout alone."""

    def run(folder: Path, *words: str, **variables: str) -> str:
        ended = subprocess.run(
            make_command(*words),
            cwd=folder,
            env=make_environment(folder) | {"FCL_SERVER_IDLE_SECONDS": "20"} | variables,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE if words[0] == "fcl" else subprocess.STDOUT,
            text=True,
            check=False,
        )
        assert ended.returncode == 0, f"{ended.stdout} {ended.stderr}"
        return ended.stdout

    return run


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """Return a function that starts `fcl`, `prefect` ... with output in NAME-xx.log; processes end with the test."""
    started: list[subprocess.Popen[str]] = []

    def begin(folder: Path, *words: str, **variables: str) -> "subprocess.Popen[str]":
        with open(folder / f"{words[0]}-{len(started):02d}.log", "w") as log:
            process = subprocess.Popen(
                make_command(*words),
                cwd=folder,
                env=make_environment(folder) | {"FCL_SERVER_IDLE_SECONDS": "3", **variables},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                text=True,
                start_new_session=True,
            )
        started.append(process)
        return process

    yield begin
    for process in reversed(started):  # a worker before its server
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGTERM)
        with suppress(subprocess.TimeoutExpired):
            process.wait(30)
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


@pytest.fixture(scope="session")
def wait_for() -> Callable[..., Any]:
    """Return a function that waits until a condition returns something true, and returns that.

    It fails with the logs of the folder where that takes too long.
    """

    def wait(condition: Callable[[], Any], folder: Path) -> Any:
        end = time.monotonic() + PATIENCE
        while time.monotonic() < end:
            if value := condition():
                return value
            time.sleep(0.3)
        raise AssertionError("\n".join(f"{log.name}: {log.read_text()[-3000:]}" for log in folder.glob("*.log")))

    return wait


@pytest.fixture(scope="session")
def template(server: str, fcl: Fcl, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a project with data and an empty MLflow store, to be copied."""
    folder = tmp_path_factory.mktemp("template")
    (folder / "params.yaml").write_text(SETTINGS)
    MlflowClient(f"sqlite:///{folder}/mlflow.db").search_experiments()
    with enter_project(folder, server):
        assert fcl("prepare", "-q") == 0
        assert fcl("partition", "-q") == 0
    shutil.rmtree(folder / ".fcl")
    return folder


@pytest.fixture
def project(template: Path, server: str, tmp_path: Path) -> Iterator[Path]:
    """Return the current folder, a project with data and an empty MLflow store."""
    with enter_project(copy_project(template, tmp_path), server):
        yield tmp_path


@pytest.fixture(scope="session")
def run_once(template: Path, server: str, fcl: Fcl, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a project in which FedAvg has run with seed 0, to be copied."""
    folder = copy_project(template, tmp_path_factory.mktemp("run-once"))
    with enter_project(folder, server):
        assert fcl("run", "-m", "fedavg", "-q") == 0
    return folder


@pytest.fixture
def finished(run_once: Path, server: str, tmp_path: Path) -> Iterator[Path]:
    """Return the current folder, a project in which FedAvg has run with seed 0."""
    with enter_project(copy_project(run_once, tmp_path), server):
        yield tmp_path


def copy_project(template: Path, folder: Path) -> Path:
    """Copy a project, with a store of its own, into an empty folder; return that."""
    shutil.copytree(template, folder, dirs_exist_ok=True)
    # MLflow keeps a store for each address, so a relative one would lead back to an earlier test's.
    (folder / "params.yaml").write_text(f"{SETTINGS}tracking: {{uri: 'sqlite:///{folder}/mlflow.db'}}\n")
    return folder


@contextmanager
def enter_project(folder: Path, server: str) -> Iterator[None]:
    """Enter this folder and use this server; changes of the environment end with the block."""
    settings = {RESULTS: folder / ".fcl" / "results", SERIALIZER: "json", PREFECT_FLOWS_HEARTBEAT_FREQUENCY: None}
    with (
        pytest.MonkeyPatch.context() as monkeypatch,
        patch.dict(os.environ, {"PREFECT_API_URL": server}),
        temporary_settings(settings),
    ):
        monkeypatch.chdir(folder)
        yield
