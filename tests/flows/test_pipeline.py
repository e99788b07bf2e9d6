"""The pipeline under real DVC, Git, Prefect and MLflow, each command a process of its own."""

import json
import re
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
import yaml
from mlflow import MlflowClient

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]
ROOT = Path(__file__).parents[2]
Tool = Callable[..., str]


RUNS = {"fedavg-0", "fedprox-0", "joint-0"}  # of params.yaml, with one seed


@pytest.fixture(scope="module")
def folder(clone: Callable[[Path], Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    return clone(tmp_path_factory.mktemp("clone"))


@pytest.fixture(scope="module")
def tool(tool: Callable[..., str], folder: Path) -> Tool:
    """Return a function that runs `git` or `dvc` in the clone and returns its output."""
    return partial(tool, folder)


@pytest.fixture(scope="module")
def first(tool: Tool) -> str:
    """Return the output of the first repro, whose results are committed."""
    printed = tool("dvc", "repro")
    tool("git", "add", ".")
    tool("git", "commit", "-qm", "results")
    return printed


def list_stages_run(printed: str) -> set[str]:
    """Return the stages whose commands were run."""
    return set(re.findall(r"Running stage '(.*)':", printed))


def test_every_stage_runs_once_with_one_server(folder: Path, first: str) -> None:
    assert list_stages_run(first) == {"prepare", "partition@0", *(f"experiment@{run}" for run in RUNS), "report"}
    assert "Traceback" not in first
    assert "Warning" not in first
    assert (folder / "report" / "index.html").exists()
    assert (folder / ".fcl" / "prefect" / "server.log").read_text().count("Check out the dashboard") == 1


def test_without_changes_there_is_nothing_to_do(tool: Tool, first: str) -> None:
    assert list_stages_run(tool("dvc", "repro")) == set()


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
    assert shown["data/splits/0/statistics.json"]["data"]["clients"] == 10
    plots = json.loads(tool("dvc", "plots", "show", "--json"))
    assert not plots.get("errors")
    assert len(plots["data"]) == 4
    matrix = plots["data"]["accuracy matrix"][0]["content"]["data"]["values"]
    assert {"method", "seed", "learned", "task", "accuracy"} <= set(matrix[0])


def test_a_git_repository_gives_a_model_by_its_name_and_version(
    folder: Path, tool: Tool, first: str, tmp_path: Path
) -> None:
    """From a bare repository, and a DVC remote that its settings name."""
    tool("dvc", "remote", "add", "--default", "store", str(tmp_path / "remote"))
    tool("git", "commit", "-aqm", "remote")
    tool("git", "tag", "--annotate", "fedavg@v1.0.0", "--message", "the first")  # DVC reads no other tags
    tool("dvc", "push")
    tool("git", "clone", "-q", "--bare", ".", str(tmp_path / "shared.git"))
    tool("git", "tag", "--delete", "fedavg@v1.0.0")
    model = folder / "runs" / "fedavg-0" / "model"
    contents = {file.name: file.read_bytes() for file in model.iterdir()}
    for out, version in (("newest", []), ("first", ["--rev", "v1.0.0"])):
        words = ["fedavg", *version, "--out", str(tmp_path / out)]
        tool("dvc", "artifacts", "get", (tmp_path / "shared.git").as_uri(), *words)
        assert {file.name: file.read_bytes() for file in (tmp_path / out).iterdir()} == contents


def test_the_model_of_each_of_the_demos_methods_is_an_artifact() -> None:
    declared = yaml.safe_load((ROOT / "dvc.yaml").read_text())["artifacts"]
    methods = yaml.safe_load((ROOT / "params.yaml").read_text())["experiment"]["methods"]
    assert {name: a["path"] for name, a in declared.items()} == {
        name: f"runs/{name}-${{experiment.seeds[0]}}/model" for name in methods
    }


def test_a_changed_method_runs_alone(folder: Path, tool: Tool, first: str) -> None:
    settings = (folder / "params.yaml").read_text()
    (folder / "params.yaml").write_text(settings.replace("mu: 1.0", "mu: 3.0"))
    diff = json.loads(tool("dvc", "params", "diff", "--json"))
    assert [(name, change["old"], change["new"]) for name, change in diff["params.yaml"].items()] == [
        ("methods.fedprox.mu", 1.0, 3.0)
    ]
    before = (folder / "runs/fedprox-0/result.json").read_text()
    assert list_stages_run(tool("dvc", "repro")) == {"experiment@fedprox-0", "report"}
    assert (folder / "runs/fedprox-0/result.json").read_text() != before
    (folder / "params.yaml").write_text(settings)
    assert list_stages_run(tool("dvc", "repro")) == set()  # DVC has the old results still
    assert (folder / "runs/fedprox-0/result.json").read_text() == before


def test_changed_code_of_one_method_trains_that_method_only(folder: Path, tool: Tool, first: str) -> None:
    source = folder / "fclmodels/methods/fedprox.py"
    text = source.read_text()
    source.write_text(f"{text}\n\nEDITED = True\n")  # a comment alone would change no key
    printed = tool("dvc", "repro")
    source.write_text(text)
    learned = [line for line in printed.splitlines() if re.match(r"fed\w+-\d: task", line)]
    assert len(learned) == 4
    assert {line.partition("-")[0] for line in learned if line.endswith("(cached)")} == {"fedavg"}
    assert {line.partition("-")[0] for line in learned if not line.endswith("(cached)")} == {"fedprox"}
    tool("dvc", "repro")
