"""The four policies for batch normalisation's running statistics, each by what it says."""

from collections.abc import Callable

import pytest
import torch
from pydantic import ValidationError
from torch import nn

from fclmodels.backbones.layers.norms import depends_on_batch, list_counters, list_statistics
from fclmodels.federation.exchange import TRAIN
from fclmodels.federation.messages import Payload
from fclmodels.methods.fedavg import FedAvg
from fclmodels.plugins import find
from fclmodels.storage import trees

RESNET = ("model.backbone=resnet18", "federation.local_epochs=2")
MEAN, VAR = "backbone.bn1.running_mean", "backbone.bn1.running_var"
UNEVEN = {(task, client): 3 + 4 * client for task in (0, 1) for client in range(4)}


def payload_of(method: FedAvg, task: int = 0) -> Payload:
    server = method.create_server()
    for earlier in range(task + 1):
        server = method.start_task(server, earlier)
    return method.make_payload(server)


def test_average_takes_the_weighted_mean_over_clients(
    method_of: Callable, federate: Callable, client_of: Callable, splits_of: Callable
) -> None:
    method = method_of(FedAvg, *RESNET, "federation.rounds=1", splits=splits_of(train=UNEVEN))
    payload, sizes = payload_of(method), [UNEVEN[0, client] for client in range(4)]
    means = []
    for index in range(4):
        method.train(client_of(method, index), payload)
        means.append(method.networks._state[MEAN].clone())  # the network holds what the client ended with
    expected = sum(n * mean.double() for n, mean in zip(sizes, means, strict=True)) / sum(sizes)
    server = federate(method, 1)
    torch.testing.assert_close(server.weights[MEAN].double(), expected, rtol=0, atol=1e-6)
    assert not torch.equal(server.weights[MEAN], payload["weights"].tensors[MEAN])


@pytest.mark.parametrize("policy", ["average", "local", "frozen"])
def test_the_count_of_batches_is_never_averaged(
    policy: str, method_of: Callable, federate: Callable, client_of: Callable
) -> None:
    method = method_of(FedAvg, *RESNET, batch_norm=policy)
    server = federate(method)
    network = method.networks.load(server.spec, server.weights)
    assert list_counters(network)
    assert all(server.weights[name].item() == 0 for name in list_counters(network))
    reply, memory = method.exchanges[TRAIN].reply(client_of(method, 0, 1), method.make_payload(server))
    assert not list_counters(network) & set(reply.parts["update"].tensors)
    assert not list_counters(network) & set(memory.get("personal", {}))


def test_local_statistics_stay_with_their_client(method_of: Callable, client_of: Callable, federate: Callable) -> None:
    method = method_of(FedAvg, *RESNET, batch_norm="local")
    payload = payload_of(method)
    memories = {}
    for index in (0, 1):
        reply, memories[index] = method.exchanges[TRAIN].reply(client_of(method, index), payload)
        network = method.networks.load(method.run.make_spec(1), payload["weights"].tensors)
        assert set(memories[index]["personal"]) == list_statistics(network)
        assert not list_statistics(network) & set(reply.parts["update"].tensors)
    assert not torch.equal(memories[0]["personal"][MEAN], memories[1]["personal"][MEAN])
    start, end = federate(method, 0).weights, federate(method).weights
    assert torch.equal(start[MEAN], end[MEAN])
    assert not torch.equal(start["backbone.bn1.weight"], end["backbone.bn1.weight"])


def test_local_training_goes_on_from_the_clients_own_statistics(method_of: Callable, client_of: Callable) -> None:
    """A running mean moves by a tenth a batch: after one batch 0.9 of where it began is still in it."""
    method = method_of(FedAvg, "model.backbone=resnet18", "federation.batch_size=8", batch_norm="local")
    payload = payload_of(method)
    fresh = method.train(client_of(method, 0), payload).memory
    shifted = {name: payload["weights"].tensors[name] + 10 for name in fresh["personal"]}
    memory = {"personal": shifted, "other": 3}
    before = trees.digest(memory)
    after = method.train(client_of(method, 0, memory=memory), payload).memory
    torch.testing.assert_close(after["personal"][MEAN], fresh["personal"][MEAN] + 9)
    assert after["other"] == 3
    assert trees.digest(memory) == before


def test_a_client_predicts_with_its_own_statistics(method_of: Callable, client_of: Callable) -> None:
    method = method_of(FedAvg, *RESNET, batch_norm="local")
    assert method.is_personal
    payload = payload_of(method)
    memory = method.train(client_of(method, 0), payload).memory
    x = torch.randn(3, 1, 6, 6, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        own = method.make_client_predictor(client_of(method, 0, memory=memory), payload)(x).logits
        newcomer = method.make_client_predictor(client_of(method, 1), payload)(x).logits
        network = method.networks.load(method.run.make_spec(1), payload["weights"].tensors | memory["personal"]).eval()
        torch.testing.assert_close(own, network(x))
        network = method.networks.load(method.run.make_spec(1), payload["weights"].tensors).eval()
        torch.testing.assert_close(newcomer, network(x))
    assert not torch.equal(own, newcomer)


def test_batch_keeps_no_statistics_at_all(method_of: Callable, federate: Callable) -> None:
    method = method_of(FedAvg, *RESNET, batch_norm="batch")
    server = federate(method)
    assert not [name for name in server.weights if "running" in name or "num_batches" in name]
    network = method.networks.load(server.spec, server.weights).eval()
    assert depends_on_batch(network)
    x = torch.randn(4, 1, 6, 6, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        assert not torch.allclose(network(x)[:2], network(x[:2]), atol=1e-4)
        normalised = nn.functional.batch_norm(
            network.backbone.conv1(x), None, None, network.backbone.bn1.weight, network.backbone.bn1.bias, training=True
        )
        torch.testing.assert_close(network.backbone.bn1(network.backbone.conv1(x)), normalised)


def test_frozen_statistics_are_learnt_in_the_first_task_and_then_fixed(method_of: Callable, federate: Callable) -> None:
    method = method_of(FedAvg, *RESNET, batch_norm="frozen")
    start, first, second = (federate(method, tasks).weights for tasks in (0, 1, 2))
    average = federate(method_of(FedAvg, *RESNET), 1).weights
    assert trees.digest(first) == trees.digest(average)
    for name in (MEAN, VAR):
        assert not torch.equal(start[name], first[name])
        assert torch.equal(first[name], second[name])
    assert not torch.equal(first["backbone.bn1.weight"], second["backbone.bn1.weight"])


def test_frozen_statistics_are_those_that_normalise_in_training(method_of: Callable, client_of: Callable) -> None:
    method = method_of(FedAvg, *RESNET, batch_norm="frozen")
    network = method.networks.load(method.run.make_spec(2), payload_of(method, 1)["weights"].tensors)
    method.set_modes(network, 1)
    x = torch.randn(4, 1, 6, 6, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        torch.testing.assert_close(network(x)[:2], network(x[:2]), rtol=0, atol=1e-5)


def test_a_server_lr_above_one_does_not_carry_statistics_beyond_their_mean(
    method_of: Callable, federate: Callable
) -> None:
    """A step of three times the change could make a variance negative, and all that follows NaN."""
    method = method_of(FedAvg, *RESNET, "federation.server_lr=3", "federation.rounds=1")
    server = federate(method, 1)
    variances = [value for name, value in server.weights.items() if name.endswith("running_var")]
    assert variances
    assert all((value > 0).all() for value in variances)


@pytest.mark.parametrize("name", ["feddbe", "fedas", "pfeddil"])
def test_methods_with_a_servers_model_refuse_statistics_that_stay_with_clients(name: str) -> None:
    with pytest.raises(ValidationError, match="'average', 'batch' or 'frozen'"):
        find("method", name).Settings(batch_norm="local")
