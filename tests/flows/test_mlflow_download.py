"""A comparison of runs from MLflow equals that of their folders, and MLflow holds it beside them."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any
from urllib.parse import quote

import pytest
from mlflow import MlflowClient

from flows.prefect import server
from tasks.mlflow.saved_view import ACC, COSTS, FORGETTING

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
    assert run.data.metrics.keys() >= {ACC, FORGETTING, *COSTS}  # the columns with which the pages open
    assert fcl("compare", "--from-mlflow", run.info.run_id, "--json") == 0
    assert {row["method"] for row in json.loads(capsys.readouterr().out)} == {"fedavg"}
    name = client.get_experiment(run.info.experiment_id).name
    of_two = ("--from-mlflow", name, "metrics.`acc/task_agnostic` >= 0", run.info.run_id)
    assert fcl("compare", *of_two, "--json", "--out", "report") == 0
    assert json.loads(capsys.readouterr().out) == expected
    assert "fedprox" in Path("report/index.html").read_text()
    assert fcl("compare", "--from-mlflow", "params.method = 'fedprox'", "--json") == 0
    assert {row["method"] for row in json.loads(capsys.readouterr().out)} == {"fedprox"}
    assert fcl("compare", "--from-mlflow", "params.method = 'fot'") == 2
    assert "holds no finished run of params.method = 'fot'" in capsys.readouterr().err
    assert fcl("compare", "--from-mlflow", "none such") == 2
    assert "none such" in capsys.readouterr().err


@pytest.mark.slow
def test_a_comparison_is_the_parent_of_its_runs_and_one_for_the_same_runs(
    project: Path, fcl: Fcl, capsys: pytest.CaptureFixture[str]
) -> None:
    for seed in ("0", "1"):
        assert fcl("run", "-m", "fedavg", "-s", seed, "-q") == 0
    client = MlflowClient(f"sqlite:///{project}/mlflow.db")
    (experiment,) = [e for e in client.search_experiments() if e.name.startswith("digits")]

    def find_parents() -> list[str]:
        comparisons = client.get_experiment_by_name("comparisons")
        if not comparisons:
            return []
        return [run.info.run_id for run in client.search_runs([comparisons.experiment_id])]

    def read_parent_tags() -> set[str | None]:
        return {run.data.tags.get("mlflow.parentRunId") for run in client.search_runs([experiment.experiment_id])}

    assert fcl("compare", "runs/fedavg-0") == 0
    assert find_parents() == []
    for _ in range(2):
        assert fcl("report", "runs/fedavg-0", "runs/fedavg-1", "-q") == 0
    (both,) = find_parents()
    assert read_parent_tags() == {both}
    parent = client.get_run(both)
    assert (parent.info.run_name, parent.info.status, parent.data.tags["seed"]) == ("fedavg", "FINISHED", "0, 1")
    assert all(run.info.run_id in parent.data.tags["mlflow.note.content"] for run in client.search_runs(["1"]))
    assert {file.path for file in client.list_artifacts(both)} == {"comparison.json", "report.html"}
    shutil.move("runs/fedavg-0", "elsewhere")  # a run is identified by its result, not by its place
    assert fcl("report", "elsewhere", "-q") == 0
    (one,) = set(find_parents()) - {both}
    assert read_parent_tags() == {one, both}
    assert fcl("report", "elsewhere", "-q", "--set", "tracking.uri=http://127.0.0.1:9") == 0
    errors = capsys.readouterr().err
    assert "tracking.uri: http://127.0.0.1:9 cannot be used" in errors
    assert "not tracked" in errors
    assert fcl("report", "elsewhere", "-q", "--set", "tracking.uri=sqlite:///none.db") == 0
    assert not Path("none.db").exists()


@pytest.fixture
def start_server(start: Callable[..., Any], wait_for: Callable[..., Any]) -> Callable[[Path, str], str]:
    """Return a function that starts `mlflow server` on a database of a folder and returns its address."""

    def begin(folder: Path, database: str) -> str:
        port = server.find_free_port()
        words = [
            "--backend-store-uri",
            f"sqlite:///{folder}/{database}",
            "--artifacts-destination",
            str(folder / "artifacts"),
        ]
        words += ["--host", "127.0.0.1", "--port", str(port), "--workers", "1"]
        start(folder, "mlflow", "server", *words, MLFLOW_SERVER_ENABLE_JOB_EXECUTION="false")
        wait_for(lambda: server.is_healthy(f"http://127.0.0.1:{port}"), folder)
        return f"http://127.0.0.1:{port}"

    return begin


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_any_server_gives_the_same_comparison(
    project: Path, fcl: Fcl, start_server: Callable[[Path, str], str], capsys: pytest.CaptureFixture[str]
) -> None:
    """Tracked through HTTP and compared through HTTP, and from the database itself."""
    url = start_server(project, "other.db")
    there = ("--set", f"tracking.uri={url}")
    for method in ("fedavg", "fedprox"):
        assert fcl("run", "-m", method, "-q", *there) == 0
    capsys.readouterr()
    assert fcl("compare", "runs/fedavg-0", "runs/fedprox-0", "--json") == 0
    expected = json.loads(capsys.readouterr().out)
    shutil.rmtree("runs")
    for words in ([], ["digits class-incremental"], ["tags.seed = '0'"]):
        shutil.rmtree(".fcl/mlflow", ignore_errors=True)
        assert fcl("compare", "--from-mlflow", *words, *there, "--json") == 0
        assert json.loads(capsys.readouterr().out) == expected
    assert fcl("report", "--from-mlflow", *there, "-q") == 0
    client = MlflowClient(url)
    (parent,) = client.search_runs([client.get_experiment_by_name("comparisons").experiment_id])
    assert parent.info.run_name == "fedavg, fedprox"
    assert {file.path for file in client.list_artifacts(parent.info.run_id)} == {"comparison.json", "report.html"}


@pytest.mark.browser
@pytest.mark.timeout(400)
def test_mlflows_pages_say_something_without_set_up(
    project: Path, fcl: Fcl, start_server: Callable[[Path, str], str], browser: Any, tmp_path: Path
) -> None:
    """The charts of an experiment, runs side by side, a run's page with its report, and a comparison's page."""
    runs = [("fedavg", "0"), ("fedavg", "1"), ("fedprox", "0")]
    for method, seed in runs:
        assert fcl("run", "-m", method, "-s", seed, "-q") == 0
    assert fcl("report", *(f"runs/{method}-{seed}" for method, seed in runs), "-q") == 0
    client = MlflowClient(f"sqlite:///{project}/mlflow.db")
    ids = {e.name.split()[0]: e.experiment_id for e in client.search_experiments()}
    run_ids = {run.info.run_name: run.info.run_id for run in client.search_runs([ids["digits"]])}
    (comparison,) = client.search_runs([ids["comparisons"]])
    pages = f"{start_server(project, 'mlflow.db')}/#"

    def open_page(place: str, *expected: str) -> str:
        browser.open("about:blank")  # else only the part behind # changes, and the old page may still be read
        browser.open(f"{pages}/{place}")
        browser.run("localStorage.setItem('mlflow.assistant.panelOpen_v1', 'false')")
        text = browser.text(*expected)
        browser.driver.save_screenshot(str(tmp_path / f"{len(list(tmp_path.glob('*.png')))}.png"))
        return text

    here = f"experiments/{ids['digits']}/runs"
    charts = open_page(f"{here}?compareRunsMode=CHART&workflowType=machine_learning", *run_ids, "acc/task_agnostic")
    assert charts.index("\nacc\n") < charts.index("task_agnostic") < charts.index("task_aware")

    listed = json.dumps([*run_ids.values()])
    open_page(
        f"compare-runs?runs={quote(listed)}&experiments={quote(json.dumps([ids['digits']]))}",
        "Parallel Coordinates",
    )
    axes = browser.drawn("return [...document.querySelectorAll('.axis-title')].map(title => title.textContent)")
    assert axes == ["method", "seed", "settings.mu", "acc/task_agnostic"]

    page = f"{here}/{run_ids['fedprox seed 0']}"
    open_page(
        page, "fedprox seed 0", "fedavg, fedprox", "Task-agnostic", "acc_just_learned/task_agnostic", "settings.mu"
    )
    picture = "return [...document.images].some(i => i.src.includes('accuracy.png') && i.naturalWidth > 0)"
    assert browser.run(picture)
    open_page(f"{page}/artifacts/report.html", "report.html", "accuracy.png")
    browser.driver.switch_to.frame(browser.driver.find_element("tag name", "iframe"))
    browser.text("fclflow report", "Task-agnostic")
    browser.driver.switch_to.default_content()

    parent = f"experiments/{ids['comparisons']}/runs/{comparison.info.run_id}"
    open_page(parent, "fedavg, fedprox", "runs, by seed", "scenario")
    links = browser.run("return [...document.links].map(link => link.href).filter(link => link.includes('/runs/'))")
    assert {link.rpartition("/")[2] for link in links} >= set(run_ids.values())
