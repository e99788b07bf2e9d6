"""The experiment as a flow, which adds caching, tracking and publishing to fclmodels.experiment.experiment."""

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from mlflow import MlflowClient
from mlflow.entities import Run
from prefect.client.orchestration import get_client

import flows.experiment
from fclmodels.data.splits.split_reader import Splits
from fclmodels.experiment.costs import estimate
from fclmodels.experiment.costs.trial import TooLarge, Trial, run_trial
from fclmodels.experiment.experiment import Experiment
from fclmodels.experiment.stages import STAGES, Step
from fclmodels.settings.load import load_params

Fcl = Callable[..., int]
OUT = Path("runs/fedavg-0")


def read_result(out: Path = OUT) -> dict[str, Any]:
    return json.loads((out / "result.json").read_text())


def find_runs(project: Path) -> list[Run]:
    client = MlflowClient(f"sqlite:///{project}/mlflow.db")
    return list(client.search_runs([experiment.experiment_id for experiment in client.search_experiments()]))


def test_the_flow_finds_what_the_experiment_alone_finds(fcl: Fcl, project: Path) -> None:
    assert fcl("run", "-m", "fedavg", "-q") == 0
    with Experiment(
        load_params("params.yaml", seed=0), "fedavg", 0, Splits.open(Path("data/splits/0")), Path("other-home")
    ) as alone:
        expected = alone.run(Path("alone"))
    for part in ("metrics", "digests", "settings", "bytes_up", "bytes_down"):
        assert read_result()[part] == expected[part]


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
    (run,) = find_runs(project)
    assert run.info.status == "FINISHED"


def test_what_prefect_remembers_is_json_that_names_objects(fcl: Fcl, finished: Path) -> None:
    records = [json.loads(path.read_text()) for path in Path(".fcl/results").iterdir()]
    assert len(records) >= 8
    objects = [json.loads(record["result"])["objects"] for record in records]
    digests = [digest for by_name in objects for digest in by_name.values()]
    assert all(len(digest) == 64 and int(digest, 16) for digest in digests)


def test_prefect_is_not_believed_where_the_store_lost_an_object(fcl: Fcl, finished: Path, steps: list[str]) -> None:
    first = read_result()
    outcomes = [json.loads(path.read_text()) for path in Path(".fcl/store/done").iterdir()]
    (lost,) = [o["objects"]["state"] for o in outcomes if (o["stage"], o["task"]) == ("learn", 1)]
    Path(".fcl/store", lost[:2], lost).unlink()
    steps.clear()
    assert fcl("run", "-m", "fedavg", "-q") == 0
    assert "learn 1" in steps
    assert "learn 0" not in steps
    assert read_result()["metrics"] == first["metrics"]
    assert read_result()["digests"] == first["digests"]


def test_prefect_is_not_believed_where_it_says_something_else_than_the_store(
    fcl: Fcl, finished: Path, steps: list[str]
) -> None:
    first = read_result()
    cut, *changed = sorted(Path(".fcl/results").iterdir())
    cut.write_text(cut.read_text()[:100])
    for file in changed:
        file.write_text(file.read_text().replace("a", "b"))
    steps.clear()
    assert fcl("run", "-m", "fedavg", "-q") == 0
    assert steps == []
    assert read_result() == first


def test_prepared_data_that_were_changed_are_refused_and_a_runs_own_are_made_anew(
    fcl: Fcl, finished: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def change_last_byte(file: Path) -> None:
        with open(file, "r+b") as content:
            content.seek(-1, os.SEEK_END)
            content.write(b"\xff")

    usual = read_result()
    capsys.readouterr()
    change_last_byte(Path("data/prepared/images.npy"))
    assert fcl("run", "-m", "fedavg", "-q") == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line == "data/prepared does not match its digest (changed after it was written). Make it again: fcl prepare."
    Path("data").rename("elsewhere")
    for _ in range(2):
        assert fcl("run", "-m", "fedavg", "-q") == 0
        assert read_result()["digests"] == usual["digests"]
        (own,) = Path(".fcl/data").glob("prepared-*/images.npy")
        change_last_byte(own)


def test_a_deleted_run_folder_is_published_again_without_training(fcl: Fcl, finished: Path, steps: list[str]) -> None:
    first = read_result()
    OUT.rename("moved")
    steps.clear()
    assert fcl("run", "-m", "fedavg", "-q") == 0
    assert steps == []
    assert read_result() == first


def test_a_failed_task_fails_the_flow_and_the_tracked_run_which_then_goes_on(
    fcl: Fcl, project: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def broken(step: Step) -> None:
        raise RuntimeError("the disk is on fire")

    with monkeypatch.context() as patch:
        patch.setitem(STAGES, "conclude", broken)
        assert fcl("run", "-m", "fedavg", "-q") == 1
    printed = capsys.readouterr().err
    assert printed.rstrip().endswith("fcl failed: RuntimeError: the disk is on fire")
    assert "in broken" in printed
    assert "site-packages/prefect" not in printed
    (failed,) = find_runs(project)
    assert failed.info.status == "FAILED"
    assert "the disk is on fire" in failed.data.tags["fcl.error"]
    assert not OUT.exists()

    assert fcl("run", "-m", "fedavg", "-q") == 0
    (finished,) = find_runs(project)
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
    (killed,) = find_runs(project)
    assert killed.info.status == "KILLED"
    assert fcl("run", "-m", "fedavg", "-q") == 0
    client = MlflowClient(f"sqlite:///{project}/mlflow.db")
    history = client.get_metric_history(killed.info.run_id, "train/loss")
    assert sorted(metric.step for metric in history) == [0, 1, 2, 3]
    accuracies = client.get_metric_history(killed.info.run_id, "acc/task_agnostic")
    assert [metric.step for metric in accuracies] == [1, 2]
    assert accuracies[-1].value == pytest.approx(read_result()["metrics"]["task_agnostic"]["acc"])


def test_a_mistake_inside_a_flow_is_reported_in_one_line(
    fcl: Fcl, project: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert fcl("run", "-m", "fedavg", "-q", "--set", "federation.rounds=[1, 2, 3]") == 2
    assert capsys.readouterr().err.startswith("federation.rounds lists 3 tasks, the stream has 2.")
    assert not OUT.exists()


def test_a_methods_advice_is_printed_before_its_first_round(
    fcl: Fcl, project: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """And not with --quiet, nor by a method without advice."""
    assert fcl("run", "-m", "special", "--set", "methods.special.lambda=50") == 0
    lines = capsys.readouterr().err.splitlines()
    advice = [number for number, line in enumerate(lines) if "98%" in line or "beyond" in line]
    learned = [number for number, line in enumerate(lines) if "task 1 of 2 learned" in line]
    assert "98% of that by round 1" in lines[advice[0]]
    assert lines[advice[1]].startswith("special-0: federation.rounds: 1 of 1 later tasks goes on beyond that")
    assert advice[1] < learned[0]
    assert fcl("run", "-m", "special", "-q", "--set", "methods.special.lambda=60") == 0
    assert fcl("run", "-m", "fedavg") == 0
    assert "98%" not in capsys.readouterr().err


def test_a_methods_remark_is_printed_once_and_stored_with_the_result(
    fcl: Fcl, project: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """After the task that it is about, and from then on beside the figures, also with --quiet."""
    own = ("profile=paper", "threshold=1.0")
    full = ["run", "-m", "fedprotip", *(part for one in own for part in ("--set", f"methods.fedprotip.{one}"))]
    assert fcl(*full) == 0
    lines = capsys.readouterr().err.splitlines()
    remarks = [
        number for number, line in enumerate(lines) if line.startswith("fedprotip-0: after task 1 the bases fill")
    ]
    learned = [number for number, line in enumerate(lines) if "learned, accuracy" in line]
    assert len(remarks) == 1
    assert remarks[0] < learned[0]
    (remark,) = json.loads(Path("runs/fedprotip-0/result.json").read_text())["remarks"]
    assert lines[remarks[0]] == f"fedprotip-0: {remark}"
    assert fcl(*full, "-q") == 0
    assert f"{remark[0].upper()}{remark[1:]}." in capsys.readouterr().err


def test_other_data_are_made_for_the_run_and_data_splits_stay(
    fcl: Fcl, finished: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = {path: path.read_bytes() for path in Path("data").rglob("*") if path.is_file()}
    usual = read_result()
    assert fcl("run", "-m", "fedavg", "-q") == 0
    assert "another origin" not in capsys.readouterr().err
    assert fcl("run", "-m", "fedavg", "--set", "partition.clients=2") == 0
    assert "data/splits/0 has another origin (partition.clients): this run uses .fcl/data/" in capsys.readouterr().err
    assert read_result()["settings"]["partition"]["clients"] == 2
    assert read_result()["digests"]["prepared"] == usual["digests"]["prepared"]
    assert read_result()["digests"]["splits"] != usual["digests"]["splits"]
    assert {path: path.read_bytes() for path in Path("data").rglob("*") if path.is_file()} == before
    assert len(find_runs(finished)) == 2


def test_a_run_needs_no_prepared_data(fcl: Fcl, finished: Path) -> None:
    usual = read_result()
    Path("data").rename("elsewhere")
    assert fcl("run", "-m", "fedavg", "-q") == 0
    assert read_result() == usual
    assert not Path("data").exists()


def test_a_folder_that_is_no_run_is_not_replaced(fcl: Fcl, project: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert fcl("run", "-m", "fedavg", "-q", "--out", "data") == 2
    assert capsys.readouterr().err.startswith("data holds something other than a run.")
    assert (project / "data" / "splits" / "0" / "manifest.parquet").exists()


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
    assert sum(final) / 2 == pytest.approx(100 * read_result()["metrics"]["task_agnostic"]["acc"], abs=0.1)


def test_report_leaves_a_page_metrics_and_plots(fcl: Fcl, project: Path) -> None:
    for seed in ("0", "1"):
        assert fcl("run", "-m", "fedavg", "-s", seed, "-q") == 0
    assert fcl("report", "runs/fedavg-0", "runs/fedavg-1", "-q") == 0
    assert "<html" in Path("report/index.html").read_text()
    metrics = json.loads(Path("report/metrics/fedavg-0.json").read_text())
    assert metrics["task_agnostic"]["acc"] == read_result()["metrics"]["task_agnostic"]["acc"]
    accuracies = [
        json.loads(Path(f"runs/fedavg-{s}/result.json").read_text())["metrics"]["task_agnostic"]["acc"] for s in "01"
    ]
    last = Path("report/plots/accuracy.csv").read_text().splitlines()[-1]
    assert float(last.split(",")[1]) == pytest.approx(sum(accuracies) / 2)
    assert Path("report/plots/bytes.csv").read_text().splitlines()[0] == "task,fedavg"
    assert len(Path("report/plots/matrix.csv").read_text().splitlines()) > 2 * 2 * 2


def raise_too_large(*_: object) -> None:
    raise TooLarge


def test_a_large_runs_costs_are_said_before_it_and_one_that_does_not_fit_is_refused(
    fcl: Fcl, project: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(flows.experiment, "is_small", lambda run: False)
    monkeypatch.setattr(estimate, "run_trial", raise_too_large)  # as it does: fclmodels/experiment/costs
    assert fcl("run", "-m", "fedavg") == 2
    assert "fedavg-0 does not fit into memory" in capsys.readouterr().err
    assert not OUT.exists()
    monkeypatch.undo()
    monkeypatch.chdir(project)
    monkeypatch.setattr(flows.experiment, "is_small", lambda run: False)
    assert fcl("run", "-m", "fedavg") == 0
    assert "fedavg-0: expected: " in capsys.readouterr().err
    assert fcl("run", "-m", "fedavg") == 0
    assert "expected: " not in capsys.readouterr().err


def test_explain_here_says_what_a_run_costs_with_these_settings(
    fcl: Fcl, project: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    trials: list[Trial] = []

    def try_once(*arguments: Any) -> Trial:
        if not trials:
            trials.append(run_trial(*arguments))
        return trials[0]

    monkeypatch.setattr(estimate, "run_trial", try_once)
    assert fcl("explain", "fedavg", "--here", "--json") == 0
    costs = json.loads(capsys.readouterr().out)
    assert fcl("run", "-m", "fedavg", "-q", "--force") == 0
    assert (costs["bytes_up"], costs["bytes_down"]) == (read_result()["bytes_up"], read_result()["bytes_down"])
    assert fcl("explain", "fedavg", "--here") == 0
    assert "clients send" in capsys.readouterr().out


def test_several_methods_and_seeds_run_one_after_another_and_are_compared(
    fcl: Fcl, project: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert fcl("run", "-m", "fedavg,fedprox", "-s", "0,1", "--out", "here") == 2
    assert "--out here is the folder of one run" in capsys.readouterr().err
    assert fcl("run", "-m", "fedavg,fedprox", "-s", "0,1", "-q") == 0
    splits = {
        name: read_result(Path("runs") / name)["digests"]["splits"] for name in ("fedavg-0", "fedprox-0", "fedavg-1")
    }
    assert splits["fedavg-0"] == splits["fedprox-0"] != splits["fedavg-1"]  # each seed draws its own
    shown = capsys.readouterr().out
    assert fcl("compare", *(f"runs/{method}-{seed}" for method in ("fedavg", "fedprox") for seed in range(2))) == 0
    assert shown == capsys.readouterr().out
    assert fcl("run", "-m", "fedavg,fedprox", "-s", "1", "--json") == 0
    assert [result["label"] for result in json.loads(capsys.readouterr().out)] == ["fedavg-1", "fedprox-1"]
    planned = ("--set", "experiment.methods=[fedavg,special]", "--set", "experiment.seeds=[0,1]")
    assert fcl("compare", *planned) == 0
    out, err = capsys.readouterr()
    assert "fedavg" in out
    assert "not run yet, so left out: runs/special-0, runs/special-1\n" in err


def test_without_its_pretrained_weights_the_demos_pip_names_the_command_that_makes_them(
    fcl: Fcl, project: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    params = Path(__file__).parents[2] / "params.yaml"
    assert fcl("run", "-m", "pip-dualp", "--params", str(params), "-q") == 2
    error = capsys.readouterr().err.splitlines()[-1]
    assert error.startswith("model.weights: there is no file data/pretrained/letters/weights.safetensors. ")
    assert "`fcl pretrain --out data/pretrained/letters` trains small ones" in error
