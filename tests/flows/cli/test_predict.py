"""`fcl predict` on a run folder and on the model that MLflow holds of the same run."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from mlflow import MlflowClient
from PIL import Image
from sklearn.datasets import load_digits

Fcl = Callable[..., int]


@pytest.fixture
def files(project: Path, fcl: Fcl) -> list[str]:
    """Run an experiment, and return the names of some digits as files beside it."""
    assert fcl("run", "-m", "fedavg", "-q") == 0
    for digit, pixels in enumerate(load_digits().images[:3]):
        Image.fromarray((pixels * 255 / 16).astype(np.uint8)).save(project / f"{digit}.png")
    return [f"{digit}.png" for digit in range(3)]


def test_files_are_answered_from_the_folder_and_from_the_registry(
    files: list[str], project: Path, fcl: Fcl, capsys: pytest.CaptureFixture[str]
) -> None:
    capsys.readouterr()
    assert fcl("predict", "runs/fedavg-0", *files, "--json") == 0
    rows = json.loads(capsys.readouterr().out)
    assert [row["file"] for row in rows] == files
    assert all(row["task"] in (1, 2) and 0.1 < row["probability"] <= 1 and row["relevance"] is None for row in rows)
    shutil.copytree("runs/fedavg-0/model", "fetched")
    assert fcl("predict", "fetched", *files, "--json") == 0
    assert json.loads(capsys.readouterr().out) == rows
    assert fcl("predict", "runs/fedavg-0", *files, "--task", "1") == 0
    table = capsys.readouterr().out.splitlines()
    assert table[0].split() == ["file", "class", "probability", "task", "relevance"]
    assert [line.split()[0] for line in table[1:]] == files
    assert all(line.split()[3] == "1" for line in table[1:])

    client = MlflowClient(f"sqlite:///{project}/mlflow.db")
    (run,) = client.search_runs([e.experiment_id for e in client.search_experiments()])
    client.create_registered_model("digits")
    version = client.create_model_version("digits", f"models:/{run.outputs.model_outputs[0].model_id}")
    client.set_registered_model_alias("digits", "best", version.version)
    assert fcl("predict", "models:/digits@best", *files, "--json") == 0
    assert json.loads(capsys.readouterr().out) == rows
    assert fcl("predict", "models:/digits@worst", *files) == 2
    assert "models:/digits@worst cannot be downloaded from" in capsys.readouterr().err


def test_a_folder_without_a_run_is_refused(project: Path, fcl: Fcl, capsys: pytest.CaptureFixture[str]) -> None:
    assert fcl("predict", "runs", "a.png") == 2
    assert "runs is not a run folder. Right: one such as runs/fedavg-0" in capsys.readouterr().err
