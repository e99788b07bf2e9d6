"""FedAvg against a bare PyTorch loop, and what it must leave alone."""

from collections.abc import Callable
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from fclmodels.data.batches import Batch
from fclmodels.data.splits.split_reader import Splits
from fclmodels.federation.exchange import TRAIN
from fclmodels.federation.server import Server
from fclmodels.federation.training.local_training import LocalTraining
from fclmodels.methods.fedavg import FedAvg
from fclmodels.storage import trees

Weights = dict[str, Tensor]
UNEVEN = {(task, client): 3 + 4 * client for task in (0, 1) for client in range(4)}
FULL_BATCH = ("federation.batch_size=64",)


def images(splits: Splits, task: int, client: int) -> tuple[Tensor, Tensor]:
    rows = splits.select_rows(task, "train", client)
    pixels = splits.images[torch.from_numpy(rows.samples)].float() / 255
    return (pixels - 0.5) / 0.25, torch.from_numpy(rows.labels)


def logits(weights: Weights, x: Tensor) -> Tensor:
    x = x.flatten(1)
    for layer in ("backbone.fc1", "backbone.fc2", "backbone.fc3"):
        x = F.relu(F.linear(x, weights[f"{layer}.weight"], weights[f"{layer}.bias"]))
    return F.linear(x, weights["heads.0.weight"], weights["heads.0.bias"])


def trained(weights: Weights, x: Tensor, y: Tensor, make: Callable[[list[Tensor]], Any], steps: int) -> Weights:
    """Full-batch steps on one client: no order of samples matters."""
    parameters = {name: w.clone().requires_grad_() for name, w in weights.items()}
    optimiser = make(list(parameters.values()))
    for _ in range(steps):
        optimiser.zero_grad()
        F.cross_entropy(logits(parameters, x), y).backward()
        optimiser.step()
    return {name: p.detach() for name, p in parameters.items()}


def average(models: list[Weights], shares: list[float]) -> Weights:
    return {name: sum(s * m[name].double() for s, m in zip(shares, models, strict=True)) for name in models[0]}


def assert_close(one: Weights, two: Weights, tolerance: float = 1e-6) -> None:
    assert one.keys() == two.keys()
    for name in one:
        torch.testing.assert_close(one[name].double(), two[name].double(), rtol=0, atol=tolerance, msg=name)


def changed(one: Weights, two: Weights) -> set[str]:
    return {name for name in two if name not in one or not torch.equal(one[name], two[name])}


OPTIMISERS: dict[str, tuple[tuple[str, ...], Callable[[list[Tensor]], Any]]] = {
    "sgd": ((), lambda p: torch.optim.SGD(p, lr=0.1)),
    "momentum": (
        ("optimizer.momentum=0.9", "optimizer.weight_decay=0.01"),
        lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, weight_decay=0.01),
    ),
    "adam": (
        ("optimizer.kind=adam", "optimizer.lr=0.01", "optimizer.weight_decay=0.01"),
        lambda p: torch.optim.Adam(p, lr=0.01, weight_decay=0.01),
    ),
    "adamw": (
        ("optimizer.kind=adamw", "optimizer.lr=0.01", "optimizer.weight_decay=0.1"),
        lambda p: torch.optim.AdamW(p, lr=0.01, weight_decay=0.1),
    ),
}


@pytest.mark.parametrize(("overrides", "make"), OPTIMISERS.values(), ids=OPTIMISERS)
def test_two_rounds_are_those_of_a_bare_loop(
    overrides: tuple[str, ...], make: Callable, method_of: Callable, splits_of: Callable, federate: Callable
) -> None:
    """The second round shows that each client's optimiser starts anew."""
    splits = splits_of(train=UNEVEN)
    method = method_of(FedAvg, *FULL_BATCH, "federation.local_epochs=3", *overrides, splits=splits)
    expected = method.create_server().weights
    sizes = [UNEVEN[0, client] for client in range(4)]
    for _ in range(2):
        models = [trained(expected, *images(splits, 0, client), make, steps=3) for client in range(4)]
        expected = {n: w.float() for n, w in average(models, [n / sum(sizes) for n in sizes]).items()}
    assert_close(federate(method, 1).weights, expected)


@pytest.mark.parametrize(
    ("overrides", "share"),
    [
        (("federation.weighting=uniform",), 1.0),
        (("federation.weighting=uniform", "federation.server_lr=0.3"), 0.3),
        (("federation.weighting=uniform", "federation.server_lr=2", "federation.server_lr_schedule='1/t'"), 2 / 2),
        (("federation.weighting=uniform", "federation.server_lr_schedule='1/sqrt(t)'"), 2**-0.5),
    ],
)
def test_the_server_takes_its_share_of_the_mean_update(
    overrides: tuple[str, ...], share: float, method_of: Callable, splits_of: Callable, federate: Callable
) -> None:
    """In the second task, so that the schedules have begun to fall."""
    splits = splits_of(train=UNEVEN, same_classes=True)
    method = method_of(FedAvg, *FULL_BATCH, "federation.rounds=1", *overrides, splits=splits)
    start = federate(method, 1).weights
    models = [
        trained(start, *images(splits, 1, client), lambda p: torch.optim.SGD(p, lr=0.1), steps=1) for client in range(4)
    ]
    mean = average(models, [1 / 4] * 4)
    expected = {name: w + share * (mean[name] - w) for name, w in start.items()}
    assert_close(federate(method, 2).weights, expected)


class Recorder(FedAvg):
    """Notes each sample on which it trains, by the sum of its pixels."""

    seen: list[float]

    def compute_loss(self, training: Any, batch: Batch) -> Tensor:
        self.seen += batch.inputs.double().flatten(1).sum(1).tolist()
        return super().compute_loss(training, batch)


def test_batches_hold_every_sample_once_an_epoch(method_of: Callable, splits_of: Callable, client_of: Callable) -> None:
    """Each epoch in an order of its own, which is another in the next round and for another client."""
    method = method_of(Recorder, "federation.local_epochs=2", splits=splits_of(train=UNEVEN))
    payload = method.make_payload(method.start_task(method.create_server(), 0))
    orders = []
    for index, number in ((3, 0), (3, 0), (3, 1), (2, 0)):
        method.seen = []
        method.train(client_of(method, index, 0, number), payload)
        orders.append(method.seen)
    for order, n in zip(orders, (15, 15, 15, 11), strict=True):
        assert len(order) == 2 * n
        assert len(set(order[:n])) == len(set(order[n:])) == n
        assert order[:n] != order[n:]
    assert orders[0] == orders[1] != orders[2]


def test_a_client_changes_neither_the_server_nor_what_it_was_sent(method_of: Callable, client_of: Callable) -> None:
    method = method_of(FedAvg, "optimizer.momentum=0.9")
    server = method.start_task(method.create_server(), 0)
    before = trees.digest(server.to_tree())
    first = method.train(client_of(method, 1), method.make_payload(server)).tensors["update"]
    again = method.train(client_of(method, 1), method.make_payload(server)).tensors["update"]
    assert trees.digest(server.to_tree()) == before
    assert trees.digest(first) == trees.digest(again)


HARD = ("optimizer.momentum=0.9", "optimizer.weight_decay=0.1", "federation.local_epochs=2")


@pytest.mark.parametrize(
    "overrides", [HARD, ("optimizer.kind=adam", "optimizer.weight_decay=0.1")], ids=["momentum", "adam"]
)
def test_other_tasks_heads_do_not_move(
    overrides: tuple[str, ...], method_of: Callable, splits_of: Callable, federate: Callable
) -> None:
    method = method_of(FedAvg, *overrides, splits=splits_of(tasks=3, head="per-task"))
    servers = [federate(method, tasks) for tasks in (1, 2, 3)]
    assert set(servers[2].weights) - set(servers[0].weights) == {
        f"heads.{t}.{p}" for t in (1, 2) for p in ("weight", "bias")
    }
    for before, after in pairwise(servers):
        heads = {name for name in changed(before.weights, after.weights) if name.startswith("heads.")}
        assert heads == {f"heads.{after.task}.weight", f"heads.{after.task}.bias"}


@pytest.mark.parametrize(
    ("kind", "blocks"), [("mlp", ("fc1", "fc2")), ("resnet18", ("conv1", "bn1", "layer1"))], ids=["mlp", "resnet18"]
)
def test_frozen_blocks_move_in_the_first_task_only(
    kind: str, blocks: tuple[str, ...], method_of: Callable, federate: Callable
) -> None:
    method = method_of(FedAvg, *HARD, f"model.backbone={kind}", f"model.freeze={list(blocks)}")
    start, first, second = (federate(method, tasks).weights for tasks in (0, 1, 2))
    learnt = {name for name in first if "num_batches" not in name}
    frozen = {name for name in learnt if name.split(".")[1] in blocks}
    assert changed(start, first) == learnt
    assert changed(first, second) == learnt - frozen
    assert frozen


@pytest.mark.parametrize(
    ("over", "task", "rows"),
    [("seen", 1, [True] * 4), ("task", 1, [False, False, True, True]), ("task", 0, [True, True])],
)
def test_the_loss_is_over_all_seen_classes_or_over_the_tasks_own(
    over: str, task: int, rows: list[bool], method_of: Callable, client_of: Callable
) -> None:
    """Told by the rows of the head that have a gradient."""
    method = method_of(FedAvg, f"model.loss_over={over}")
    server = method.create_server()
    for earlier in range(task + 1):
        server = method.start_task(server, earlier)
    network = method.networks.load(server.spec, server.weights)
    client = client_of(method, 0, task)
    network.zero_grad()
    method.compute_loss(
        LocalTraining(method, client, network, server.weights), next(next(client.yield_epochs()))
    ).backward()
    assert (network.heads[0].weight.grad.abs().sum(1) > 0).tolist() == rows


def test_the_loss_over_a_task_is_cross_entropy_of_its_own_columns(method_of: Callable, splits_of: Callable) -> None:
    method = method_of(FedAvg, "model.loss_over=task")
    server = method.start_task(method.start_task(method.create_server(), 0), 1)
    network = method.networks.load(server.spec, server.weights).eval()
    x, y = images(splits_of(), 1, 0)
    expected = F.cross_entropy(logits(server.weights, x)[:, 2:], y - 2)
    torch.testing.assert_close(method.compute_cross_entropy(network, network.backbone(x), y, 1), expected)


def test_other_tasks_heads_do_not_travel_upwards(
    method_of: Callable, splits_of: Callable, client_of: Callable, federate: Callable
) -> None:
    method = method_of(splits=splits_of(tasks=3, head="per-task"))
    server = method.start_task(federate(method, 1), 1)
    reply, _ = method.exchanges[TRAIN].reply(client_of(method, 0, 1), method.make_payload(server))
    heads = {name for name in reply.parts["update"].tensors if name.startswith("heads.")}
    assert heads == {"heads.1.weight", "heads.1.bias"}


def test_a_grown_head_starts_from_the_old_one(method_of: Callable, federate: Callable) -> None:
    method = method_of()
    first: Server = federate(method, 1)
    grown = method.start_task(first, 1)
    assert torch.equal(grown.weights["heads.0.weight"][:2], first.weights["heads.0.weight"])
    assert grown.weights["heads.0.weight"].shape == (4, 12)
    assert changed(first.weights, grown.weights) == {"heads.0.weight", "heads.0.bias"}


def test_the_model_learns(federate: Callable, method_of: Callable, splits_of: Callable) -> None:
    splits = splits_of(train=32, tasks=1)
    method = method_of(FedAvg, "federation.rounds=8", splits=splits)
    weights = federate(method).weights
    x, y = images(splits, 0, 2)
    assert (logits(weights, x).argmax(1) == y).float().mean() > 0.95
