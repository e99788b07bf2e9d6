"""LwF+FL: its loss and its step worked out in NumPy and by autograd, and what its teacher is."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pytest
import torch
from numpy.testing import assert_allclose
from scipy.special import log_softmax, softmax
from torch import Tensor

from fclmodels.backbones.model.network import NetworkCache
from fclmodels.data.batches import Batch
from fclmodels.federation.prediction import predict_by_heads
from fclmodels.federation.server import Server
from fclmodels.methods.fedavg import FedAvg
from fclmodels.methods.lwf import Lwf
from fclmodels.methods.parts.distillation import Teachers, distil_heads
from fclmodels.storage import trees

HARD = ("optimizer.momentum=0.9", "optimizer.weight_decay=0.1", "model.dropout=[0.2, 0.5]")
STREAMS: dict[str, dict[str, Any]] = {
    "growing": {},
    "shared": {"same_classes": True},
    "per-task": {"head": "per-task"},
}


def features_of(weights: dict[str, Tensor], x: Tensor) -> np.ndarray:
    """The multi-layer perceptron without dropout."""
    h = x.double().flatten(1).numpy()
    for layer in ("fc1", "fc2", "fc3"):
        w, b = (weights[f"backbone.{layer}.{part}"].double().numpy() for part in ("weight", "bias"))
        h = np.maximum(h @ w.T + b, 0)
    return h


def head_logits(weights: dict[str, Tensor], head: int, features: np.ndarray) -> np.ndarray:
    w, b = (weights[f"heads.{head}.{part}"].double().numpy() for part in ("weight", "bias"))
    return features @ w.T + b


def divergence(student: np.ndarray, teacher: np.ndarray, temperature: float) -> float:
    p = softmax(teacher / temperature, 1)
    gap = log_softmax(teacher / temperature, 1) - log_softmax(student / temperature, 1)
    return float((p * gap).sum(1).mean())


def perturbed(server: Server) -> dict[str, Tensor]:
    random = torch.Generator().manual_seed(3)
    return {name: w + 0.1 * torch.randn(w.shape, generator=random) for name, w in server.weights.items()}


def first_batch(client: Any) -> Batch:
    batch: Batch = next(next(client.yield_epochs()))
    return batch


@pytest.mark.parametrize("stream", STREAMS)
@pytest.mark.parametrize("temperature", [1.0, 2.0])
def test_the_loss_against_numpy(
    stream: str,
    temperature: float,
    method_of: Callable,
    client_of: Callable,
    splits_of: Callable,
    after_each_task: Callable,
) -> None:
    """In the third task: the old rows, all rows, or each old head by itself, of W*_2 as it ended the second."""
    splits = splits_of(tasks=3, **STREAMS[stream])
    method = method_of(Lwf, splits=splits, weight=0.7, temperature=temperature)
    ended = after_each_task(method)[1]
    server = method.start_task(ended, 2)
    student = perturbed(server)
    payload = {
        **method.make_payload(server),
        "weights": method.make_payload(Server(server.spec, student, 2))["weights"],
    }
    client = client_of(method, 1, 2)
    training, batch = method.prepare_training(client, payload), first_batch(client)
    training.network.eval()
    loss = float(method.compute_loss(training, batch).detach())

    features, old = features_of(student, batch.inputs), features_of(ended.weights, batch.inputs)
    own = 2 if stream == "per-task" else 0
    logits, labels = head_logits(student, own, features), batch.labels.numpy()
    columns = labels - 4 if stream == "per-task" else labels
    expected = -log_softmax(logits, 1)[np.arange(len(labels)), columns].mean()
    for head in range(2 if stream == "per-task" else 1):
        answer = head_logits(ended.weights, head, old)
        rows = {"growing": 4, "shared": 2, "per-task": 2}[stream]
        assert answer.shape[1] == rows
        expected += 0.7 * divergence(head_logits(student, head, features)[:, :rows], answer, temperature)
    assert_allclose(loss, expected, rtol=1e-5)


@pytest.mark.parametrize("stream", STREAMS)
def test_one_step_by_hand(
    stream: str, method_of: Callable, client_of: Callable, splits_of: Callable, federate: Callable
) -> None:
    """SGD on cross entropy + weight KL(teacher || student), all heads moving."""
    splits = splits_of(**STREAMS[stream])
    method = method_of(Lwf, "federation.batch_size=8", "federation.local_epochs=2", splits=splits, weight=3.0)
    ended = federate(method, 1)
    server = method.start_task(ended, 1)
    client = client_of(method, 2, 1)
    answer = method.train(client, method.make_payload(server))
    assert answer.memory == {}

    weights = {name: w.double().requires_grad_() for name, w in server.weights.items()}
    for (batch,) in client.yield_epochs():
        x = batch.inputs.double().flatten(1)

        def forward(of: dict[str, Tensor], head: int, x: Tensor = x) -> Tensor:
            for layer in ("fc1", "fc2", "fc3"):
                x = (x @ of[f"backbone.{layer}.weight"].T + of[f"backbone.{layer}.bias"]).relu()
            return x @ of[f"heads.{head}.weight"].T + of[f"heads.{head}.bias"]

        teacher = forward({name: w.double() for name, w in ended.weights.items()}, 0)
        p, q = (teacher / 2).softmax(1), (forward(weights, 0)[:, : teacher.shape[1]] / 2).softmax(1)
        own, columns = (1, batch.labels - 2) if stream == "per-task" else (0, batch.labels)
        right = forward(weights, own).softmax(1).gather(1, columns[:, None])
        loss = -right.log().mean() + 3 * (p * (p / q).log()).sum(1).mean()
        gradients = torch.autograd.grad(loss, list(weights.values()))
        weights = {
            name: (w - 0.1 * g).detach().requires_grad_()
            for (name, w), g in zip(weights.items(), gradients, strict=True)
        }
    update = answer.tensors["update"]
    assert update.keys() == weights.keys()
    for name, w in weights.items():
        moved = (w.detach() - server.weights[name]).float()
        torch.testing.assert_close(update[name] / 8, moved, rtol=1e-3, atol=2e-6)
        assert moved.any()


def test_the_teacher_is_last_tasks_model_in_evaluation_mode(
    method_of: Callable, client_of: Callable, federate: Callable
) -> None:
    """With its running statistics, which a student in training mode leaves alone."""
    method = method_of(Lwf, "model.backbone=resnet18", "federation.rounds=1")
    ended = federate(method, 1)
    server = method.start_task(ended, 1)
    client = client_of(method, 0, 1)
    training = method.prepare_training(client, method.make_payload(server))
    (teacher,) = training.find_added(Teachers)
    inputs = first_batch(client).inputs
    training.run()
    (answer,) = teacher.compute_logits(inputs)
    assert not answer.requires_grad
    expected = predict_by_heads(NetworkCache(method.run.device, method.prepare_network).load(ended.spec, ended.weights))
    torch.testing.assert_close(answer, expected(inputs).logits)


def test_it_is_loaded_once_a_round(
    method_of: Callable, client_of: Callable, federate: Callable, monkeypatch: pytest.MonkeyPatch
) -> None:
    method = method_of(Lwf, "federation.local_epochs=3")
    server = method.start_task(federate(method, 1), 1)
    loads, load = [], NetworkCache.load
    monkeypatch.setattr(NetworkCache, "load", lambda self, *of: loads.append(self) or load(self, *of))
    method.train(client_of(method, 0, 1), method.make_payload(server))
    assert loads == [method.networks, method.teacher_networks[0]]


@pytest.mark.parametrize("stream", STREAMS)
def test_without_weight_it_is_fedavg_to_the_bit(
    stream: str, method_of: Callable, federate: Callable, splits_of: Callable
) -> None:
    splits = splits_of(**STREAMS[stream])
    fedavg = federate(method_of(FedAvg, *HARD, splits=splits))
    mine = federate(method_of(Lwf, *HARD, splits=splits, weight=0.0))
    assert trees.digest(mine.weights) == trees.digest(fedavg.weights)
    taught = federate(method_of(Lwf, *HARD, splits=splits, weight=1.0))
    assert trees.digest(taught.weights) != trees.digest(fedavg.weights)


def test_the_first_task_has_no_teacher(method_of: Callable, federate: Callable) -> None:
    mine, fedavg = (federate(method_of(kind, *HARD), 1) for kind in (Lwf, FedAvg))
    assert trees.digest(mine.to_tree()) == trees.digest(fedavg.to_tree())


@pytest.mark.parametrize("stream", STREAMS)
def test_a_heavier_lesson_keeps_old_answers(
    stream: str, method_of: Callable, client_of: Callable, federate: Callable, splits_of: Callable
) -> None:
    """How far a client's answers for old classes go from the teacher's, on the samples that it trains on."""
    distances = []
    for weight in (0.0, 1.0, 10.0):
        method = method_of(Lwf, "federation.local_epochs=10", splits=splits_of(**STREAMS[stream]), weight=weight)
        server = method.start_task(federate(method, 1), 1)
        client = client_of(method, 0, 1)
        training = method.prepare_training(client, method.make_payload(server))
        training.run()
        batch = first_batch(client)
        teacher = method_of(Lwf, splits=splits_of(**STREAMS[stream]), weight=1.0)
        (last_model,) = teacher.prepare_training(client, method.make_payload(server)).find_added(Teachers)
        with torch.no_grad():
            features = training.network.backbone(batch.inputs)
            distance = distil_heads(training.network, features, last_model.compute_logits(batch.inputs), 2.0)
        distances.append(float(distance))
    assert distances == sorted(distances, reverse=True)
    assert distances[-1] < distances[0] / 4


def test_the_teacher_travels_once_a_task(experiment_of: Callable, splits_of: Callable, tmp_path: Path) -> None:
    experiment_of("federation.clients_per_round=3", method="lwf", splits=splits_of(tasks=3)).run(tmp_path / "run")
    ledger = pl.read_parquet(tmp_path / "run" / "ledger.parquet")
    assert set(ledger["part"]) == {"weights", "anchor", "update", "weight"}
    anchors = ledger.filter(pl.col("part") == "anchor")
    assert set(anchors["task"]) == {1, 2}
    assert not anchors.select("task", "client").is_duplicated().any()
    model = ledger.filter((pl.col("part") == "weights") & (pl.col("task") == 0))["bytes"][0]
    assert set(anchors.filter(pl.col("task") == 1)["bytes"]) == {model}
