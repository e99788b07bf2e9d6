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

from fclmodels.data.incoming import MARKER
from flows.cli import app
from flows.ending import end_well

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
    "  seeds:\n  - 0\n  - 1": "  seeds:\n  - 0",
}
PATIENCE = 600  # seconds, for a machine that does much else

Fcl = Callable[..., int]
Start = Callable[..., "subprocess.Popen[str]"]
Arrive = Callable[..., Path]


@pytest.fixture(scope="session")
def server() -> Iterator[str]:
    """The address of a Prefect server that is there for the whole session."""
    with prefect_test_harness(server_startup_timeout=120):
        yield str(PREFECT_API_URL.value())


@pytest.fixture(scope="session")
def fcl() -> Fcl:
    """Runs a command in this process; its exit code."""
    return lambda *arguments: end_well(app, arguments)


@pytest.fixture(scope="session")
def arrive() -> Arrive:
    """Some of scikit-learn's digits arrive in a folder as a complete tree of images; the tree."""
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
    """Of a stream that learns fast, and whose gate lets everything through."""
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
    """Copies this project into a folder, as a git repository with a smaller experiment and `fcl` in .bin."""

    def make(folder: Path) -> Path:
        for name in COPIED:
            if (ROOT / name).is_dir():
                unwanted = shutil.ignore_patterns("__pycache__", "tmp", "cache")
                shutil.copytree(ROOT / name, folder / name, ignore=unwanted)
            else:
                shutil.copy(ROOT / name, folder / name)
        settings = (folder / "params.yaml").read_text()
        for old, new in SMALLER.items():
            assert old in settings
            settings = settings.replace(old, new)
        (folder / "params.yaml").write_text(settings)
        fcl = folder / ".bin" / "fcl"
        fcl.parent.mkdir()
        fcl.write_text(f'#!/bin/sh\nexec "{sys.executable}" -m flows.cli "$@"\n')
        fcl.chmod(0o755)
        for words in (["init", "-q"], ["add", "."], ["commit", "-qm", "start"]):
            subprocess.run(["git", *words], cwd=folder, check=True)
        return folder

    return make


def surroundings(folder: Path) -> dict[str, str]:
    """The environment of a user whose project is this folder."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("PREFECT_", "MLFLOW_"))}
    own = folder if (folder / "flows").is_dir() else ROOT
    return kept | {"PATH": f"{folder}/.bin:{os.environ['PATH']}", "PYTHONPATH": str(own)}


def line(*words: str) -> list[str]:
    """A command line; of Python's tools, those beside this Python."""
    modules = {"fcl": "flows.cli", "dvc": "dvc", "prefect": "prefect", "mlflow": "mlflow"}
    return [sys.executable, "-m", modules[words[0]], *words[1:]] if words[0] in modules else list(words)


@pytest.fixture(scope="session")
def tool() -> Callable[..., str]:
    """Runs `fcl`, `git`, `dvc` ... in a folder; what it printed, without what `fcl` says beside its output."""

    def run(folder: Path, *words: str, **more: str) -> str:
        end = subprocess.run(
            line(*words),
            cwd=folder,
            env=surroundings(folder) | {"FCL_SERVER_IDLE_SECONDS": "20"} | more,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE if words[0] == "fcl" else subprocess.STDOUT,
            text=True,
            check=False,
        )
        assert end.returncode == 0, f"{end.stdout} {end.stderr}"
        return end.stdout

    return run


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """Starts `fcl`, `prefect` ... in a folder, with its output in NAME.log beside; all that still runs is ended."""
    started: list[subprocess.Popen[str]] = []

    def begin(folder: Path, *words: str, **more: str) -> "subprocess.Popen[str]":
        with open(folder / f"{words[0]}-{len(started):02d}.log", "w") as log:
            process = subprocess.Popen(
                line(*words),
                cwd=folder,
                env=surroundings(folder) | {"FCL_SERVER_IDLE_SECONDS": "3", **more},
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
    """What a function gives as soon as that is something; the logs of the folder where it never is."""

    def wait(what: Callable[[], Any], folder: Path) -> Any:
        end = time.monotonic() + PATIENCE
        while time.monotonic() < end:
            if found := what():
                return found
            time.sleep(0.3)
        raise AssertionError("\n".join(f"{log.name}: {log.read_text()[-3000:]}" for log in folder.glob("*.log")))

    return wait


@pytest.fixture(scope="session")
def template(server: str, fcl: Fcl, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A project with data and an empty MLflow store, to be copied."""
    folder = tmp_path_factory.mktemp("template")
    (folder / "params.yaml").write_text(SETTINGS)
    MlflowClient(f"sqlite:///{folder}/mlflow.db").search_experiments()
    with inside(folder, server):
        assert fcl("prepare", "-q") == 0
        assert fcl("partition", "-q") == 0
    return folder


@pytest.fixture
def project(template: Path, server: str, tmp_path: Path) -> Iterator[Path]:
    """The current folder: a project with data and an empty MLflow store."""
    shutil.copytree(template, tmp_path, dirs_exist_ok=True, ignore=shutil.ignore_patterns(".fcl"))
    # MLflow keeps a store for each address, so a relative one would lead back to an earlier test's.
    (tmp_path / "params.yaml").write_text(f"{SETTINGS}tracking: {{uri: 'sqlite:///{tmp_path}/mlflow.db'}}\n")
    with inside(tmp_path, server):
        yield tmp_path


@contextmanager
def inside(folder: Path, server: str) -> Iterator[None]:
    """In this folder, with this server; what commands set in the environment ends with the block."""
    own = {RESULTS: folder / ".fcl" / "results", SERIALIZER: "json", PREFECT_FLOWS_HEARTBEAT_FREQUENCY: None}
    with (
        pytest.MonkeyPatch.context() as monkeypatch,
        patch.dict(os.environ, {"PREFECT_API_URL": server}),
        temporary_settings(own),
    ):
        monkeypatch.chdir(folder)
        yield
