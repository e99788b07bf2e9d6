"""FedL2P of meta-networks: batch norm mixing, facts, the rounds of both kinds, and plain fine-tuning as a limit."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from numpy.testing import assert_allclose

from fclmodels.backbones.layers.norms import BatchNorm
from fclmodels.errors import UserError
from fclmodels.methods.fedavg import FedAvg
from fclmodels.methods.fedl2p_meta import FedL2pMeta
from fclmodels.methods.parts.steered_tuning import Steering, clamp_straight, look_at, normalise

RESNET = ("model.backbone=resnet18", "model.width=4", "federation.rounds=2")


def test_the_worked_mixing() -> None:
    layer = BatchNorm(1).eval()
    x = torch.full((1, 1, 1, 1), 2.0)
    mixed = normalise(x, layer, torch.tensor(0.25), (torch.ones(1), torch.full((1,), 4.0)))
    assert_allclose(mixed.item(), 1.322872, atol=1e-5)
    assert torch.equal(normalise(x, layer, torch.tensor(0.0), (torch.ones(1), torch.ones(1))), layer(x))


def test_the_papers_networks_have_its_sizes() -> None:
    """ResNet-18's: 20 batch norms, 41 layers, 62 tensors."""
    steering = Steering({"layers": 41, "norms": 20, "tensors": 62, "lr": 0.001})
    assert steering.for_norms is not None
    sizes = [sum(p.numel() for p in net.parameters()) for net in (steering.for_norms, steering.for_rates)]
    assert sizes == [14_220, 24_662]


def test_a_clamp_lets_gradients_through() -> None:
    x = torch.tensor([-1.0, 0.5, 2.0], requires_grad=True)
    y = clamp_straight(x, 1.0)
    y.sum().backward()
    assert y.tolist() == [0, 0.5, 1]
    assert x.grad is not None
    assert x.grad.tolist() == [1, 1, 1]


def test_facts_are_moments_of_what_enters_layers(method_of: Callable) -> None:
    method = method_of(FedL2pMeta)
    network = method.networks.build(method.run.make_spec(1)).eval()
    inputs = torch.randn(7, 1, 6, 6)
    facts = look_at(network, inputs.split(3))
    with torch.no_grad():
        entering = [inputs, network.backbone(inputs)]
    for place, x in ((0, entering[0]), (-1, entering[1])):
        mean, deviation = facts.moments.view(-1, 2)[place]
        assert_allclose([mean, deviation], [x.mean(), (x.var(correction=0) + 1e-5).sqrt()], atol=1e-5)
    assert not len(facts.divergences)


def test_the_last_rounds_train_the_networks_alone(method_of: Callable, client_of: Callable, federate: Callable) -> None:
    method = method_of(FedL2pMeta, "federation.rounds=6", steps=2, outer=1)
    assert [method.steers(0, round) for round in range(6)] == [False] * 4 + [True] * 2
    assert not any(method_of(FedL2pMeta, "federation.rounds=1").steers(0, round) for round in range(1))
    plain = federate(method_of(FedAvg, "federation.rounds=4"), 1)
    server = federate(method, 1)
    assert all(torch.equal(server.weights[name], plain.weights[name]) for name in plain.weights)
    start = method.create_server().networks["steering"]
    assert any(not torch.equal(server.networks["steering"][name], tensor) for name, tensor in start.items())


def test_networks_with_norms_learn_how_to_mix_them(
    method_of: Callable, client_of: Callable, splits_of: Callable
) -> None:
    method = method_of(FedL2pMeta, *RESNET, steps=2, outer=1, lr=0.001)
    server = method.start_task(method.create_server(), 0)
    answer = method.train(client_of(method, 1, 0, 1), method.make_payload(server))
    moved = answer.tensors["steering-update"]
    assert any(name.startswith("for_norms") and tensor.any() for name, tensor in moved.items())
    assert any(name.startswith("for_rates") and tensor.any() for name, tensor in moved.items())


@pytest.mark.parametrize("settings", [(), RESNET])
def test_without_mixing_and_with_one_rate_it_is_plain_fine_tuning(
    settings: tuple[str, ...], method_of: Callable, client_of: Callable
) -> None:
    method = method_of(FedL2pMeta, *settings, "federation.batch_size=64", steps=2, lr=0.1)
    server, client = method.start_task(method.create_server(), 0), client_of(method, 1, 0, -1)
    state = {name: torch.zeros_like(t) for name, t in server.networks["steering"].items()}
    state["rates"] += 0.1
    state["for_rates.4.bias"] += 1
    payload: dict[str, Any] = {**method.make_payload(server)}
    payload["steering"] = payload["steering"].to("cpu")
    payload["steering"].tensors.update(state)
    (batch,) = method.run.batches.iterate_ordered(client.rows, 64)
    predict = method.make_client_predictor(client, payload)
    inputs = torch.randn(4, 1, 6, 6)
    with torch.inference_mode():
        logits = predict(inputs).logits.clone()
    network = method.networks.load(server.spec, server.weights).eval().requires_grad_(True)
    for _ in range(2):
        network.zero_grad()
        method.compute_cross_entropy(network, network.backbone(batch.inputs), batch.labels, 0).backward()
        with torch.no_grad():
            for parameter in network.parameters():
                parameter -= 0.1 * parameter.grad
    with torch.no_grad():
        assert_allclose(logits, network(inputs), atol=1e-4)


def test_what_it_cannot_steer_is_refused(method_of: Callable) -> None:
    with pytest.raises(UserError, match=r"mixes stored statistics.* average or frozen"):
        method_of(FedL2pMeta, batch_norm="batch")
