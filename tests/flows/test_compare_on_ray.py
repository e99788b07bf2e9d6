"""`fcl compare --on ray`: experiments side by side on a cluster of two nodes."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from mlflow import MlflowClient

from fclmodels.errors import UserError
from fclmodels.settings.load import load_params
from flows.compare_on_ray import refuse_local_servers


@pytest.mark.slow
def test_each_experiment_is_tracked_and_one_that_cannot_begin_loses_no_other(
    project: Path, two_nodes: object, fcl: Callable[..., int], capfd: pytest.CaptureFixture[str]
) -> None:
    methods = "experiment.methods=[fedavg,pip-l2p,fedprox]"
    assert fcl("compare", "--on", "ray", "--json", "--set", methods) == 1
    printed = capfd.readouterr()
    assert {row["method"] for row in json.loads(printed.out)} == {"fedavg", "fedprox"}
    assert "1 of 3 experiments failed" in printed.err
    assert "pip-l2p-0: model.backbone: prompts and LoRA attach" in printed.err
    client = MlflowClient(f"sqlite:///{project}/mlflow.db")
    runs = client.search_runs([experiment.experiment_id for experiment in client.search_experiments()])
    assert {run.info.run_name: run.info.status for run in runs} == {
        "fedavg seed 0": "FINISHED",
        "fedprox seed 0": "FINISHED",
    }


def test_runs_that_are_named_are_not_run(fcl: Callable[..., int]) -> None:
    assert fcl("compare", "--on", "ray", "runs/fedavg-0") == 2


def test_of_several_machines_all_must_reach_the_servers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "params.yaml").write_text("tracking: {uri: 'sqlite:///mlflow.db'}")
    settings = load_params(tmp_path / "params.yaml")
    monkeypatch.delenv("PREFECT_API_URL", raising=False)
    refuse_local_servers(settings, {"here"})
    with pytest.raises(UserError, match="set PREFECT_API_URL"):
        refuse_local_servers(settings, {"here", "there"})
    monkeypatch.setenv("PREFECT_API_URL", "http://here:4200/api")
    with pytest.raises(UserError, match=r"tracking\.uri: sqlite"):
        refuse_local_servers(settings, {"here", "there"})
    refuse_local_servers(load_params(tmp_path / "params.yaml", ["tracking.uri=http://here:5000"]), {"here", "there"})
