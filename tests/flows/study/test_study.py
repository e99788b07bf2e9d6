"""`fcl study` and `fcl tune`: repeated to the byte, side by side as one after another, killed and resumed, tracked."""

import json
import os
import re
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from mlflow import MlflowClient

Fcl = Callable[..., int]
STUDY = """
params: params.yaml
set: [partition.val=0.2]
seeds: [0, 1]
rows:
  FedAvg: {method: fedavg, grid: {optimizer.lr: [0.01, 0.2]}}
  FedProx: {method: fedprox, like: FedAvg}
"""
SEARCH = "{optimizer.lr: {low: 0.001, high: 1, log: true}, methods.fedprox.mu: [0.1, 1]}"


@pytest.fixture
def study(project: Path) -> Path:
    (project / "small.yaml").write_text(STUDY)
    return project / "small.yaml"


def strip_seconds(folder: Path) -> Any:
    """Return the content of results.json without what the clock measured."""
    content = json.loads((folder / "results.json").read_text())
    for row in content["rows"]:
        for name in ("seconds", "seconds_per_round"):
            del row["costs"][name]
        del row["tuning_seconds"]
    return content


def test_a_study_chooses_judges_and_is_the_same_when_repeated(
    fcl: Fcl, study: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert fcl("study", "small.yaml", "-w", "1") == 0
    out, err = capsys.readouterr()
    assert [line.split()[0] for line in out.splitlines() if line][-2:] == ["FedAvg", "FedProx"]
    assert re.search(r"val 2 of 2: FedAvg: \d", err)
    assert "run 4 of 4: FedProx, seed 1" in err
    folder = Path("studies/small")
    assert sorted(path.name for path in (folder / "runs").iterdir()) == [
        *("fedavg-0", "fedavg-1", "fedprox-0", "fedprox-1")
    ]
    chosen, same = json.loads((folder / "results.json").read_text())["rows"]
    assert chosen["settings"] == same["settings"] == ["optimizer.lr=0.2"]
    assert (chosen["tried"], same["tried"], chosen["difference"], same["difference"]["draws"]) == (2, 0, None, 2)
    accuracies = [
        json.loads((folder / "runs" / f"fedavg-{seed}" / "result.json").read_text())["metrics"]["task_agnostic"]["acc"]
        for seed in (0, 1)
    ]
    assert chosen["metrics"]["acc"]["mean"] == pytest.approx(sum(accuracies) / 2)
    written = {name: (folder / name).read_bytes() for name in ("index.html", "results.md", "results.json")}
    assert fcl("study", "small.yaml", "-w", "1", "-q") == 0
    assert {name: (folder / name).read_bytes() for name in written} == written
    client = MlflowClient(f"sqlite:///{study.parent}/mlflow.db")
    experiment = client.get_experiment_by_name("studies")
    assert experiment is not None
    runs = client.search_runs([experiment.experiment_id])
    (parent,) = [run for run in runs if "mlflow.parentRunId" not in run.data.tags]
    trials = [run for run in runs if run.data.tags.get("mlflow.parentRunId") == parent.info.run_id]
    assert sorted(run.data.params["optimizer.lr"] for run in trials) == ["0.01", "0.2"]
    assert all(0 <= run.data.metrics["val/acc"] <= 1 for run in trials)
    everywhere = [e.experiment_id for e in client.search_experiments() if e.name != "studies"]
    children = client.search_runs(everywhere, f"tags.`mlflow.parentRunId` = '{parent.info.run_id}'")
    assert len(children) == 4


def test_tune_prints_the_choice_as_lines_of_params_yaml(
    fcl: Fcl, study: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    grid = ("--grid", "optimizer.lr=0.01,0.2", "-s", "100", "--set", "partition.val=0.2", "-w", "1")
    assert fcl("tune", "fedavg", *grid, "--write", "chosen.yaml") == 0
    out, err = capsys.readouterr()
    assert yaml.safe_load(out) == {"optimizer": {"lr": 0.2}} == yaml.safe_load(Path("chosen.yaml").read_text())
    assert "% on val rows, the best of 2 choices" in err
    assert fcl("tune", "fedavg", *grid, "--write", "chosen.yaml") == 2
    assert "chosen.yaml is there already" in capsys.readouterr().err
    assert fcl("tune", "fedavg", "--search", "optimizer.lr=0.01:1:log", "--budget", "6", *grid[2:], "--json") == 0
    searched = json.loads(capsys.readouterr().out)
    assert len(searched["trials"]) == 6
    assert all(0.01 <= float(t["point"][0].partition("=")[2]) <= 1 for t in searched["trials"])
    values = [trial["values"][0] for trial in searched["trials"]]
    assert searched["chosen"]["values"][0] == max(value for value in values if value is not None)


def test_a_row_that_diverges_says_so_and_the_others_go_on(
    fcl: Fcl, study: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    row = "  Wild: {method: fedprox, grid: {optimizer.lr: [1.0e+20]}, seeds: [3]}\n"
    study.write_text(STUDY.replace("[0, 1]", "[0]").replace("[0.01, 0.2]", "[0.2]").replace("rows:\n", f"rows:\n{row}"))
    assert fcl("study", "small.yaml", "-w", "1", "--row", "FedAvg", "--row", "Wild") == 1  # though the others went on
    out, err = capsys.readouterr()
    assert re.search(r"^Wild \(0 of 1\) +– ", out, re.MULTILINE)
    assert "Wild: 1 of 1 runs ended early: rows.Wild: no choice of settings ran to its end" in err
    assert "Fewer than three draws" in err
    assert [path.name for path in Path("studies/small/runs").iterdir()] == ["fedavg-0"]


def test_a_mistake_is_one_line(fcl: Fcl, study: Path, capsys: pytest.CaptureFixture[str]) -> None:
    study.write_text(STUDY.replace("method: fedprox", "method: fedpro"))
    assert fcl("study", "small.yaml") == 2
    err = capsys.readouterr().err
    assert re.fullmatch(r"rows\.FedProx: .*fedprox.*\n", err)
    assert fcl("tune", "fedavg") == 2
    assert capsys.readouterr().err.startswith("Name what to tune fedavg by: --grid")
    assert not Path("studies").exists()


@pytest.mark.slow
def test_side_by_side_or_killed_the_table_is_that_of_one_after_another(
    study: Path, tool: Callable[..., str], start: Callable[..., Any], wait_for: Callable[..., Any]
) -> None:
    """Grid and search, two processes, and a kill -9 that leaves no worker behind."""
    row = f"  Searched: {{method: fedprox, search: {SEARCH}}}\n"
    study.write_text(f"{STUDY}{row}budget: 6\n")
    folder = study.parent
    tool(folder, "fcl", "study", "small.yaml", "-w", "1", "--out", "one")
    (folder / ".fcl" / "store").rename(folder / "old-store")
    killed = start(folder, "fcl", "study", "small.yaml", "-w", "2", "--out", "two")
    log = folder / "fcl-00.log"
    wait_for(lambda: "val 1 of 2" in log.read_text(), folder)
    workers = [int(pid) for pid in Path(f"/proc/{killed.pid}/task/{killed.pid}/children").read_text().split()]
    os.kill(killed.pid, signal.SIGKILL)
    killed.wait()
    python = [pid for pid in workers if is_worker(pid)]
    wait_for(lambda: not any(map(is_worker, python)), folder)
    tool(folder, "fcl", "study", "small.yaml", "-w", "2", "--out", "two")
    assert strip_seconds(folder / "one") == strip_seconds(folder / "two")
    for path in (folder / "one" / "runs").iterdir():
        one, two = (
            json.loads((folder / out / "runs" / path.name / "result.json").read_text()) for out in ("one", "two")
        )
        assert one["digests"] == two["digests"]


def is_worker(pid: int) -> bool:
    """Return whether this is a live worker."""
    try:
        return b"flows.study.worker" in Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return False
