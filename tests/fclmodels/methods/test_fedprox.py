"""FedProx: FedAvg at mu = 0, and its gradient that of the explicit proximal objective."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from fclmodels.data.batches import Batch
from fclmodels.federation.training.local_training import LocalTraining
from fclmodels.methods.fedavg import FedAvg
from fclmodels.methods.fedprox import FedProx
from fclmodels.storage import trees


@pytest.mark.parametrize(
    "optimiser", [("optimizer.momentum=0.9",), ("optimizer.kind=adam", "optimizer.weight_decay=0.1")]
)
def test_mu_zero_is_fedavg_to_the_bit(optimiser: tuple[str, ...], method_of: Callable, federate: Callable) -> None:
    dropout = "model.dropout=[0.2, 0.5]"
    one = federate(method_of(FedProx, *optimiser, dropout, mu=0.0))
    two = federate(method_of(FedAvg, *optimiser, dropout))
    assert trees.digest(one.to_tree()) == trees.digest(two.to_tree())
    assert trees.digest(federate(method_of(FedProx, *optimiser, dropout, mu=0.5)).to_tree()) != trees.digest(
        two.to_tree()
    )


@pytest.mark.parametrize("mu", [0.0, 0.01, 3.0])
def test_the_gradient_is_autograds_of_the_proximal_objective(
    mu: float, method_of: Callable, client_of: Callable
) -> None:
    method = method_of(FedProx, mu=mu)
    server = method.start_task(method.create_server(), 0)
    client = client_of(method, 1)
    network = method.networks.load(server.spec, server.weights)
    random = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for parameter in network.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=random), alpha=0.1)
    training = LocalTraining(method, client, network, server.weights)
    batch: Batch = next(next(client.yield_epochs()))
    parameters = training.parameters

    network.zero_grad()
    objective = cross_entropy(network(batch.inputs), batch.labels) + mu / 2 * sum(
        ((parameter - server.weights[name]) ** 2).sum() for name, parameter in parameters.items()
    )
    expected: list[Tensor] = list(torch.autograd.grad(objective, list(parameters.values())))

    network.zero_grad()
    method.compute_loss(training, batch).backward()
    method.change_gradients(training)
    for parameter, gradient in zip(parameters.values(), expected, strict=True):
        torch.testing.assert_close(parameter.grad, gradient, rtol=1e-5, atol=1e-6)


def test_a_larger_mu_keeps_clients_nearer(method_of: Callable, client_of: Callable) -> None:
    distances = []
    for mu in (0.0, 0.1, 1.0, 5.0):
        method = method_of(FedProx, "federation.local_epochs=10", mu=mu)
        server = method.start_task(method.create_server(), 0)
        answer = method.train(client_of(method, 0), method.make_payload(server))
        distances.append(sum((u**2).sum().item() for u in answer.tensors["update"].values()))
    assert distances == sorted(distances, reverse=True)
    assert distances[-1] < distances[0] / 4


def test_what_is_frozen_is_not_pulled(method_of: Callable, federate: Callable) -> None:
    method = method_of(FedProx, "model.freeze=[fc1]", mu=1.0)
    first, second = federate(method, 1).weights, federate(method, 2).weights
    assert torch.equal(first["backbone.fc1.weight"], second["backbone.fc1.weight"])
