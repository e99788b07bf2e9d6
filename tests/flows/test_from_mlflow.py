"""A comparison of runs as MLflow holds them is that of their folders."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from mlflow import MlflowClient

Fcl = Callable[..., int]


def test_runs_of_a_store_compare_as_their_folders_do(
    project: Path, fcl: Fcl, capsys: pytest.CaptureFixture[str]
) -> None:
    for method in ("fedavg", "fedprox"):
        assert fcl("run", "-m", method, "-q") == 0
    capsys.readouterr()
    assert fcl("compare", "runs/fedavg-0", "runs/fedprox-0", "--json") == 0
    expected = json.loads(capsys.readouterr().out)
    shutil.rmtree("runs")
    assert fcl("compare", "--from-mlflow", "--json") == 0
    assert json.loads(capsys.readouterr().out) == expected
    client = MlflowClient(f"sqlite:///{project}/mlflow.db")
    (run, _) = sorted(
        client.search_runs([e.experiment_id for e in client.search_experiments()]), key=lambda run: run.info.start_time
    )
    assert fcl("compare", "--from-mlflow", run.info.run_id, "--json") == 0
    assert {row["method"] for row in json.loads(capsys.readouterr().out)} == {"fedavg"}
    name = client.get_experiment(run.info.experiment_id).name
    assert fcl("report", "--from-mlflow", name, "-q") == 0
    assert "fedprox" in Path("report/index.html").read_text()
    assert fcl("compare", "--from-mlflow", "none such") == 2
    assert "none such" in capsys.readouterr().err
