"""FedProx to the last task's model: FedAvg at mu = 0, and its gradient that of the explicit objective."""

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch.nn.functional import cross_entropy

from fclmodels.data.batches import Batch
from fclmodels.federation.training.optimisers import make_optimiser
from fclmodels.methods.fedavg import FedAvg
from fclmodels.methods.prox_anchor import ProxAnchor
from fclmodels.methods.special_c import SpecialC
from fclmodels.storage import trees


@pytest.mark.parametrize(
    "optimiser", [("optimizer.momentum=0.9",), ("optimizer.kind=adam", "optimizer.weight_decay=0.1")]
)
def test_mu_zero_is_fedavg_to_the_bit(optimiser: tuple[str, ...], method_of: Callable, federate: Callable) -> None:
    zero, fedavg = federate(method_of(ProxAnchor, *optimiser, mu=0.0)), federate(method_of(FedAvg, *optimiser))
    assert trees.digest(zero.weights) == trees.digest(fedavg.weights)
    some = federate(method_of(ProxAnchor, *optimiser, mu=0.5))
    assert trees.digest(some.weights) != trees.digest(fedavg.weights)


@pytest.mark.parametrize("mu", [0.0, 0.1, 3.0])
def test_the_gradient_is_autograds_of_the_objective(
    mu: float, method_of: Callable, client_of: Callable, federate: Callable, training_on: Callable
) -> None:
    """Of F_k(w) + mu/2 ||w - W*||^2, where W* has fewer rows in the head than w."""
    method = method_of(ProxAnchor, mu=mu)
    server = method.start_task(federate(method, 1), 1)
    anchor = server.knowledge["anchor"]
    client = client_of(method, 1, 1)
    network = method.networks.load(server.spec, server.weights)
    random = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for parameter in network.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=random), alpha=0.1)
    training = training_on(method, client, method.make_payload(server), network, server.weights)
    batch: Batch = next(next(client.yield_epochs()))
    parameters = training.parameters

    network.zero_grad()
    objective = cross_entropy(network(batch.inputs), batch.labels) + mu / 2 * sum(
        ((parameter[: len(anchor[name])] - anchor[name]) ** 2).sum() for name, parameter in parameters.items()
    )
    expected = list(torch.autograd.grad(objective, list(parameters.values())))

    network.zero_grad()
    method.compute_loss(training, batch).backward()
    method.change_gradients(training)
    for parameter, gradient in zip(parameters.values(), expected, strict=True):
        torch.testing.assert_close(parameter.grad, gradient, rtol=1e-5, atol=1e-6)


def test_a_step_by_hand(method_of: Callable, client_of: Callable, federate: Callable, training_on: Callable) -> None:
    """w = 2, g = 0.5, W* = 1, mu = 0.1, lr = 0.1: 2 - 0.1 (0.5 + 0.1 (2 - 1)) = 1.94; new rows of the head: 1.95."""
    method = method_of(ProxAnchor, "optimizer.lr=0.1", "optimizer.momentum=0", mu=0.1)
    server = method.start_task(federate(method, 1), 1)
    old = server.knowledge["anchor"]
    server = replace(server, knowledge={**server.knowledge, "anchor": {n: torch.ones_like(t) for n, t in old.items()}})
    client = client_of(method, 1, 1)
    network = method.networks.load(server.spec, {name: torch.full_like(t, 2) for name, t in server.weights.items()})
    training = training_on(method, client, method.make_payload(server), network, server.weights)
    for parameter in training.parameters.values():
        parameter.grad = torch.full_like(parameter, 0.5)
    method.change_gradients(training)
    make_optimiser(client.run.params.optimizer, list(training.parameters.values()), 0).step()
    grown = 0
    for name, parameter in training.parameters.items():
        known, new = parameter.split([len(old[name]), len(parameter) - len(old[name])])
        torch.testing.assert_close(known, torch.full_like(known, 1.94))
        torch.testing.assert_close(new, torch.full_like(new, 1.95))
        grown += len(new)
    assert grown


def test_under_plain_sgd_special_c_is_a_case_of_it(
    method_of: Callable, client_of: Callable, splits_of: Callable, federate: Callable
) -> None:
    """(w - eta g + c W*) / (1 + c) = w - eta' g - eta' mu (w - W*) with eta' = eta / (1 + c) and mu = c / eta."""
    eta, c = 0.1, 0.3
    splits = splits_of(same_classes=True)
    method = method_of(SpecialC, f"optimizer.lr={eta}", splits=splits, c=c)
    server = method.start_task(federate(method, 1), 1)
    ours = method.train(client_of(method, 0, 1), method.make_payload(server)).tensors["update"]
    other = method_of(ProxAnchor, f"optimizer.lr={eta / (1 + c)}", mu=c / eta, splits=splits)
    same = other.train(client_of(other, 0, 1), other.make_payload(server)).tensors["update"]
    for name, update in ours.items():
        torch.testing.assert_close(update, same[name], rtol=0, atol=1e-5)
