"""A-GEM+FL: eq. 11 against its own quadratic program, and single steps against it written out."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from numpy.testing import assert_allclose
from scipy.optimize import minimize
from torch import Tensor
from torch.nn.functional import cross_entropy

from fclmodels.data.batches import Batch
from fclmodels.data.splits.split_reader import Splits
from fclmodels.federation.client import Client
from fclmodels.federation.server import Server
from fclmodels.methods.agem import Agem, correct_gradients
from fclmodels.methods.fedavg import FedAvg
from fclmodels.methods.parts.replay_memory import pack_samples

ONE_STEP = ("federation.batch_size=64", "optimizer.lr=0.1")


def named(vector: np.ndarray) -> dict[str, Tensor]:
    """Six numbers as a matrix and a vector."""
    tensor = torch.tensor(vector, dtype=torch.float32)
    return {"weight": tensor[:4].view(2, 2).clone(), "bias": tensor[4:].clone()}


def flat(tensors: dict[str, Tensor]) -> np.ndarray:
    return torch.cat([tensors["weight"].flatten(), tensors["bias"]]).double().numpy()


def test_a_correction_worked_out_by_hand() -> None:
    """g.g_ref = -1 and g_ref.g_ref = 4, so a quarter of g_ref is added."""
    g = {"a": torch.tensor([1.0, 0.0]), "b": torch.tensor([[2.0]])}
    reference = {"a": torch.tensor([1.0, -1.0]), "b": torch.tensor([[-1.0]]), "old head": torch.tensor([1.0])}
    result = correct_gradients(g, reference)
    assert {name: value.flatten().tolist() for name, value in result.items()} == {
        "a": [1.25, -0.25],
        "b": [1.75],
        "old head": [0.25],
    }


def test_what_the_reference_does_not_reach_stays() -> None:
    g = {"a": torch.tensor([1.0]), "new head": torch.tensor([5.0])}
    result = correct_gradients(g, {"a": torch.tensor([-2.0])})
    assert {name: value.tolist() for name, value in result.items()} == {"a": [0.0], "new head": [5.0]}


@pytest.mark.parametrize("reference", [[1.0, 0.0], [0.0, 1.0], [0.0, 0.0], [2.0, 5.0]])
def test_a_gradient_that_does_no_harm_is_left_alone(reference: list[float]) -> None:
    g = {"a": torch.tensor([3.0, 0.0])}
    result = correct_gradients(g, {"a": torch.tensor(reference), "old head": torch.tensor([7.0])})
    assert result is g
    assert g["a"].tolist() == [3.0, 0.0]


@given(seed=st.integers(0, 10_000), scale=st.sampled_from([1e-3, 1.0, 1e3]))
def test_it_is_the_nearest_gradient_that_does_no_harm(seed: int, scale: float) -> None:
    """Eq. 10: minimise |x - g|^2 / 2 subject to x.g_ref >= 0."""
    random = np.random.default_rng(seed)
    g, reference = random.standard_normal(6), random.standard_normal(6)
    best = minimize(
        lambda x: ((x - g) ** 2).sum() / 2,
        np.zeros(6),
        jac=lambda x: x - g,
        constraints={"type": "ineq", "fun": lambda x: x @ reference, "jac": lambda x: reference},
        method="SLSQP",
        options={"ftol": 1e-12},
    ).x
    result = flat(correct_gradients(named(scale * g), named(reference)))
    assert_allclose(result, scale * best, atol=scale * 1e-5)
    assert result @ reference > -1e-5 * scale


def second_task(method: Any) -> Server:
    return method.start_task(method.start_task(method.create_server(), 0), 1)


def opposed(method: Any, client_of: Callable) -> tuple[Client, Batch]:
    """Client 0 in the second task, which remembers the very images of it, but as the first task's classes."""
    raw = method.run.batches.read_raw(method.select_rows(1, 0))
    raw = Batch(raw.inputs, 3 - raw.labels, torch.zeros_like(raw.tasks))
    return client_of(method, 0, 1, memory=pack_samples(raw)), method.run.batches.augment_raw(raw, torch.Generator())


def gradients_of(loss: Tensor, network: torch.nn.Module) -> dict[str, np.ndarray]:
    names, parameters = zip(*network.named_parameters(), strict=True)
    found = torch.autograd.grad(loss, parameters, allow_unused=True, retain_graph=True)
    pairs = zip(names, found, parameters, strict=True)
    return {name: (torch.zeros_like(p) if g is None else g).double().numpy() for name, g, p in pairs}


@pytest.mark.parametrize("head", ["growing", "per-task"])
def test_a_step_that_would_do_harm(
    head: str, method_of: Callable, client_of: Callable, splits_of: Callable[..., Splits]
) -> None:
    """-lr times eq. 11 over all parameters together, with heads of their own those of both tasks."""
    method = method_of(Agem, *ONE_STEP, splits=splits_of(head=head))
    server = second_task(method)
    client, old = opposed(method, client_of)
    (new,) = method.run.batches.iterate_ordered(client.rows, 64)
    update = method.train(client, method.make_payload(server)).tensors["update"]

    network = method.networks.load(server.spec, server.weights)
    if head == "growing":
        losses = [cross_entropy(network(batch.inputs), batch.labels) for batch in (new, old)]
    else:
        losses = [
            cross_entropy(network(new.inputs, 1), new.labels - 2),
            cross_entropy(network(old.inputs, 0), old.labels),
        ]
    g, reference = (gradients_of(loss, network) for loss in losses)
    along = sum((g[name] * reference[name]).sum() for name in g)
    squares = sum((reference[name] ** 2).sum() for name in g)
    assert along < -0.01 * squares
    assert update.keys() == g.keys()
    for name in g:
        expected = -0.1 * (g[name] - along / squares * reference[name])
        assert_allclose(update[name] / client.weight, expected, atol=1e-6)


def test_a_step_that_does_no_harm_is_fedavgs(method_of: Callable, client_of: Callable) -> None:
    """Where the memory holds the batch itself, to the bit, over many steps."""
    updates = []
    for kind in (Agem, FedAvg):
        method = method_of(kind, "federation.batch_size=8", "federation.local_epochs=5", "optimizer.momentum=0.9")
        memory = pack_samples(method.run.batches.read_raw(method.select_rows(1, 0)))
        client = client_of(method, 0, 1, memory=memory)
        updates.append(method.train(client, method.make_payload(second_task(method))).tensors["update"])
    assert all(torch.equal(updates[0][name], updates[1][name]) for name in updates[1])


def test_a_small_step_does_not_raise_the_loss_of_the_memory(method_of: Callable, client_of: Callable) -> None:
    changes = []
    for kind in (Agem, FedAvg):
        method = method_of(kind, "federation.batch_size=64", "optimizer.lr=0.001")
        server = second_task(method)
        client, old = opposed(method, client_of)
        update = method.train(client, method.make_payload(server)).tensors["update"]
        after = {name: w + update[name] / client.weight for name, w in server.weights.items()}
        before, now = (
            cross_entropy(method.networks.load(server.spec, weights)(old.inputs), old.labels).item()
            for weights in (server.weights, after)
        )
        changes.append(now - before)
    assert changes[1] > 1e-4
    assert abs(changes[0]) < changes[1] / 20


def test_the_reference_moves_running_statistics_after_the_batch(method_of: Callable, client_of: Callable) -> None:
    """Each by a tenth of the way to its own mean."""
    method = method_of(Agem, *ONE_STEP, "model.backbone=resnet18")
    server = second_task(method)
    client = client_of(method, 0, 1, memory=pack_samples(method.run.batches.read_raw(method.select_rows(0, 0))))
    moved = method.train(client, method.make_payload(server)).tensors["statistics"]["backbone.bn1.running_mean"]
    network = method.networks.load(server.spec, server.weights)
    expected = before = server.weights["backbone.bn1.running_mean"]
    for task in (1, 0):
        (batch,) = method.run.batches.iterate_ordered(method.select_rows(task, 0), 64)
        expected = 0.9 * expected + 0.1 * network.backbone.conv1(batch.inputs).mean((0, 2, 3)).detach()
    assert_allclose(moved / client.weight, expected - before, atol=1e-6)
