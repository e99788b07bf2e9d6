"""The approximation of RGO+FL: P by hand and in NumPy, clients' steps, and who stores what."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from numpy.testing import assert_allclose
from torch import Tensor

from fclmodels.data.splits.split_reader import Rows, Splits
from fclmodels.federation.client import Client
from fclmodels.federation.exchange import Answer
from fclmodels.federation.messages import Payload
from fclmodels.methods.fedavg import FedAvg
from fclmodels.methods.rgo_approx import Curvature, RgoApprox, add_factors
from fclmodels.storage import trees


class Noting(RgoApprox):
    """Keeps what each client remembers after each task."""

    def add_curvature(self, client: Client, payload: Payload) -> Answer:
        answer = super().add_curvature(client, payload)
        assert not answer.tensors
        self.memories = {**getattr(self, "memories", {}), (client.task, client.index): answer.memory}
        return answer


def p_in_numpy(moment: np.ndarray, damping: float) -> np.ndarray:
    inverse = np.linalg.inv(damping * np.eye(len(moment)) + moment)
    return len(moment) * inverse / np.trace(inverse)


def p_of(factor: np.ndarray, tasks: int, damping: float) -> np.ndarray:
    orthogonal = add_factors(torch.zeros(len(factor), 0, dtype=torch.float64), torch.from_numpy(factor), len(factor))
    return Curvature(orthogonal, tasks, damping).precondition(torch.eye(len(factor), dtype=torch.float64)).numpy()


def test_p_by_hand() -> None:
    """Inputs (1, 0), (2, 0), (1, 1) and a = 1."""
    inputs = np.array([[1.0, 2, 1], [0, 0, 1]])
    P = p_of(inputs / 3**0.5, 1, 1.0)
    assert_allclose(P, [[0.615385, -0.153846], [-0.153846, 1.384615]], atol=1e-6)
    assert_allclose(np.array([1, 2]) @ P, [0.307692, 2.615385], atol=1e-6)


@given(st.integers(0, 2**32 - 1), st.integers(1, 6), st.lists(st.integers(0, 8), max_size=3), st.floats(0.01, 10))
def test_p_is_positive_of_trace_d_and_of_the_mean_over_tasks(
    seed: int, width: int, columns: list[int], damping: float
) -> None:
    random = np.random.default_rng(seed)
    tasks = [random.normal(size=(width, n)) for n in columns]
    factor = torch.zeros(width, 0, dtype=torch.float64)
    for X in tasks:
        factor = add_factors(factor, torch.from_numpy(X), width)
    count = max(1, len(tasks))
    P = Curvature(factor, count, damping).precondition(torch.eye(width, dtype=torch.float64)).numpy()
    moment = sum((X @ X.T for X in tasks), np.zeros((width, width))) / count
    assert_allclose(P, p_in_numpy(moment, damping), atol=1e-7)
    assert np.trace(P) == pytest.approx(width)
    assert np.linalg.eigvalsh((P + P.T) / 2).min() > 0


def test_of_more_directions_the_leading_ones_stay() -> None:
    factor = add_factors(torch.tensor([[3.0], [0], [0]]), torch.tensor([[0.0, 0], [0, 2], [1, 0]]), 2)
    assert_allclose(factor.abs(), [[3, 0], [0, 2], [0, 0]], atol=1e-6)


@pytest.fixture
def second_task(method_of: Callable, federate: Callable, client_of: Callable) -> Callable:
    """A method, the server in its second task, and a client that has (or has not) stored the first one's curvature."""

    def make(kind: type, stored: bool, **settings: Any) -> tuple:
        method = method_of(kind, "federation.batch_size=64", "optimizer.lr=0.1", **settings)
        ended = federate(method, 1)
        memory = {}
        if stored:
            memory = method.add_curvature(client_of(method, 1, 0), method.make_payload(ended)).memory
        return method, method.start_task(ended, 1), client_of(method, 1, 1, memory=memory)

    return make


def inputs_of(method: Any, weights: dict[str, Tensor], rows: Rows) -> dict[str, np.ndarray]:
    """What enters each layer of the multi-layer perceptron, [d, n]."""
    (batch,) = method.run.batches.iterate_ordered(rows, 64)
    x, entered = batch.inputs.double().flatten(1).numpy(), {}
    for layer in ("backbone.fc1", "backbone.fc2", "backbone.fc3", "heads.0"):
        entered[layer] = x.T
        w, b = (weights[f"{layer}.{part}"].double().numpy() for part in ("weight", "bias"))
        x = np.maximum(x @ w.T + b, 0)
    return entered


def test_one_step_against_numpy(second_task: Callable) -> None:
    """FedAvg's step of each weight times P of the first task's inputs on the first task's model; biases as they are."""
    method, server, client = second_task(RgoApprox, True, damping=0.3)
    plain = FedAvg(FedAvg.Settings(), method.run)
    steps = plain.train(client, plain.make_payload(server)).tensors["update"]
    update = method.train(client, method.make_payload(server)).tensors["update"]
    ended = {name: w[:2] if name.startswith("heads.") else w for name, w in server.weights.items()}
    for layer, X in inputs_of(method, ended, method.select_rows(0, 1)).items():
        P = p_in_numpy(X @ X.T / X.shape[1], 0.3)
        expected = steps[f"{layer}.weight"].double().numpy() @ P
        assert_allclose(update[f"{layer}.weight"], expected, atol=2e-5)
        assert np.abs(expected - steps[f"{layer}.weight"].numpy()).max() > 1e-3
        assert torch.equal(update[f"{layer}.bias"], steps[f"{layer}.bias"])


def test_a_client_that_stores_nothing_takes_fedavgs_steps_to_the_bit(second_task: Callable) -> None:
    method, server, client = second_task(RgoApprox, False)
    plain = FedAvg(FedAvg.Settings(), method.run)
    updates = [of.train(client, of.make_payload(server)).tensors["update"] for of in (method, plain)]
    assert trees.digest(updates[0]) == trees.digest(updates[1])


def test_the_first_task_is_fedavgs_to_the_bit(method_of: Callable, federate: Callable) -> None:
    mine, fedavg = (federate(method_of(kind), 1) for kind in (RgoApprox, FedAvg))
    assert trees.digest(mine.to_tree()) == trees.digest(fedavg.to_tree())


def test_a_share_of_the_clients_is_drawn_for_each_task(
    method_of: Callable, federate: Callable, splits_of: Callable[..., Splits]
) -> None:
    """Two of five, who add tasks to what they have; a convolution's taps and a narrow memory too."""
    method = method_of(Noting, "model.backbone=cnn", "model.width=4", splits=splits_of(tasks=4, clients=5), rank=3)
    federate(method)
    by_task = [sorted(client for task, client in method.memories if task == wanted) for wanted in range(4)]
    assert all(len(clients) == 2 for clients in by_task)
    assert len({tuple(clients) for clients in by_task}) > 1
    for (task, client), memory in method.memories.items():
        assert memory["tasks"] == sum(client in clients for clients in by_task[: task + 1])
        assert all(factor.shape[1] <= 3 for factor in memory["curvature"].values())
