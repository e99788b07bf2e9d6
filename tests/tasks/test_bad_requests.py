"""HTTP requests to the served model: each is answered with rows, or refused as a mistake of the sender's (4xx)."""

import functools
import json
import sys
import traceback
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import mlflow
import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from mlflow import MlflowClient
from mlflow.exceptions import MlflowException
from mlflow.pyfunc.scoring_server import init
from starlette.testclient import TestClient

from fclmodels.backbones.model.network import build_network
from fclmodels.backbones.model.spec import ModelSpec
from fclmodels.storage import trees
from fclmodels.storage.sealed_json import write_json
from tasks.mlflow.artifacts import log_model

REQUESTS = 600
pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]  # to log a model takes seconds
IMAGE = np.zeros((1, 4, 4), int).tolist()
UNEXPECTED: list[str] = []  # tracebacks of our code, for other errors than those for the sender
NUMBERS = [True, -1, 300, 0.5, 1e309, 10**30]
TEXTS = ["", "x.png", "/etc/passwd", "/dev/zero", "a\0b", "\ud800"]
NESTED = [[], {}, [[]], [[[0] * 4] * 3], [[[0] * 4] * 4] * 2, [[[0] * 4, [0]]]]
RARE = st.sampled_from([None, *NUMBERS, *TEXTS, *NESTED, *([[[x] * 4] * 4] for x in ("a", None, 10**30))])
JSON = st.recursive(
    RARE, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3)
)
IMAGES = st.lists(RARE | st.just(IMAGE) | JSON, max_size=4)
BODIES = st.one_of(
    st.builds(lambda images: {"dataframe_records": [{"image": image} for image in images]}, IMAGES),
    st.builds(lambda images: {"dataframe_split": {"columns": ["image"], "data": [[i] for i in images]}}, IMAGES),
    st.builds(lambda images, column: {"dataframe_split": {"columns": [column], "data": [images]}}, IMAGES, JSON),
    st.builds(lambda images: {"inputs": {"image": images}}, IMAGES),
    st.builds(lambda images: {"instances": images}, IMAGES),
    st.builds(lambda task: {"dataframe_records": [{"image": IMAGE}], "params": {"task": task}}, RARE | st.integers()),
    st.builds(lambda params: {"dataframe_records": [{"image": IMAGE}], "params": params}, JSON),
    JSON,
)  # fmt: skip
TYPES = st.sampled_from(["application/json", "text/csv", "application/json; charset=x", "application/octet-stream", ""])


@pytest.fixture(scope="module")
def client(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TestClient]:
    """MLflow's scoring server around a model, in this process."""
    home = tmp_path_factory.mktemp("served")
    network = build_network(
        ModelSpec({"backbone": "mlp", "hidden": 8}, (1, 4, 4), "growing", ((0, 1), (2,))), torch.Generator()
    )
    trees.save(dict(network.state_dict()), home / "model" / "weights.safetensors")
    write_json(home / "model" / "spec.json", network.spec.to_json())
    tasks = [{"name": f"task {t}", "permutation": None} for t in range(2)]
    facts = {
        "method": "fedavg",
        "classes": ["ant", "bee", "cat"],
        "tasks": tasks,
        "mean": [0.5],
        "std": [0.25],
        "notes": [],
    }
    write_json(home / "model" / "serving.json", facts)
    before, store = mlflow.get_tracking_uri(), MlflowClient(f"sqlite:///{home}/mlflow.db")
    run = store.create_run(store.create_experiment("e", artifact_location=f"{home}/mlartifacts"))
    log_model(store, run.info.run_id, home / "model")
    logged = store.get_run(run.info.run_id).outputs.model_outputs[0].model_id
    model = mlflow.pyfunc.load_model(f"models:/{logged}")
    python_model = model.unwrap_python_model()
    inner = python_model.predict

    @functools.wraps(inner)
    def predict(*positional: Any, **named: Any) -> Any:
        try:
            return inner(*positional, **named)
        except MlflowException:
            raise
        except Exception:
            UNEXPECTED.append(traceback.format_exc())
            raise

    python_model.predict = predict
    yield TestClient(init(model), raise_server_exceptions=False)
    mlflow.set_tracking_uri(before)


def send(client: TestClient, body: bytes, kind: str = "application/json") -> Any:
    return client.post("/invocations", content=body, headers={"content-type": kind})


def test_a_right_request_is_answered(client: TestClient) -> None:
    body = {"dataframe_records": [{"image": IMAGE}], "params": {"task": 2}}
    assert send(client, json.dumps(body).encode()).json()["predictions"][0]["class"] == "cat"


def test_unusual_requests_are_answered_or_refused(client: TestClient) -> None:
    """Some end as 500 in MLflow's own parser, before the model is called; in ours none does."""
    counts = Counter[int]()

    @settings(max_examples=REQUESTS, suppress_health_check=[*HealthCheck])
    @given(
        BODIES.map(lambda body: json.dumps(body).encode()) | st.binary(max_size=40), TYPES | st.just("application/json")
    )
    def send_one(body: bytes, kind: str) -> None:
        answer = send(client, body, kind)
        counts[answer.status_code] += 1
        assert UNEXPECTED == []
        if answer.status_code == 200:
            assert all(row["class"] in ("ant", "bee", "cat") for row in answer.json()["predictions"])

    send_one()
    sys.stdout.write(f"| HTTP requests | {counts.total()} | {counts.total() - counts[200]} | {dict(counts)}\n")


@pytest.mark.parametrize(
    ("image", "message"),
    [
        ("/dev/zero", "no such file"),
        ([[[0] * 4] * 3], "not of the shape [1, 4, 4]"),
        ([[["a"] * 4] * 4], "neither a path nor an array of numbers"),
    ],
)
def test_a_mistake_is_reported_to_the_sender_in_one_line(image: Any, message: str, client: TestClient) -> None:
    answer = send(client, json.dumps({"dataframe_records": [{"image": image}]}).encode())
    assert answer.status_code == 400
    assert message in answer.json()["message"]
    assert str(Path.cwd()) not in answer.text
