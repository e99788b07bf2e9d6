"""`fcl pretrain`: trained once, published, registered under the name of its data; by itself and under DVC."""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from mlflow import MlflowClient
from safetensors.torch import load_file

from fclmodels.data.sources.letters import LETTERS
from fclmodels.experiment.pretraining import Pretraining
from fclmodels.storage import trees

ROOT = Path(__file__).parents[2]
OUT = Path("data/pretrained/letters")
SETTINGS = """
data: {source: letters, samples: 5}
model: {backbone: mlp, hidden: 8}
pretrain: {epochs: 2, threads: 1}
device: cpu
"""

Fcl = Callable[..., int]


@pytest.fixture
def client(project: Path) -> MlflowClient:
    """Return a client of the MLflow store of a project with settings of a pretraining."""
    (project / "pretrain").mkdir()
    uri = f"sqlite:///{project}/mlflow.db"
    (project / "pretrain" / "params.yaml").write_text(f"{SETTINGS}tracking: {{uri: '{uri}'}}\n")
    return MlflowClient(uri)


@pytest.fixture
def trainings(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Return the keys of trainings as they are run."""
    keys: list[str] = []
    run = Pretraining.run

    def record(step: Pretraining) -> dict[str, object]:
        keys.append(step.key)
        return run(step)

    monkeypatch.setattr(Pretraining, "run", record)
    return keys


def read_card() -> dict[str, object]:
    return json.loads((OUT / "card.json").read_text())


def test_the_card_is_in_the_folder_in_mlflow_and_at_the_registered_version(
    fcl: Fcl, client: MlflowClient, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert fcl("pretrain") == 0
    lines = capsys.readouterr().err.splitlines()
    assert lines[:2] == [f"mlp-letters: epoch {i} of 2: loss {lines[i - 1].split()[-1]}" for i in (1, 2)]
    assert lines[2].startswith(f"{OUT}: mlp-letters, version 1, ")

    (version,) = client.search_model_versions("name = 'mlp-letters'")
    assert version.description == read_card()["description"]
    assert str(version.description).startswith("mlp pretrained on letters, ")
    assert version.tags == {"source": "letters", "backbone": "mlp", "classes": ", ".join(LETTERS)}
    registered = Path(version.source.removeprefix("file://"))
    assert json.loads((registered / "card.json").read_text()) == read_card()
    weights = load_file(registered / "weights.safetensors")
    assert trees.digest(weights) == trees.digest(load_file(OUT / "weights.safetensors"))

    run = client.get_run(version.run_id)
    assert (run.info.run_name, run.info.status) == ("mlp-letters", "FINISHED")
    assert run.data.params.items() >= {"data.source": "letters", "data.samples": "5", "pretrain.epochs": "2"}.items()
    assert run.data.metrics["held_out/accuracy"] == read_card()["accuracy"]
    assert [m.step for m in client.get_metric_history(run.info.run_id, "train/loss")] == [1, 2]
    (used,) = run.inputs.dataset_inputs
    assert used.dataset.name == "letters"


def test_a_second_time_nothing_is_trained_or_registered(
    fcl: Fcl, client: MlflowClient, trainings: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert fcl("pretrain", "--json") == 0
    first = json.loads(capsys.readouterr().out)
    files = {path.name: path.read_bytes() for path in OUT.iterdir()}
    shutil.rmtree(OUT)
    assert fcl("pretrain", "--json") == 0
    out, err = capsys.readouterr()
    assert json.loads(out) == first == {**read_card(), "version": 1}
    assert err == "mlp-letters: already trained\n"
    assert {path.name: path.read_bytes() for path in OUT.iterdir()} == files
    assert len(trainings) == 1
    assert len(client.search_model_versions("name = 'mlp-letters'")) == 1
    experiment = client.get_experiment_by_name("pretraining")
    assert experiment
    assert len(client.search_runs([experiment.experiment_id])) == 1


def test_other_settings_are_another_version_and_another_name_another_model(
    fcl: Fcl, client: MlflowClient, trainings: list[str]
) -> None:
    assert fcl("pretrain", "-q") == 0
    assert fcl("pretrain", "-q", "--set", "pretrain.seed=1") == 0
    assert fcl("pretrain", "-q", "--set", "pretrain.name=ours", "--out", "elsewhere") == 0
    assert len(trainings) == 2
    assert [model.name for model in client.search_registered_models()] == ["mlp-letters", "ours"]
    assert sorted(int(v.version) for v in client.search_model_versions("name = 'mlp-letters'")) == [1, 2]
    assert json.loads(Path("elsewhere/card.json").read_text())["name"] == "ours"


def test_the_store_that_lost_the_weights_has_them_trained_again(
    fcl: Fcl, client: MlflowClient, trainings: list[str]
) -> None:
    assert fcl("pretrain", "-q") == 0
    lost = read_card()["digests"]["weights"]  # type: ignore[index]
    Path(".fcl/store", lost[:2], lost).unlink()
    assert fcl("pretrain", "-q") == 0
    assert len(trainings) == 2
    assert read_card()["digests"]["weights"] == lost  # type: ignore[index]


def test_a_run_starts_from_the_weights(fcl: Fcl, client: MlflowClient) -> None:
    assert fcl("pretrain", "-q") == 0
    assert fcl("run", "-m", "fedavg", "-q", "--set", f"model.weights={OUT}/weights.safetensors") == 0
    settings = json.loads(Path("runs/fedavg-0/result.json").read_text())["settings"]
    assert settings["model"]["weights"] == f"{OUT}/weights.safetensors"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("--set data.source=leters", "leters is not a source. Did you mean letters?"),
        ("--set model.backbone=mpl", "mpl is not a backbone. Did you mean mlp?"),
        ("--set pretrain.epoch=2", "pretrain.epoch is not a setting. Did you mean pretrain.epochs?"),
        ("--params pretrain/parms.yaml", "pretrain/parms.yaml: no such file"),
        ("--out .", ". holds something other than pretrained weights"),
        (
            "--set tracking.uri=sqlite:///params.yaml/mlflow.db",
            "tracking.uri: sqlite:///params.yaml/mlflow.db cannot be used",
        ),
        ("--set data.source=image-folder", "data.folder: "),
    ],
)
def test_a_mistake_is_one_line_and_nothing_is_trained(
    fcl: Fcl,
    client: MlflowClient,
    trainings: list[str],
    capsys: pytest.CaptureFixture[str],
    arguments: str,
    message: str,
) -> None:
    assert fcl("pretrain", *arguments.split()) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert message in line
    assert not trainings
    assert not OUT.exists()


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_dvc_runs_the_stage_when_asked_and_only_then(tmp_path: Path) -> None:
    for name in ("flows", "tasks", "fclmodels", "pretrain"):
        shutil.copytree(ROOT / name, tmp_path / name, ignore=shutil.ignore_patterns("__pycache__"))
    (tmp_path / "pretrain" / "params.yaml").write_text(f"{SETTINGS}optimizer: {{}}\naugment: {{}}\n")
    (tmp_path / "dvc.yaml").write_text("stages: {other: {cmd: echo done}}\n")
    fcl = tmp_path / ".bin" / "fcl"
    fcl.parent.mkdir()
    fcl.write_text(f'#!/bin/sh\nexec "{sys.executable}" -m flows.cli.app "$@"\n')
    fcl.chmod(0o755)
    inherited = {name: value for name, value in os.environ.items() if not name.startswith(("PREFECT_", "MLFLOW_"))}
    environment = inherited | {"PATH": f"{tmp_path}/.bin:{os.environ['PATH']}", "PYTHONPATH": str(tmp_path)}

    def dvc(*command: str) -> str:
        end = subprocess.run(
            [sys.executable, "-m", "dvc", *command],
            cwd=tmp_path,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            check=False,
        )
        assert end.returncode == 0, end.stdout
        return end.stdout

    dvc("init", "--no-scm", "-q")
    assert "Running stage 'other'" in dvc("repro")
    assert not (tmp_path / OUT).exists()
    stage = "pretrain/dvc.yaml:pretrain@letters"
    assert f"Running stage '{stage}'" in dvc("repro", stage)
    assert json.loads((tmp_path / OUT / "card.json").read_text())["source"] == "letters"
    assert "Running" not in dvc("repro", stage)
    assert "pretrain/dvc.yaml:pretrain@cifar10" in dvc("stage", "list", "pretrain/dvc.yaml", "--name-only")
