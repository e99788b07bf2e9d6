"""The three users' paths with the real tools, in clones of this project.

One runs `dvc repro` and `dvc exp`, one has a Prefect deployment that runs by the clock, one compares runs on an MLflow
server and takes the best model from there.
"""

import json
import re
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from mlflow import MlflowClient
from PIL import Image
from sklearn.datasets import load_digits

from flows import servers

NIGHTLY, OFTEN = "cron: 0 2 * * *", "cron: '* * * * * */20'"  # the sixth field is seconds
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
    assert ran(tool(folder, "dvc", "repro")) == {
        *("prepare", "partition", "experiment@fedavg-0", "experiment@fedprox-0", "report")
    }
    tool(folder, "git", "add", ".")
    tool(folder, "git", "commit", "-qm", "results")
    return folder


def ran(printed: str) -> set[str]:
    """The stages whose commands were run."""
    return set(re.findall(r"Running stage '(.*)':", printed))


def test_an_experiment_of_dvc_is_kept_with_its_metrics(learned: Path, tool: Tool) -> None:
    assert ran(tool(learned, "dvc", "repro")) == set()
    printed = tool(learned, "dvc", "exp", "run", "-n", "stronger", "-S", "methods.fedprox.mu=0.5")
    assert ran(printed) == {"experiment@fedprox-0", "report"}
    shown = json.loads(tool(learned, "dvc", "exp", "show", "--json"))
    (kept,) = [e["revs"][0]["data"] for base in shown for e in base["experiments"] or () if e["name"] == "stronger"]
    assert kept["params"]["params.yaml"]["data"]["methods"]["fedprox"]["mu"] == 0.5
    assert 0 < kept["metrics"]["report/metrics/fedprox-0.json"]["data"]["task_aware"]["acc"] <= 1
    client = MlflowClient(f"sqlite:///{learned}/mlflow.db")
    runs = client.search_runs([client.get_experiment_by_name("digits class-incremental").experiment_id])
    (tagged,) = [run for run in runs if run.data.tags.get("dvc.experiment") == "stronger"]
    assert (tagged.data.tags["method"], tagged.data.params["settings.mu"]) == ("fedprox", "0.5")


@pytest.fixture
def scheduled(clone: Callable[[Path], Path], stream_settings: str, tmp_path: Path) -> Path:
    """A clone whose deployment is due every twenty seconds."""
    folder = clone(tmp_path / "clone")
    deployment = (folder / "prefect.yaml").read_text()
    assert NIGHTLY in deployment
    (folder / "prefect.yaml").write_text(deployment.replace(NIGHTLY, OFTEN))
    (folder / "params.yaml").write_text(stream_settings)
    (folder / "home").mkdir()
    return folder


def test_a_task_that_arrives_is_learned_by_a_scheduled_run_and_its_model_becomes_champion(
    scheduled: Path, start: Start, wait_for: WaitFor, arrive: Callable[..., Path]
) -> None:
    port = servers.free_port()
    environment = {
        "PREFECT_HOME": str(scheduled / "home"),
        "PREFECT_API_URL": f"http://127.0.0.1:{port}/api",
        "PREFECT_SERVER_ANALYTICS_ENABLED": "false",
        "PREFECT_SERVER_CONCURRENCY_LEASE_STORAGE": "prefect.server.concurrency.lease_storage.filesystem",
    }

    def prefect(*words: str) -> Any:
        return start(scheduled, "prefect", *words, **environment)

    prefect("server", "start", "--host", "127.0.0.1", "--port", str(port))
    wait_for(lambda: servers.healthy(environment["PREFECT_API_URL"]), scheduled)
    assert prefect("work-pool", "create", "fcl", "--type", "process").wait() == 0
    assert prefect("--no-prompt", "deploy", "--all").wait() == 0
    prefect("worker", "start", "--pool", "fcl")
    arrive(scheduled / "incoming", "first", 0, 1)
    champion = wait_for(lambda: champion_of(scheduled), scheduled)
    assert champion["tasks"] == "1"
    completed = {"flow_runs": {"state": {"type": {"any_": ["COMPLETED"]}}}, "sort": "END_TIME_DESC"}
    runs = wait_for(lambda: asked(port, "flow_runs", **completed), scheduled)
    assert all(run["auto_scheduled"] and run["deployment_id"] for run in runs)
    ended = {"event": {"name": ["fcl.stream.champion"]}}
    (event,) = wait_for(lambda: asked(port, "events", filter=ended)["events"], scheduled)
    assert event["payload"]["about"] == "version 1, 1 tasks"
    (artifact,) = asked(port, "artifacts", artifacts={"key": {"any_": ["stream-arrivals"]}})
    assert "champion" in artifact["data"]
    assert (scheduled / "data" / "streams" / "arrivals.dvc").is_file()
    assert (scheduled / "streams" / "arrivals" / "result.json").is_file()


def champion_of(folder: Path) -> dict[str, str] | None:
    """The tags of the stream's champion, where there is one."""
    if not (folder / "mlflow.db").exists():  # MLflow would make it
        return None
    registry = MlflowClient(f"sqlite:///{folder}/mlflow.db")
    if not registry.search_registered_models("name = 'arrivals'"):
        return None
    aliases = registry.get_registered_model("arrivals").aliases
    return registry.get_model_version_by_alias("arrivals", "champion").tags if "champion" in aliases else None


def asked(port: int, what: str, **filters: Any) -> Any:
    request = urllib.request.Request(
        f"http://127.0.0.1:{port}/api/{what}/filter", json.dumps(filters).encode(), {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request) as answer:
        return json.load(answer)


def test_the_best_model_of_a_tracking_servers_runs_answers_over_http(
    learned: Path, tool: Tool, start: Start, wait_for: WaitFor, serving: Callable[..., Any], tmp_path: Path
) -> None:
    uri = f"http://127.0.0.1:{servers.free_port()}"
    words = [
        "--backend-store-uri",
        f"sqlite:///{tmp_path}/mlflow.db",
        "--artifacts-destination",
        str(tmp_path / "kept"),
    ]
    start(
        tmp_path, "mlflow", "server", "--workers", "1", *words, "--host", "127.0.0.1", "--port", uri.rpartition(":")[2]
    )
    wait_for(lambda: servers.healthy(uri), tmp_path)
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
    made = client.create_model_version("digits", f"models:/{model}", run.info.run_id, model_id=model)
    client.set_registered_model_alias("digits", "champion", made.version)
    Image.fromarray((load_digits().images[3] * 15.9).astype("uint8")).save(tmp_path / "3.png")
    (answer,) = json.loads(
        tool(learned, "fcl", "predict", "models:/digits@champion", str(tmp_path / "3.png"), "--json", *there)
    )
    with serving("models:/digits@champion", uri, tmp_path / "serve.log") as ask:
        (served,) = ask({"dataframe_records": [{"image": str(tmp_path / "3.png")}]})
    assert {"file": str(tmp_path / "3.png"), **served} == answer
