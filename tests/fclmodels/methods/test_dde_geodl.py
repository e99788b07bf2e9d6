"""GeoDL+iCaRL and DDE+iCaRL: their losses on a client in the papers' terms, the direction, and their first task."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from scipy.special import expit, log_softmax, softmax

from fclmodels.federation.server import Server
from fclmodels.methods.dde_icarl import DdeIcarl, Direction
from fclmodels.methods.fedavg import FedAvg
from fclmodels.methods.geodl_icarl import GeodlIcarl
from fclmodels.methods.parts.rehearsal import Rehearsed
from fclmodels.numerics.geodesic import geodesic_loss
from fclmodels.storage import trees


def train_second_task(method: Rehearsed, ended: Server, client_of: Callable) -> tuple[dict[str, Any], Any, float]:
    """A student that has left its teacher, the first batch of its training, and that batch's loss."""
    server = method.start_task(ended, 1)
    memory = method.select_exemplars(client_of(method, 1, 0), method.make_payload(ended)).memory
    training = method.prepare_training(client_of(method, 1, 1, memory=memory), method.make_payload(server))
    batch = next(next(method.yield_epochs(training)))
    start = {name: weight + 0.05 for name, weight in server.weights.items()}
    training.network.load_state_dict(start)
    training.network.eval()
    return start, batch, float(method.compute_loss(training, batch).detach())


def test_geodls_loss_against_numpy(method_of: Callable, client_of: Callable, federate: Callable, mlp: Any) -> None:
    method = method_of(GeodlIcarl, "federation.batch_size=16", exemplars=6)
    ended = federate(method, 1)
    start, batch, loss = train_second_task(method, ended, client_of)
    z, labels = mlp.compute_logits(start, batch.inputs), batch.labels.numpy()
    features = [torch.from_numpy(mlp.compute_features(weights, batch.inputs)) for weights in (start, ended.weights)]
    distance = float(geodesic_loss(*features))
    assert distance > 0
    expected = -log_softmax(z, axis=1)[np.arange(len(z)), labels].mean() + 10 * distance
    assert loss == pytest.approx(expected, rel=1e-3)


def test_ddes_loss_against_numpy(method_of: Callable, client_of: Callable, federate: Callable, mlp: Any) -> None:
    method = method_of(DdeIcarl, "federation.batch_size=16", exemplars=6, neighbours=3)
    ended = federate(method, 1)
    start, batch, loss = train_second_task(method, ended, client_of)
    rows = method.run.batches.prepare_inputs(method.run.batches.read_raw(method.select_rows(1, 1))).inputs
    z, z_rows = (mlp.compute_logits(start, x) for x in (batch.inputs, rows))
    h, h_rows = (mlp.compute_features(ended.weights, x) for x in (batch.inputs, rows))
    similarity = (h / np.linalg.norm(h, axis=1)[:, None]) @ (h_rows / np.linalg.norm(h_rows, axis=1)[:, None]).T
    similarity[similarity > 1 - 1e-5] = -2
    nearest = np.argsort(-similarity, axis=1)[:, :3]
    p, p_rows = softmax(z, axis=1), softmax(z_rows, axis=1)
    shared = (p + p_rows[nearest].mean(1)) / 2
    expected = -np.log(shared[np.arange(len(z)), batch.labels.numpy()]).mean()
    target, own = expit(mlp.compute_logits(ended.weights, batch.inputs)), expit(z[:, :2])
    expected -= (target * np.log(own) + (1 - target) * np.log(1 - own)).mean()
    assert loss == pytest.approx(expected, rel=1e-4)


@pytest.mark.parametrize("kind", [GeodlIcarl, DdeIcarl])
def test_the_first_task_is_fedavg(kind: type[Rehearsed], method_of: Callable, federate: Callable) -> None:
    mine, fedavg = (federate(method_of(one), 1) for one in (kind, FedAvg))
    assert trees.digest(mine.weights) == trees.digest(fedavg.weights)


def test_the_direction_follows_features_and_the_server_averages_it(
    method_of: Callable, client_of: Callable, mlp: Any, federate: Callable
) -> None:
    method = method_of(DdeIcarl, "federation.batch_size=4", "federation.rounds=1", "optimizer.lr=1e-9")
    begun = method.start_task(method.create_server(), 0)
    total, weights = np.zeros(12), 0.0
    for index in method.list_participants(0):
        client, d = client_of(method, index), np.zeros(12)
        for batch in next(client.yield_epochs()):
            d = 0.9 * d + mlp.compute_features(begun.weights, batch.inputs).mean(0)
        total, weights = total + client.weight * d, weights + client.weight
    server = federate(method, 1)
    assert server.knowledge["direction"].numpy() == pytest.approx(total / weights, rel=1e-3, abs=1e-5)


def test_answers_leave_a_share_of_it_out(method_of: Callable, federate: Callable, mlp: Any) -> None:
    method, whole = method_of(DdeIcarl, alpha=0.5), method_of(DdeIcarl, alpha=0.0)
    server = federate(method)
    inputs = next(method.run.batches.iterate_ordered(method.run.splits.select_test_rows(0), 20)).inputs
    d = server.knowledge["direction"].double().numpy()
    d /= np.linalg.norm(d)
    h = mlp.compute_features(server.weights, inputs)
    means = server.knowledge["means"]["weight"].double().numpy()
    with torch.inference_mode():
        logits = method.make_predictor(server)(inputs).logits.numpy()
        same = whole.make_predictor(server)(inputs).logits.numpy()
    assert same == pytest.approx(h @ means.T, rel=1e-3, abs=1e-5)
    assert logits == pytest.approx((h - 0.5 * np.outer(h @ d, d)) @ means.T, rel=1e-3, abs=1e-5)


def test_a_direction_forgets_by_a_tenth() -> None:
    direction = Direction(torch.ones(2))
    direction.follow(torch.tensor([[1.0, 3.0], [3.0, 5.0]]))
    assert direction.value.tolist() == pytest.approx([2.9, 4.9])
