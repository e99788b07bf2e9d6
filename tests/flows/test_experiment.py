"""The experiment as a flow: what it adds to fclmodels.experiment is caching, tracking and publishing."""

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from mlflow import MlflowClient
from mlflow.entities import Run
from prefect.client.orchestration import get_client

from fclmodels.data.splits import Splits
from fclmodels.experiment import Experiment, Step
from fclmodels.params import load

Fcl = Callable[..., int]
OUT = Path("runs/fedavg-0")


def result() -> dict[str, Any]:
    return json.loads((OUT / "result.json").read_text())


def tracked_runs(project: Path) -> list[Run]:
    client = MlflowClient(f"sqlite:///{project}/mlflow.db")
    return list(client.search_runs([experiment.experiment_id for experiment in client.search_experiments()]))


def test_the_flow_finds_what_the_experiment_alone_finds(fcl: Fcl, project: Path) -> None:
    assert fcl("run", "-m", "fedavg", "-q") == 0
    with Experiment(load("params.yaml"), "fedavg", 0, Splits.open(Path("data/splits")), Path("other-home")) as alone:
        expected = alone.run(Path("alone"))
    for part in ("metrics", "digests", "settings", "bytes_up", "bytes_down"):
        assert result()[part] == expected[part]


def test_a_second_run_trains_nothing_and_says_the_same(fcl: Fcl, project: Path, steps: list[str]) -> None:
    assert fcl("run", "-m", "fedavg", "-q") == 0
    assert steps == [
        "begin 0",
        "evaluate 0",
        "learn 0",
        "conclude 0",
        "evaluate 1",
        "learn 1",
        "conclude 1",
        "evaluate 2",
    ]
    first = (OUT / "result.json").read_bytes()
    steps.clear()
    assert fcl("run", "-m", "fedavg", "-q") == 0
    assert steps == []
    assert (OUT / "result.json").read_bytes() == first
    (run,) = tracked_runs(project)
    assert run.info.status == "FINISHED"


def test_what_prefect_remembers_is_json_that_names_objects(fcl: Fcl, project: Path) -> None:
    assert fcl("run", "-m", "fedavg", "-q") == 0
    kept = [json.loads(path.read_text()) for path in Path(".fcl/results").iterdir()]
    assert len(kept) >= 8
    objects = [json.loads(record["result"])["objects"] for record in kept]
    digests = [digest for named in objects for digest in named.values()]
    assert all(len(digest) == 64 and int(digest, 16) for digest in digests)


def test_prefect_is_not_believed_where_the_store_lost_an_object(fcl: Fcl, project: Path, steps: list[str]) -> None:
    assert fcl("run", "-m", "fedavg", "-q") == 0
    first = result()
    outcomes = [json.loads(path.read_text()) for path in Path(".fcl/store/done").iterdir()]
    (lost,) = [o["objects"]["state"] for o in outcomes if (o["stage"], o["task"]) == ("learn", 1)]
    Path(".fcl/store", lost[:2], lost).unlink()
    steps.clear()
    assert fcl("run", "-m", "fedavg", "-q") == 0
    assert "learn 1" in steps
    assert "learn 0" not in steps
    assert result()["metrics"] == first["metrics"]
    assert result()["digests"] == first["digests"]


def test_prefect_is_not_believed_where_it_says_something_else_than_the_store(
    fcl: Fcl, project: Path, steps: list[str]
) -> None:
    assert fcl("run", "-m", "fedavg", "-q") == 0
    first = result()
    cut, *changed = sorted(Path(".fcl/results").iterdir())
    cut.write_text(cut.read_text()[:100])
    for file in changed:
        file.write_text(file.read_text().replace("a", "b"))
    steps.clear()
    assert fcl("run", "-m", "fedavg", "-q") == 0
    assert steps == []
    assert result() == first


def test_prepared_data_that_were_changed_are_refused_and_a_runs_own_are_made_anew(
    fcl: Fcl, project: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def change(file: Path) -> None:
        with open(file, "r+b") as content:
            content.seek(-1, os.SEEK_END)
            content.write(b"\xff")

    assert fcl("run", "-m", "fedavg", "-q") == 0
    usual = result()
    capsys.readouterr()
    change(Path("data/prepared/images.npy"))
    assert fcl("run", "-m", "fedavg", "-q") == 2
    (told,) = capsys.readouterr().err.splitlines()
    assert told == "data/prepared does not match its digest (changed after it was written). Make it again: fcl prepare."
    Path("data").rename("elsewhere")
    for _ in range(2):
        assert fcl("run", "-m", "fedavg", "-q") == 0
        assert result()["digests"] == usual["digests"]
        (own,) = Path(".fcl/data").glob("prepared-*/images.npy")
        change(own)


def test_a_deleted_run_folder_is_published_again_without_training(fcl: Fcl, project: Path, steps: list[str]) -> None:
    assert fcl("run", "-m", "fedavg", "-q") == 0
    first = result()
    OUT.rename("moved")
    steps.clear()
    assert fcl("run", "-m", "fedavg", "-q") == 0
    assert steps == []
    assert result() == first


def test_a_failed_task_fails_the_flow_and_the_tracked_run_which_then_goes_on(
    fcl: Fcl, project: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def broken(self: Experiment, step: Step) -> None:
        raise RuntimeError("the disk is on fire")

    with monkeypatch.context() as patch:
        patch.setattr(Experiment, "_conclude", broken)
        assert fcl("run", "-m", "fedavg", "-q") == 1
    told = capsys.readouterr().err
    assert told.rstrip().endswith("fcl failed: RuntimeError: the disk is on fire")
    assert "in broken" in told
    assert "prefect" not in told
    (failed,) = tracked_runs(project)
    assert failed.info.status == "FAILED"
    assert "the disk is on fire" in failed.data.tags["fcl.error"]
    assert not OUT.exists()

    assert fcl("run", "-m", "fedavg", "-q") == 0
    (finished,) = tracked_runs(project)
    assert finished.info.run_id == failed.info.run_id
    assert finished.info.status == "FINISHED"
    assert "fcl.error" not in finished.data.tags


def test_a_resumed_run_has_each_number_once(fcl: Fcl, project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = Step.run

    def stopped(step: Step) -> dict[str, Any]:
        if (step.stage, step.task) == ("learn", 1):
            raise KeyboardInterrupt
        return run(step)

    with monkeypatch.context() as patch:
        patch.setattr(Step, "run", stopped)
        assert fcl("run", "-m", "fedavg", "-q") == 130
    (killed,) = tracked_runs(project)
    assert killed.info.status == "KILLED"
    assert fcl("run", "-m", "fedavg", "-q") == 0
    client = MlflowClient(f"sqlite:///{project}/mlflow.db")
    history = client.get_metric_history(killed.info.run_id, "train/loss")
    assert sorted(metric.step for metric in history) == [0, 1, 2, 3]
    accuracies = client.get_metric_history(killed.info.run_id, "acc/task_agnostic")
    assert [metric.step for metric in accuracies] == [1, 2]
    assert accuracies[-1].value == pytest.approx(result()["metrics"]["task_agnostic"]["acc"])


def test_a_mistake_found_inside_a_flow_is_told_in_one_line(
    fcl: Fcl, project: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert fcl("run", "-m", "fedavg", "-q", "--set", "federation.rounds=[1, 2, 3]") == 2
    assert capsys.readouterr().err.startswith("federation.rounds lists 3 tasks, the stream has 2.")
    assert not OUT.exists()


def test_what_a_method_advises_is_told_before_its_first_round(
    fcl: Fcl, project: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """And not where quiet is asked for, nor by a method that has nothing to say."""
    assert fcl("run", "-m", "special", "--set", "methods.special.lambda=50") == 0
    told = capsys.readouterr().err.splitlines()
    advice = [number for number, line in enumerate(told) if "98%" in line or "beyond" in line]
    learned = [number for number, line in enumerate(told) if "task 1 of 2 learned" in line]
    assert "98% of that by round 1" in told[advice[0]]
    assert told[advice[1]].startswith("special-0: federation.rounds: 1 of 1 later tasks goes on beyond that")
    assert advice[1] < learned[0]
    assert fcl("run", "-m", "special", "-q", "--set", "methods.special.lambda=60") == 0
    assert fcl("run", "-m", "fedavg") == 0
    assert "98%" not in capsys.readouterr().err


def test_what_a_method_remarks_is_told_once_and_kept_with_the_result(
    fcl: Fcl, project: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """After the task that it is true of; from then on beside the figures, where quiet is asked for too."""
    full = ["run", "-m", "fedprotip", "--set", "methods.fedprotip.threshold=1.0"]
    assert fcl(*full) == 0
    told = capsys.readouterr().err.splitlines()
    found = [number for number, line in enumerate(told) if line.startswith("fedprotip-0: after task 1 the bases fill")]
    learned = [number for number, line in enumerate(told) if "learned, accuracy" in line]
    assert len(found) == 1
    assert found[0] < learned[0]
    (kept,) = json.loads(Path("runs/fedprotip-0/result.json").read_text())["remarks"]
    assert told[found[0]] == f"fedprotip-0: {kept}"
    assert fcl(*full, "-q") == 0
    assert f"{kept[0].upper()}{kept[1:]}." in capsys.readouterr().err


def test_other_data_are_made_for_the_run_and_data_splits_stay(
    fcl: Fcl, project: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = {path: path.read_bytes() for path in Path("data").rglob("*") if path.is_file()}
    assert fcl("run", "-m", "fedavg", "-q") == 0
    usual = result()
    assert "made otherwise" not in capsys.readouterr().err
    assert fcl("run", "-m", "fedavg", "--set", "partition.clients=2") == 0
    assert "data/splits was made otherwise (partition.clients): this run uses .fcl/data/" in capsys.readouterr().err
    assert result()["settings"]["partition"]["clients"] == 2
    assert result()["digests"]["prepared"] == usual["digests"]["prepared"]
    assert result()["digests"]["splits"] != usual["digests"]["splits"]
    assert {path: path.read_bytes() for path in Path("data").rglob("*") if path.is_file()} == before
    assert len(tracked_runs(project)) == 2


def test_a_run_needs_no_prepared_data(fcl: Fcl, project: Path) -> None:
    assert fcl("run", "-m", "fedavg", "-q") == 0
    usual = result()
    Path("data").rename("elsewhere")
    assert fcl("run", "-m", "fedavg", "-q") == 0
    assert result() == usual
    assert not Path("data").exists()


def test_a_folder_that_is_no_run_is_not_replaced(fcl: Fcl, project: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert fcl("run", "-m", "fedavg", "-q", "--out", "data") == 2
    assert capsys.readouterr().err.startswith("data holds something else than a run.")
    assert (project / "data" / "splits" / "manifest.parquet").exists()


def test_an_impossible_store_is_a_mistake_in_the_settings(
    fcl: Fcl, project: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert fcl("run", "-m", "fedavg", "-q", "--set", "tracking.uri=gopher://here") == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("tracking.uri: gopher://here cannot be used: ")


def test_prefect_shows_progress_and_matrix(fcl: Fcl, project: Path) -> None:
    assert fcl("run", "-m", "fedavg", "-q") == 0
    with get_client(sync_client=True) as client:
        latest = client.read_latest_artifacts()
    shown = {artifact.key: artifact.data for artifact in latest}
    assert shown["progress-fedavg-0"] == 100.0
    rows = json.loads(str(shown["accuracy-fedavg-0"]))
    assert [row["tasks learned"] for row in rows] == [0, 1, 2]
    final = [float(rows[-1][f"task {task}"].removesuffix(" %")) for task in (1, 2)]
    assert sum(final) / 2 == pytest.approx(100 * result()["metrics"]["task_agnostic"]["acc"], abs=0.1)


def test_report_leaves_a_page_metrics_and_plots(fcl: Fcl, project: Path) -> None:
    for seed in ("0", "1"):
        assert fcl("run", "-m", "fedavg", "-s", seed, "-q") == 0
    assert fcl("report", "runs/fedavg-0", "runs/fedavg-1", "-q") == 0
    assert "<html" in Path("report/index.html").read_text()
    metrics = json.loads(Path("report/metrics/fedavg-0.json").read_text())
    assert metrics["task_agnostic"]["acc"] == result()["metrics"]["task_agnostic"]["acc"]
    accuracies = [
        json.loads(Path(f"runs/fedavg-{s}/result.json").read_text())["metrics"]["task_agnostic"]["acc"] for s in "01"
    ]
    last = Path("report/plots/accuracy.csv").read_text().splitlines()[-1]
    assert float(last.split(",")[1]) == pytest.approx(sum(accuracies) / 2)
    assert Path("report/plots/bytes.csv").read_text().splitlines()[0] == "task,fedavg"
    assert len(Path("report/plots/matrix.csv").read_text().splitlines()) > 2 * 2 * 2
