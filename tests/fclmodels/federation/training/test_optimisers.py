"""Optimisers by parameter, and states of them that go on within a task."""

from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch

from fclmodels.federation.client import Client
from fclmodels.federation.messages import Part
from fclmodels.federation.training.local_training import LocalTraining, ParameterGroup
from fclmodels.methods.fedavg import FedAvg
from fclmodels.plugins import find
from fclmodels.settings.schema import OptimizerSettings
from fclmodels.storage import trees


class ByPart(FedAvg):
    """The head by Adam, the first layer slowly, the rest by the run's optimiser; all go on within a task."""

    name = "by-part"
    paper = "none"
    keeps_optimisers: ClassVar[bool] = True

    def optimisers(self, training: LocalTraining) -> list[ParameterGroup]:
        head = [name for name in training.parameters if name.startswith("heads.")]
        first = [name for name in training.parameters if name.startswith("backbone.fc1")]
        return [
            ParameterGroup(head, OptimizerSettings(kind="adam", lr=0.01)),
            ParameterGroup(first, OptimizerSettings(lr=0.02, momentum=0.5)),
        ]


class Anew(ByPart):
    name = "anew"
    keeps_optimisers: ClassVar[bool] = False


def by_hand(method: FedAvg, client: Client, rounds: int, goes_on: bool) -> dict[str, torch.Tensor]:
    """The weights after so many rounds of one client alone, with torch's optimisers as a person would write them."""
    server = method.start_task(method.setup(), 0)
    network = method.networks.load(server.spec, server.weights)
    network.train()
    optimisers: list[torch.optim.Optimizer] = []
    for round in range(rounds):
        if not (goes_on and optimisers):
            backbone = network.backbone
            optimisers = [
                torch.optim.SGD([*backbone.fc2.parameters(), *backbone.fc3.parameters()], 0.1, momentum=0.9),
                torch.optim.Adam(network.heads.parameters(), 0.01),
                torch.optim.SGD(backbone.fc1.parameters(), 0.02, momentum=0.5),
            ]
        for batch in next(Client(client.index, 0, round, client.run, client.rows, {}).epochs()):
            for optimiser in optimisers:
                optimiser.zero_grad()
            torch.nn.functional.cross_entropy(network(batch.inputs), batch.labels).backward()
            for optimiser in optimisers:
                optimiser.step()
    return {name: tensor.detach().clone() for name, tensor in network.state_dict().items()}


@pytest.mark.parametrize("kind", [ByPart, Anew])
def test_a_client_alone_trains_as_by_hand(
    kind: type[FedAvg], method_of: Callable[..., Any], client_of: Callable[..., Client], tmp_path: Path
) -> None:
    """Three rounds with momentum; what the client remembers passes through its file."""
    method = method_of(kind, "optimizer.momentum=0.9")
    expected = by_hand(method, client_of(method, 0), 3, kind.keeps_optimisers)
    server, memory = method.start_task(method.setup(), 0), {}
    weights = server.weights
    for round in range(3):
        payload = {"weights": Part("weights", weights)}
        answer = method.train(client_of(method, 0, round=round, memory=memory), payload)
        scale = answer.tensors["weight"]["weight"]
        weights = {name: weights[name] + change / scale for name, change in answer.tensors["update"].items()}
        weights = {name: tensor.float() for name, tensor in weights.items()}
        trees.save(answer.memory, tmp_path / "memory")
        memory = trees.load(tmp_path / "memory")
    for name, tensor in expected.items():
        torch.testing.assert_close(weights[name], tensor, rtol=1e-4, atol=1e-5)
    assert ("optimisers" in memory) == kind.keeps_optimisers


def test_states_of_another_task_are_not_gone_on_with(
    method_of: Callable[..., Any], client_of: Callable[..., Client]
) -> None:
    method = method_of(ByPart, "optimizer.momentum=0.9")
    server = method.start_task(method.setup(), 0)
    memory = method.train(client_of(method, 0), method.payload(server)).memory
    second = method.start_task(server, 1)
    fresh, later = (
        method.train(client_of(method, 0, 1, memory=before), method.payload(second)) for before in ({}, memory)
    )
    for name, change in fresh.tensors["update"].items():
        assert torch.equal(later.tensors["update"][name], change), name
    assert later.memory["optimisers"]["task"] == 1


def test_a_toys_optimisers_count_the_steps_of_the_task_in_the_memory(
    toys: Path, method_of: Callable[..., Any], client_of: Callable[..., Client]
) -> None:
    """The bias of the other task has no state, and does not move."""
    method = method_of(find("method", "task-biases"))
    server, memory = method.start_task(method.setup(), 0), {}
    for round in range(3):
        answer = method.train(client_of(method, 0, round=round, memory=memory), method.payload(server))
        memory = answer.memory
    of_model, of_biases = memory["optimisers"]["states"]
    assert not of_model  # of plain SGD there is nothing to keep
    assert of_biases.keys() == {"0"}
    assert of_biases["0"]["step"] == 3 * 2
    assert answer.tensors["biases-update"]["0"].any()
    assert not answer.tensors["biases-update"]["1"].any()
