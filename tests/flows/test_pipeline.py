"""The pipeline under real DVC, Git, Prefect and MLflow, each command a process of its own."""

import json
import re
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
from mlflow import MlflowClient

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]
Tool = Callable[..., str]


RUNS = {"fedavg-0", "fedprox-0", "joint-0"}  # of params.yaml, with one seed


@pytest.fixture(scope="module")
def folder(clone: Callable[[Path], Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    return clone(tmp_path_factory.mktemp("clone"))


@pytest.fixture(scope="module")
def tool(tool: Callable[..., str], folder: Path) -> Tool:
    """Runs `git` or `dvc` in the clone; what it printed."""
    return partial(tool, folder)


@pytest.fixture(scope="module")
def first(tool: Tool) -> str:
    """What the first repro printed; its results are committed."""
    printed = tool("dvc", "repro")
    tool("git", "add", ".")
    tool("git", "commit", "-qm", "results")
    return printed


def ran(printed: str) -> set[str]:
    """The stages whose commands were run."""
    return set(re.findall(r"Running stage '(.*)':", printed))


def test_every_stage_runs_once_with_one_server(folder: Path, first: str) -> None:
    assert ran(first) == {"prepare", "partition", *(f"experiment@{run}" for run in RUNS), "report"}
    assert "Traceback" not in first
    assert "Warning" not in first
    assert (folder / "report" / "index.html").exists()
    assert (folder / ".fcl" / "prefect" / "server.log").read_text().count("Check out the dashboard") == 1


def test_without_changes_there_is_nothing_to_do(tool: Tool, first: str) -> None:
    assert ran(tool("dvc", "repro")) == set()


def test_mlflow_has_one_run_for_each_method_and_seed(folder: Path, first: str) -> None:
    client = MlflowClient(f"sqlite:///{folder}/mlflow.db")
    runs = client.search_runs([client.get_experiment_by_name("digits class-incremental").experiment_id])
    assert {f"{run.data.tags['method']}-{run.data.tags['seed']}" for run in runs} == RUNS
    assert len(runs) == len(RUNS)
    for run in runs:
        name = f"{run.data.tags['method']}-{run.data.tags['seed']}"
        assert run.info.status == "FINISHED"
        assert run.data.tags["dvc.stage"] == f"experiment@{name}"
        result = json.loads((folder / "runs" / name / "result.json").read_text())
        assert run.data.metrics["acc/task_agnostic"] == pytest.approx(result["metrics"]["task_agnostic"]["acc"])
    (parent,) = client.search_runs([client.get_experiment_by_name("comparisons").experiment_id])
    assert parent.data.tags["dvc.stage"] == "report"
    assert {run.data.tags["mlflow.parentRunId"] for run in runs} == {parent.info.run_id}


def test_dvc_shows_metrics_and_plots(folder: Path, tool: Tool, first: str) -> None:
    shown = json.loads(tool("dvc", "metrics", "show", "--json"))[""]["data"]
    result = json.loads((folder / "runs/fedavg-0/result.json").read_text())
    metrics = shown["report/metrics/fedavg-0.json"]["data"]
    assert metrics["task_agnostic"]["acc"] == result["metrics"]["task_agnostic"]["acc"]
    assert shown["data/splits/statistics.json"]["data"]["clients"] == 10
    plots = json.loads(tool("dvc", "plots", "show", "--json"))
    assert not plots.get("errors")
    assert len(plots["data"]) == 4
    matrix = plots["data"]["accuracy matrix"][0]["content"]["data"]["values"]
    assert {"method", "seed", "learned", "task", "accuracy"} <= set(matrix[0])


def test_a_changed_method_runs_alone(folder: Path, tool: Tool, first: str) -> None:
    settings = (folder / "params.yaml").read_text()
    (folder / "params.yaml").write_text(settings.replace("mu: 1.0", "mu: 3.0"))
    diff = json.loads(tool("dvc", "params", "diff", "--json"))
    assert [(name, change["old"], change["new"]) for name, change in diff["params.yaml"].items()] == [
        ("methods.fedprox.mu", 1.0, 3.0)
    ]
    before = (folder / "runs/fedprox-0/result.json").read_text()
    assert ran(tool("dvc", "repro")) == {"experiment@fedprox-0", "report"}
    assert (folder / "runs/fedprox-0/result.json").read_text() != before
    (folder / "params.yaml").write_text(settings)
    assert ran(tool("dvc", "repro")) == set()  # DVC has the old results still
    assert (folder / "runs/fedprox-0/result.json").read_text() == before


def test_changed_code_of_one_method_trains_that_method_only(folder: Path, tool: Tool, first: str) -> None:
    source = folder / "fclmodels/methods/fedprox.py"
    text = source.read_text()
    source.write_text(f"{text}# as before\n")
    printed = tool("dvc", "repro")
    source.write_text(text)
    learned = [line for line in printed.splitlines() if re.match(r"fed\w+-\d: task", line)]
    assert len(learned) == 4
    assert {line.partition("-")[0] for line in learned if line.endswith("(known from before)")} == {"fedavg"}
    assert {line.partition("-")[0] for line in learned if not line.endswith("(known from before)")} == {"fedprox"}
    tool("dvc", "repro")
