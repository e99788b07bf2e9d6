"""DVC's experiments, queued and compared, and a remote, on a clone of this project."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from mlflow import MlflowClient

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]
Tool = Callable[..., str]
Clone = Callable[[Path], Path]


@pytest.fixture(scope="module")
def learned(clone: Clone, tool: Tool, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a clone with one method and one seed after `dvc repro`, committed; DVC links outs to its cache."""
    folder = clone(tmp_path_factory.mktemp("clone"))
    settings = (folder / "params.yaml").read_text()
    assert "  - fedavg\n  - fedprox\n  - joint\n" in settings
    (folder / "params.yaml").write_text(settings.replace("  - fedavg\n  - fedprox\n  - joint\n", "  - fedprox\n"))
    tool(folder, "dvc", "config", "cache.type", "hardlink")
    tool(folder, "dvc", "repro")
    tool(folder, "git", "add", ".")
    tool(folder, "git", "commit", "-qm", "results")
    return folder


def test_queued_experiments_are_kept_shown_plotted_and_tracked(
    learned: Path, tool: Tool, start: Callable[..., Any]
) -> None:
    """Each runs in a copy of the project that vanishes; its outs, its metrics and its run in MLflow do not."""
    changed = {"weak": 0.01, "strong": 10.0}
    for name, mu in changed.items():
        tool(learned, "dvc", "exp", "run", "--queue", "-n", name, "-S", f"methods.fedprox.mu={mu}")
    runner = start(learned, "dvc", "exp", "run", "--run-all", "--jobs", "1")  # its worker holds on to its output
    assert runner.wait() == 0
    tool(learned, "dvc", "queue", "stop")

    shown = json.loads(tool(learned, "dvc", "exp", "show", "--json"))
    experiments = {e["name"]: e["revs"][0]["data"] for base in shown for e in base["experiments"] or ()}
    assert experiments.keys() == changed.keys()
    strengths = {
        name: data["params"]["params.yaml"]["data"]["methods"]["fedprox"]["mu"] for name, data in experiments.items()
    }
    assert strengths == changed
    metrics = {name: data["metrics"]["report/metrics/fedprox-0.json"]["data"] for name, data in experiments.items()}
    assert metrics["weak"]["task_aware"] != metrics["strong"]["task_aware"]
    assert "methods.fedprox.mu" in tool(learned, "dvc", "exp", "show", "--csv").partition("\n")[0]

    printed = tool(learned, "dvc", "plots", "diff", "weak", "strong", "--out", "compared")
    page = learned / "compared" / "index.html"
    assert page.as_uri() in printed
    assert all(f'"rev": "{name}"' in page.read_text() for name in changed)

    client = MlflowClient(f"sqlite:///{learned}/mlflow.db")
    runs = client.search_runs([client.get_experiment_by_name("digits class-incremental").experiment_id])
    tracked = {run.data.tags.get("dvc.experiment"): run for run in runs}
    assert {name: float(tracked[name].data.params["settings.mu"]) for name in changed} == changed
    for name in changed:
        assert "report.html" in {file.path for file in client.list_artifacts(tracked[name].info.run_id)}
        assert tracked[name].info.artifact_uri.startswith((learned / "mlartifacts").as_uri())


def test_a_remote_gives_a_fresh_clone_the_same_bits_and_nothing_to_do(
    learned: Path, tool: Tool, tmp_path: Path
) -> None:
    tool(learned, "dvc", "remote", "add", "--default", "store", str(tmp_path / "remote"))
    tool(learned, "dvc", "push")
    tool(learned, "git", "commit", "-aqm", "remote")
    fresh = tmp_path / "fresh"
    tool(tmp_path, "git", "clone", "-q", str(learned), str(fresh))
    tool(fresh, "dvc", "pull")
    result = fresh / "runs" / "fedprox-0" / "result.json"
    bits = result.read_bytes()
    assert bits == (learned / "runs" / "fedprox-0" / "result.json").read_bytes()
    assert "Running stage" not in tool(fresh, "dvc", "repro")

    assert not result.stat().st_mode & 0o222  # a link to DVC's cache: who wrote into it would change the cache
    tool(fresh, "fcl", "run", "-m", "fedprox", "-q", "--set", "federation.rounds=1")
    assert result.read_bytes() != bits
    tool(fresh, "dvc", "checkout", "--force")
    assert result.read_bytes() == bits
