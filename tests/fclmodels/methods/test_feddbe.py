"""FedDBE: the running mean and pull against worked numbers, the exchange, a client's vector, FedAvg as a limit."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import polars as pl
import pytest
import torch
from numpy.testing import assert_allclose
from torch import nn
from torch.nn.functional import cross_entropy

from fclmodels.methods.fedavg import FedAvg
from fclmodels.methods.feddbe import FedDbe, RunningMean, Shift, measure_bias

ONE_STEP = ("federation.batch_size=64", "federation.rounds=1", "optimizer.lr=0.1")


def test_the_worked_running_mean_and_its_pull() -> None:
    mean, g = RunningMean(0.1), torch.ones(2)
    first = mean.follow(torch.tensor([[0.0, 1.0], [2.0, 3.0]]))
    assert_allclose(first, [0.1, 0.2], rtol=1e-6)
    assert_allclose(measure_bias(first, g), 0.3625, rtol=1e-6)
    batch = torch.tensor([[3.0, 0.0]], requires_grad=True)
    second = mean.follow(batch)
    assert_allclose(second.detach(), [0.39, 0.18], rtol=1e-6)
    assert_allclose(50 * measure_bias(second, g).item(), 13.05625, rtol=1e-6)
    measure_bias(second, g).backward()
    assert_allclose(batch.grad, [[-0.0305, -0.041]], rtol=1e-5)


def test_running_mean_pull_and_vector_are_the_releases() -> None:
    """Numbers of `clientDBE.train` of TsingZ0/DBE 193f435: two epochs on four samples, kappa 5, mu 0.3, rates 0.1."""
    base, head = nn.Sequential(nn.Linear(2, 2), nn.Tanh()), nn.Linear(2, 2)
    values = [[[0.1, -0.2], [0.3, 0.4]], [0.05, -0.1], [[0.5, -0.5], [0.2, 0.1]], [0.0, 0.1]]
    parameters = [*base.parameters(), *head.parameters()]
    for parameter, value in zip(parameters, values, strict=True):
        parameter.data = torch.tensor(value)
    shift, mean = Shift(torch.tensor([0.2, -0.1]), torch.tensor([0.4, -0.3])), RunningMean(0.3)
    batches = [
        (torch.tensor([[1.0, 0.5], [-0.5, 2.0]]), torch.tensor([0, 1])),
        (torch.tensor([[0.3, -1.0], [1.5, 1.0]]), torch.tensor([1, 1])),
    ]
    for x, y in batches * 2:
        f = base(x)
        pull = measure_bias(mean.follow(f), shift.consensus)
        (cross_entropy(head(f + shift.vector), y) + 5 * pull).backward()
        with torch.no_grad():
            for parameter in (*parameters, shift.vector):
                parameter -= 0.1 * parameter.grad
                parameter.grad = None
    assert_allclose(parameters[0].detach(), [[0.159995764, -0.134692848], [0.237721696, 0.345968485]], rtol=1e-5)
    assert_allclose(parameters[2].detach(), [[0.478669286, -0.490945160], [0.221330673, 0.090945177]], rtol=1e-5)
    assert_allclose(shift.vector.detach(), [0.173084348, -0.0491414256], rtol=1e-5)
    assert mean.value is not None
    assert_allclose(mean.value, [0.0719561875, 0.150528640], rtol=1e-5)


def test_the_consensus_is_the_mean_over_samples_of_what_clients_saw(
    method_of: Callable, client_of: Callable, after_each_task: Callable
) -> None:
    """One batch a client, before any step: mu times the mean feature of the model that the seed draws."""
    method = method_of(FedDbe, *ONE_STEP, mu=0.3)
    first, last = after_each_task(method)
    start = method.start_task(method.create_server(), 0)
    network = method.networks.load(start.spec, start.weights)
    rows = [
        next(method.run.batches.iterate_ordered(method.select_rows(0, k), 64)).inputs
        for k in method.list_participants(0)
    ]
    with torch.no_grad():
        expected = 0.3 * network.backbone(torch.cat(rows)).mean(0)
    assert_allclose(first.knowledge["consensus"]["mean"], expected, atol=1e-6)
    assert torch.equal(last.knowledge["consensus"]["mean"], first.knowledge["consensus"]["mean"])
    anew = after_each_task(method_of(FedDbe, *ONE_STEP, consensus="each-task"))
    assert not torch.equal(anew[0].knowledge["consensus"]["mean"], anew[1].knowledge["consensus"]["mean"])


def test_the_training_for_the_consensus_has_the_first_rounds_rates(method_of: Callable, client_of: Callable) -> None:
    settings = ("federation.local_epochs=2", "federation.batch_size=64", "optimizer.lr_decay=0.5")
    for more in ((), ("optimizer.lr_decay_epochs=1",)):
        method = method_of(FedDbe, *settings, *more)
        server = method.start_task(method.create_server(), 0)
        sums = [
            method.send_mean(client_of(method, 1, 0, number), method.make_payload(server)).tensors["means"]["sum"]
            for number in (-1001, 0)
        ]
        assert_allclose(*sums, rtol=1e-4, atol=1e-6)
        assert sums[0].any()


def test_a_clients_vector_steps_beside_the_model_and_answers_for_it_alone(
    method_of: Callable, client_of: Callable, federate: Callable
) -> None:
    method = method_of(FedDbe, *ONE_STEP)
    server, client = (
        federate(method, 1),
        client_of(method, 1, memory={"shift": (p := torch.randn(method_features(method)))}),
    )
    payload = method.make_payload(server)
    network = method.networks.load(server.spec, server.weights)
    (batch,) = method.run.batches.iterate_ordered(client.rows, 64)
    vector = p.clone().requires_grad_(True)
    method.compute_cross_entropy(network, network.backbone(batch.inputs) + vector, batch.labels, 0).backward()
    memory = method.train(client, payload).memory
    assert_allclose(memory["shift"], p - 0.1 * vector.grad, atol=1e-6)
    with torch.inference_mode():
        own = method.make_client_predictor(client, payload)(batch.inputs).logits
        network = method.networks.load(server.spec, server.weights).eval()
        assert_allclose(own, network.heads[0](network.backbone(batch.inputs) + p), atol=1e-6)
        assert_allclose(method.make_predictor(server)(batch.inputs).logits, network(batch.inputs), atol=1e-6)


def method_features(method: Any) -> int:
    return method.networks.build(method.run.make_spec(1)).backbone.features


def test_without_pull_and_vector_it_is_fedavg_to_the_bit(method_of: Callable, federate: Callable) -> None:
    ours, plain = federate(method_of(FedDbe, kappa=0, shift_lr=0)).weights, federate(method_of(FedAvg)).weights
    assert all(torch.equal(ours[name], plain[name]) for name in plain)


@pytest.mark.parametrize("settings", [(), ("methods.feddbe.shift_lr=0", "methods.feddbe.kappa=0")])
def test_clients_own_accuracy_stands_beside_the_servers(
    settings: tuple[str, ...], experiment_of: Callable, tmp_path: Path
) -> None:
    """Readings of their own; of the same model, the server's right answers are theirs, once for each client."""
    experiment_of(*settings, method="feddbe").run(tmp_path / "run")
    table = pl.read_parquet(tmp_path / "run" / "accuracy.parquet").filter(pl.col("client").is_null())
    total = {reading: table.filter(reading=reading, after=2).sort("task") for reading in table["reading"].unique()}
    personal, plain = total["personal_task_agnostic"], total["task_agnostic"]
    assert {"personal_task_aware", "task_aware"} <= total.keys()
    assert personal["total"].to_list() != []
    if settings:
        shares = [frame["correct"] / frame["total"] for frame in (personal, plain)]
        assert_allclose(*(share.to_numpy() for share in shares), atol=1e-12)
