"""The pyfunc around a model, called as MLflow calls it, and over HTTP."""

import importlib.util
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

from fclmodels import state
from fclmodels.backbones.network import build
from fclmodels.backbones.spec import ModelSpec
from fclmodels.numerics.relevance import Router
from fclmodels.served import Model
from tasks.tracked_artifacts import SERVED, log_model

IMAGES = np.random.default_rng(0).integers(0, 256, (6, 1, 4, 4), dtype=np.uint8)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A model of two tasks that predicts them."""
    network = build(
        ModelSpec({"backbone": "mlp", "hidden": 8}, (1, 4, 4), "growing", ((0, 1), (2,))), torch.Generator()
    )
    state.save(dict(network.state_dict()), tmp_path / "model" / "weights.safetensors")
    state.write_json(tmp_path / "model" / "spec.json", network.spec.to_json())
    router = Router((torch.eye(8)[:, :3], torch.eye(8)[:, 3:5]), torch.eye(2)[None], torch.ones(1, 2, dtype=torch.bool))
    state.save(router.to_tree(), tmp_path / "model" / "router.safetensors")
    facts = {
        "classes": ["ant", "bee", "cat"],
        "tasks": [{"name": f"task {t}", "permutation": None} for t in range(2)],
        "mean": [0.5],
        "std": [0.25],
        "notes": [],
    }
    state.write_json(tmp_path / "model" / "serving.json", facts)
    return tmp_path / "model"


@pytest.fixture
def served(folder: Path) -> Any:
    """From its file, as MLflow loads it."""
    spec = importlib.util.spec_from_file_location("served_by_file", SERVED)
    assert spec is not None
    assert spec.loader is not None
    module: Any = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    served = module.Served()
    served.load_context(SimpleNamespace(artifacts={"model": str(folder)}))
    return served


def test_arrays_nested_lists_and_paths_get_the_same_answer(served: Any, folder: Path, tmp_path: Path) -> None:
    Image.fromarray(IMAGES[0, 0]).save(tmp_path / "image.png")
    same = [IMAGES[0], IMAGES[0].tolist(), str(tmp_path / "image.png")]
    found = served.predict(None, pd.DataFrame({"image": same})).to_dict("records")
    assert found == Model(folder).answer(IMAGES[[0, 0, 0]])
    assert [*found[0]] == ["class", "probability", "task", "relevance"]
    told = served.predict(None, pd.DataFrame({"image": same}), {"task": 2}).to_dict("records")
    assert told == Model(folder).answer(IMAGES[[0, 0, 0]], 2)


@pytest.mark.parametrize("image", [[[[0.5] * 4] * 4], [[[-1] * 4] * 4], [[[300] * 4] * 4], [["a"]], [[[0] * 4] * 3], 3])
def test_what_is_no_image_is_refused(image: Any, served: Any) -> None:
    with pytest.raises(MlflowException, match="image"):
        served.predict(None, pd.DataFrame({"image": [image]}))


@pytest.fixture
def logged(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """The model's address in an MLflow store of its own."""
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
    kinds = {file.suffix for file in files.rglob("*") if file.is_file()}
    assert kinds <= {"", ".txt", ".yaml", ".json", ".py", ".safetensors"}


@pytest.mark.slow
def test_mlflow_serves_it_over_http(logged: str, folder: Path, serving: Callable[..., Any], tmp_path: Path) -> None:
    with serving(f"models:/{logged}", f"sqlite:///{tmp_path}/mlflow.db", tmp_path / "server.log") as ask:
        Image.fromarray(IMAGES[1, 0]).save(tmp_path / "image.png")
        images = [IMAGES[0].tolist(), str(tmp_path / "image.png")]
        assert ask({"dataframe_records": [{"image": image} for image in images]}) == Model(folder).answer(IMAGES[:2])
        known = {"dataframe_split": {"columns": ["image"], "data": [[images[0]]]}, "params": {"task": 1}}
        assert ask(known) == Model(folder).answer(IMAGES[:1], 1)
