"""A project folder with tiny data and settings, and one Prefect server for all tests of flows."""

import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
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

Fcl = Callable[..., int]
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
