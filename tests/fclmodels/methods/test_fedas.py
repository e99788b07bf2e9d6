"""FedAS: traces and alignment against worked numbers, what travels, the server's mean, and FedPer as a limit."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import polars as pl
import pytest
import torch
from numpy.testing import assert_allclose
from torch import nn
from torch.nn.functional import cross_entropy

from fclmodels.federation.training.optimisers import Sgd
from fclmodels.methods.fedas import FedAs, OwnHead, measure_misalignment, measure_traces
from fclmodels.methods.fedavg import FedAvg


def test_the_worked_traces() -> None:
    head = nn.Linear(2, 2)
    nn.init.zeros_(head.weight)
    nn.init.zeros_(head.bias)
    x, y = torch.tensor([[1.0, 2.0], [2.0, 0.0]]), torch.tensor([0, 1])
    singles = (cross_entropy(head(x[i : i + 1]), y[i : i + 1]) for i in range(2))
    assert_allclose(measure_traces(singles, list(head.parameters())), [3.0, 2.5], rtol=1e-6)
    assert_allclose(measure_traces([cross_entropy(head(x), y)], list(head.parameters())), [0.625], rtol=1e-6)


def test_the_worked_alignment_is_of_samples_and_not_of_their_mean() -> None:
    features, P = torch.eye(2), torch.ones(2)
    assert measure_misalignment(features, torch.tensor([0, 0]), {0: P}).item() == 0.5
    assert measure_misalignment(features, torch.tensor([0, 1]), {0: P, 1: P}).item() == 1.0
    assert measure_misalignment(features, torch.tensor([0, 1]), {1: P}).item() == 0.5
    assert measure_misalignment(features, torch.tensor([2, 2]), {1: P}).item() == 0


def make_small_model(base: list, bias: list, head: list, head_bias: list) -> nn.Sequential:
    model = nn.Sequential(nn.Sequential(nn.Linear(2, 2), nn.Tanh()), nn.Linear(2, 2))
    for parameter, value in zip(model.parameters(), (base, bias, head, head_bias), strict=True):
        parameter.data = torch.tensor(value)
    return model


def test_alignment_and_trace_are_the_releases() -> None:
    """Numbers of `clientAS.set_parameters` and `train(False)` of xiyuanyang45/FedAS 1a4f5fd on these four samples."""
    received = make_small_model([[0.1, -0.2], [0.3, 0.4]], [0.05, -0.1], [[0.5, -0.5], [0.2, 0.1]], [0.0, 0.1])
    own = make_small_model([[0.4, 0.2], [-0.1, 0.6]], [0.0, 0.2], [[-0.3, 0.8], [0.6, -0.2]], [0.2, -0.2])
    batches = [
        (torch.tensor([[1.0, 0.5], [-0.5, 2.0]]), torch.tensor([0, 1])),
        (torch.tensor([[0.3, -1.0], [1.5, 1.0]]), torch.tensor([1, 1])),
    ]
    x, y = (torch.cat(parts) for parts in zip(*batches, strict=True))
    with torch.no_grad():
        means = {label: own[0](x[y == label]).mean(0) for label in (0, 1)}
    optimiser = Sgd(list(received[0].parameters()), 0.01, 0.0, 0.0)
    for inputs, labels in batches:
        optimiser.zero_grad()
        measure_misalignment(received[0](inputs), labels, means).backward()
        optimiser.step()
    aligned = [[0.103125826, -0.185760960], [0.300239027, 0.393816382]], [0.060725655, -0.098784141]
    for parameter, expected in zip(received[0].parameters(), aligned, strict=True):
        assert_allclose(parameter.detach(), expected, rtol=1e-6)
    model = nn.Sequential(received[0], own[1])
    traces = measure_traces((cross_entropy(model(a), b) for a, b in batches), list(model.parameters()))
    assert_allclose(sum(traces), 2.58958101, rtol=1e-6)


def test_an_alignment_moves_the_backbone_towards_the_clients_own_means(
    method_of: Callable, client_of: Callable
) -> None:
    method = method_of(FedAs, align_batch=64, align_lr=0.05)
    server = method.start_task(method.create_server(), 0)
    payload = method.make_payload(server)
    assert not any(name.startswith("heads") for name in payload["weights"].tensors)
    memory = method.train(client_of(method, 1), payload).memory
    client = client_of(method, 1, 0, 1, memory=memory)
    means = method.measure_means(client, payload)
    (batch,) = method.run.batches.iterate_ordered(client.rows, 64)

    start = method.networks.load(server.spec, server.weights)
    f = start.backbone(batch.inputs)
    loss = sum(((f[batch.labels == y] - P) ** 2).mean() for y, P in means.items())
    names, parameters = zip(*start.backbone.named_parameters(), strict=True)
    moves = dict(zip(names, torch.autograd.grad(loss, parameters), strict=True))
    expected = {f"backbone.{n}": server.weights[f"backbone.{n}"] - 0.05 * g for n, g in moves.items()}
    trained = method.prepare_training(client, payload).network.state_dict()
    for name, weight in expected.items():
        assert_allclose(trained[name], weight, atol=1e-6)
    assert torch.equal(trained["heads.0.weight"], memory["personal"]["heads.0.weight"])


def test_the_server_has_the_mean_by_traces_of_backbones_and_heads(method_of: Callable, federate: Callable) -> None:
    method = method_of(FedAs, "federation.rounds=2")
    models: dict[int, list[Any]] = {}
    train = method.train

    def note(client: Any, payload: Any) -> Any:
        answer = train(client, payload)
        T = answer.tensors["weight"]["weight"].item()
        models.setdefault(client.round, []).append((T, {**answer.memory["personal"], **answer.memory["base"]}))
        return answer

    object.__setattr__(method.exchanges["train"], "answer", note)
    server = federate(method, 1)
    total = sum(T for T, _ in models[1])
    assert len({T for T, _ in models[1]}) > 1
    for name, weight in server.weights.items():
        if weight.is_floating_point():
            assert_allclose(weight, sum(T * model[name] for T, model in models[1]) / total, rtol=1e-4, atol=1e-6)


def test_without_alignment_and_with_equal_weights_it_is_fedper_to_the_bit(
    method_of: Callable, federate: Callable, monkeypatch: pytest.MonkeyPatch
) -> None:
    """FedAvg whose clients keep their heads."""
    monkeypatch.setattr("fclmodels.methods.fedas.measure_traces", lambda *_: [1.0])
    ours = federate(method_of(FedAs, align_lr=0)).weights
    run = method_of(FedAvg, "federation.weighting=uniform").run
    plain = federate(FedAvg(FedAvg.Settings(), run, OwnHead(run, "average"))).weights
    assert all(torch.equal(ours[n], plain[n]) for n in plain if n.startswith("backbone."))


def test_a_client_answers_with_the_model_that_it_trained(experiment_of: Callable, tmp_path: Path) -> None:
    experiment_of(method="fedas").run(tmp_path / "run")
    readings = set(pl.read_parquet(tmp_path / "run" / "accuracy.parquet")["reading"])
    assert {"task_agnostic", "personal_task_agnostic", "personal_task_aware"} <= readings
