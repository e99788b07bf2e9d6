"""The pyfunc around a model, called as MLflow calls it, and over HTTP; and one that an earlier version logged."""

import importlib.util
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import mlflow
import numpy as np
import pandas as pd
import pytest
import torch
from mlflow import MlflowClient
from mlflow.exceptions import MlflowException
from PIL import Image

from fclmodels.backbones.model.network import build_network
from fclmodels.backbones.model.spec import ModelSpec
from fclmodels.errors import UserError
from fclmodels.experiment.exported_model import ExportedModel
from fclmodels.numerics.task_relevance import Router
from fclmodels.storage import trees
from fclmodels.storage.sealed_json import write_json
from flows.cli.predict import open_model
from tasks.mlflow.artifacts import PYFUNC_FILE, log_model

IMAGES = np.random.default_rng(0).integers(0, 256, (6, 1, 4, 4), dtype=np.uint8)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Write a model of two tasks that predicts tasks, and return its folder."""
    network = build_network(
        ModelSpec({"backbone": "mlp", "hidden": 8}, (1, 4, 4), "growing", ((0, 1), (2,))), torch.Generator()
    )
    trees.save(dict(network.state_dict()), tmp_path / "model" / "weights.safetensors")
    write_json(tmp_path / "model" / "spec.json", network.spec.to_json())
    router = Router((torch.eye(8)[:, :3], torch.eye(8)[:, 3:5]), torch.eye(2)[None], torch.ones(1, 2, dtype=torch.bool))
    trees.save(router.to_tree(), tmp_path / "model" / "router.safetensors")
    facts = {
        "method": "fedavg",
        "classes": ["ant", "bee", "cat"],
        "tasks": [{"name": f"task {t}", "permutation": None} for t in range(2)],
        "mean": [0.5],
        "std": [0.25],
        "notes": [],
    }
    write_json(tmp_path / "model" / "serving.json", facts)
    return tmp_path / "model"


@pytest.fixture
def served(folder: Path) -> Any:
    """Load the pyfunc from its file, as MLflow does."""
    spec = importlib.util.spec_from_file_location("served_by_file", PYFUNC_FILE)
    assert spec is not None
    assert spec.loader is not None
    module: Any = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    pyfunc = module.PyfuncModel()
    pyfunc.load_context(SimpleNamespace(artifacts={"model": str(folder)}))
    return pyfunc


def test_arrays_nested_lists_and_paths_get_the_same_answer(served: Any, folder: Path, tmp_path: Path) -> None:
    Image.fromarray(IMAGES[0, 0]).save(tmp_path / "image.png")
    same = [IMAGES[0], IMAGES[0].tolist(), str(tmp_path / "image.png")]
    rows = served.predict(None, pd.DataFrame({"image": same})).to_dict("records")
    assert rows == ExportedModel(folder).answer(IMAGES[[0, 0, 0]])
    assert [*rows[0]] == ["class", "probability", "task", "relevance"]
    rows = served.predict(None, pd.DataFrame({"image": same}), {"task": 2}).to_dict("records")
    assert rows == ExportedModel(folder).answer(IMAGES[[0, 0, 0]], 2)


@pytest.mark.parametrize("image", [[[[0.5] * 4] * 4], [[[-1] * 4] * 4], [[[300] * 4] * 4], [["a"]], [[[0] * 4] * 3], 3])
def test_an_invalid_image_is_refused(image: Any, served: Any) -> None:
    with pytest.raises(MlflowException, match="image"):
        served.predict(None, pd.DataFrame({"image": [image]}))


@pytest.fixture
def logged(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Log the model to an MLflow store of its own, and return its id."""
    monkeypatch.chdir(tmp_path)
    before, uri = mlflow.get_tracking_uri(), f"sqlite:///{tmp_path}/mlflow.db"
    client = MlflowClient(uri)
    run = client.create_run(client.create_experiment("e", artifact_location=f"{tmp_path}/mlartifacts"))
    log_model(client, run.info.run_id, folder)
    yield client.get_run(run.info.run_id).outputs.model_outputs[0].model_id
    mlflow.set_tracking_uri(before)


def test_signature_example_and_pinned_requirements_are_logged(logged: str) -> None:
    model = mlflow.pyfunc.load_model(f"models:/{logged}")
    signature = model.metadata.signature
    assert signature.inputs.input_names() == ["image"]
    assert signature.outputs.input_names() == ["class", "probability", "task", "relevance"]
    example = model.input_example
    assert model.predict(example)["class"].tolist()[0] in ("ant", "bee", "cat")
    files = Path(mlflow.artifacts.download_artifacts(f"models:/{logged}"))
    pins = (files / "requirements.txt").read_text().split()
    assert all("==" in pin for pin in pins)
    assert {"fclflow", "torch", "mlflow"} <= {pin.partition("==")[0] for pin in pins}
    kinds = {file.suffix for file in files.rglob("*") if file.is_file() and file.parent.name != "__pycache__"}
    assert kinds <= {"", ".txt", ".yaml", ".json", ".py", ".safetensors"}


def test_a_model_of_an_earlier_version_is_read_by_fcl_predict_and_not_by_mlflow(
    logged: str, folder: Path, tmp_path: Path
) -> None:
    """Earlier versions had the model's module at fclmodels.served, and their copies of this file import it there."""
    (code,) = (tmp_path / "mlartifacts").rglob(PYFUNC_FILE.name)
    today = "from fclmodels.experiment.exported_model import ExportedModel"
    assert today in code.read_text()
    code.write_text(code.read_text().replace(today, "from fclmodels.served import Model as ExportedModel"))
    with pytest.raises(MlflowException, match=r"No module named 'fclmodels\.served'"):  # before any code of ours runs
        mlflow.pyfunc.load_model(f"models:/{logged}")
    Image.fromarray(IMAGES[0, 0]).save(tmp_path / "image.png")
    model = open_model(f"models:/{logged}", lambda: f"sqlite:///{tmp_path}/mlflow.db")
    assert model.answer(model.read_images([tmp_path / "image.png"])) == ExportedModel(folder).answer(IMAGES[:1])


def test_a_registered_model_of_another_project_is_refused_in_one_line(logged: str, tmp_path: Path) -> None:
    (weights,) = (tmp_path / "mlartifacts").rglob("serving.json")
    shutil.rmtree(weights.parent)
    with pytest.raises(UserError, match=r"no model of a run here \(serving\.json is missing\)\.") as refusal:
        open_model(f"models:/{logged}", lambda: f"sqlite:///{tmp_path}/mlflow.db")
    assert "\n" not in str(refusal.value)


@pytest.mark.slow
def test_mlflow_serves_it_over_http(logged: str, folder: Path, serving: Callable[..., Any], tmp_path: Path) -> None:
    with serving(f"models:/{logged}", f"sqlite:///{tmp_path}/mlflow.db", tmp_path / "server.log") as ask:
        Image.fromarray(IMAGES[1, 0]).save(tmp_path / "image.png")
        images = [IMAGES[0].tolist(), str(tmp_path / "image.png")]
        assert ask({"dataframe_records": [{"image": image} for image in images]}) == ExportedModel(folder).answer(
            IMAGES[:2]
        )
        with_task = {"dataframe_split": {"columns": ["image"], "data": [[images[0]]]}, "params": {"task": 1}}
        assert ask(with_task) == ExportedModel(folder).answer(IMAGES[:1], 1)
