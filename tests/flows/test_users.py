"""Users' paths with the real tools, in clones of this project.

One runs `dvc repro` and `dvc exp`, one compares runs on an MLflow server and takes the best model from there. What one
does who has a stream on a schedule is in test_schedule.py.
"""

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from mlflow import MlflowClient
from PIL import Image
from sklearn.datasets import load_digits

from flows.prefect import server

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]
Start = Callable[..., Any]
Tool = Callable[..., str]
WaitFor = Callable[[Callable[[], Any], Path], Any]


@pytest.fixture(scope="module")
def learned(clone: Callable[[Path], Path], tool: Tool, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A clone after `dvc repro`, committed."""
    folder = clone(tmp_path_factory.mktemp("clone"))
    settings = (folder / "params.yaml").read_text()
    assert "  - joint\n" in settings
    (folder / "params.yaml").write_text(settings.replace("  - joint\n", ""))
    assert list_stages_run(tool(folder, "dvc", "repro")) == {
        *("prepare", "partition@0", "experiment@fedavg-0", "experiment@fedprox-0", "report")
    }
    tool(folder, "git", "add", ".")
    tool(folder, "git", "commit", "-qm", "results")
    return folder


def list_stages_run(printed: str) -> set[str]:
    """Return the stages whose commands were run."""
    return set(re.findall(r"Running stage '(.*)':", printed))


def test_an_experiment_of_dvc_is_kept_with_its_metrics(learned: Path, tool: Tool) -> None:
    assert list_stages_run(tool(learned, "dvc", "repro")) == set()
    printed = tool(learned, "dvc", "exp", "run", "-n", "stronger", "-S", "methods.fedprox.mu=0.5")
    assert list_stages_run(printed) == {"experiment@fedprox-0", "report"}
    shown = json.loads(tool(learned, "dvc", "exp", "show", "--json"))
    (experiment,) = [
        e["revs"][0]["data"] for base in shown for e in base["experiments"] or () if e["name"] == "stronger"
    ]
    assert experiment["params"]["params.yaml"]["data"]["methods"]["fedprox"]["mu"] == 0.5
    assert 0 < experiment["metrics"]["report/metrics/fedprox-0.json"]["data"]["task_aware"]["acc"] <= 1
    client = MlflowClient(f"sqlite:///{learned}/mlflow.db")
    runs = client.search_runs([client.get_experiment_by_name("digits class-incremental").experiment_id])
    (tagged,) = [run for run in runs if run.data.tags.get("dvc.experiment") == "stronger"]
    assert (tagged.data.tags["method"], tagged.data.params["settings.mu"]) == ("fedprox", "0.5")


def test_the_best_model_of_a_tracking_servers_runs_answers_over_http(
    learned: Path, tool: Tool, start: Start, wait_for: WaitFor, serving: Callable[..., Any], tmp_path: Path
) -> None:
    uri = f"http://127.0.0.1:{server.find_free_port()}"
    words = [
        "--backend-store-uri",
        f"sqlite:///{tmp_path}/mlflow.db",
        "--artifacts-destination",
        str(tmp_path / "artifacts"),
    ]
    start(
        tmp_path, "mlflow", "server", "--workers", "1", *words, "--host", "127.0.0.1", "--port", uri.rpartition(":")[2]
    )
    wait_for(lambda: server.is_healthy(uri), tmp_path)
    there = ("--set", f"tracking.uri={uri}")
    for method in ("fedavg", "fedprox"):
        run_folder = str(tmp_path / f"{method}-0")
        result = json.loads(tool(learned, "fcl", "run", "-m", method, "-q", "--out", run_folder, "--json", *there))
        assert result["method"] == method
    compared = json.loads(tool(learned, "fcl", "compare", "--from-mlflow", "--json", *there))
    accuracy = {row["method"]: row["acc"] for row in compared if row["reading"] == "task_agnostic"}
    best = max(accuracy, key=lambda method: accuracy[method])

    client = MlflowClient(uri)
    (experiment,) = client.search_experiments(filter_string="name LIKE 'digits%'")
    order = ["metrics.`acc/task_agnostic` DESC"]
    (run, *_) = client.search_runs([experiment.experiment_id], order_by=order)
    assert (run.data.tags["method"], run.data.metrics["acc/task_agnostic"]) == (best, pytest.approx(accuracy[best]))
    client.create_registered_model("digits")
    model = run.outputs.model_outputs[0].model_id
    version = client.create_model_version("digits", f"models:/{model}", run.info.run_id, model_id=model)
    client.set_registered_model_alias("digits", "champion", version.version)
    Image.fromarray((load_digits().images[3] * 15.9).astype("uint8")).save(tmp_path / "3.png")
    (answer,) = json.loads(
        tool(learned, "fcl", "predict", "models:/digits@champion", str(tmp_path / "3.png"), "--json", *there)
    )
    with serving("models:/digits@champion", uri, tmp_path / "serve.log") as ask:
        (served,) = ask({"dataframe_records": [{"image": str(tmp_path / "3.png")}]})
    assert {"file": str(tmp_path / "3.png"), **served} == answer
