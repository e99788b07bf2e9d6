"""FOT: what FedProject lets through, and of which layers."""

from collections.abc import Callable
from copy import copy
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import scipy
import torch
from torch import Tensor

from fclmodels.errors import UserError
from fclmodels.federation.engine.replies import Replies
from fclmodels.federation.exchange import TRAIN
from fclmodels.federation.server import Server
from fclmodels.methods.fedavg import FedAvg
from fclmodels.methods.fot import Fot
from fclmodels.storage import trees

HARD = ("optimizer.momentum=0.9", "optimizer.weight_decay=0.1", "federation.local_epochs=2")
ADAM = ("optimizer.kind=adam", "optimizer.lr=0.01", "optimizer.weight_decay=0.1")
FC1 = "backbone.fc1.weight"
FIXED: dict[str, Any] = {"threshold_by": "fixed", "budget": 1.0}
LAYERS = ("backbone.fc1", "backbone.fc2", "backbone.fc3")


def exact(tensor: Tensor) -> np.ndarray:
    return tensor.detach().double().numpy()


def moved_within(layer: Any, before: Server, after: Server) -> float:
    """How far W x has moved for x in the span of the bases that were known before, over |W| |x|."""
    basis = exact(before.knowledge["bases"][layer.name])
    x = basis @ np.random.default_rng(0).normal(size=(basis.shape[1], 20))
    W, moved = (exact(layer.to_matrix(server.weights[layer.weight])) for server in (before, after))
    return float(np.linalg.norm((moved - W) @ x) / (np.linalg.norm(W) * np.linalg.norm(x)))


def trained(method: Any, server: Server, client_of: Callable, spool: Path) -> Replies:
    """The replies of all clients to one round."""
    replies = Replies(method.list_participants(server.task), spool)
    for client in replies.clients:
        reply, _ = method.exchanges[TRAIN].reply(client_of(method, client, server.task), method.make_payload(server))
        replies.add(client, reply)
    return replies


# FedProject


@pytest.mark.parametrize("optimiser", [HARD, ADAM], ids=["momentum", "adam"])
def test_the_first_task_is_fedavg_to_the_bit(
    optimiser: tuple[str, ...], method_of: Callable, federate: Callable
) -> None:
    settings = (*optimiser, "model.dropout=[0.2, 0.5]", "federation.clients_per_round=3", "federation.server_lr=0.7")
    ours, plain = method_of(Fot, *settings, **FIXED), method_of(FedAvg, *settings)
    assert trees.digest(federate(ours, 1).weights) == trees.digest(federate(plain, 1).weights)
    assert trees.digest(federate(ours, 2).weights) != trees.digest(federate(plain, 2).weights)


@pytest.mark.parametrize("server_lr", [1.0, 0.3])
def test_of_the_mean_update_only_what_is_orthogonal_to_the_span_is_applied(
    server_lr: float, method_of: Callable, federate: Callable, client_of: Callable, tmp_path: Path
) -> None:
    """Eq. 5 to 7, by SciPy's basis of the complement. Biases and head are plain FedAvg to the bit."""
    settings = (*HARD, f"federation.server_lr={server_lr}")
    method = method_of(Fot, *settings, **FIXED)
    server = method.start_task(federate(method, 1), 1)
    replies = trained(method, server, client_of, tmp_path)
    plain = method_of(FedAvg, *settings).aggregate(server, replies).weights
    ours = method.aggregate(server, replies).weights
    protected = {f"{layer}.weight": exact(server.knowledge["bases"][layer]) for layer in LAYERS}
    for name, before in server.weights.items():
        if name not in protected:
            assert torch.equal(ours[name], plain[name]), name
            continue
        basis = protected[name]
        N = scipy.linalg.null_space(basis.T)
        change, expected = exact(ours[name] - before), exact(plain[name] - before) @ N @ N.T
        size = np.linalg.norm(exact(plain[name] - before))
        assert 0 < basis.shape[1] < basis.shape[0]
        assert np.linalg.norm(change - expected) < 1e-5 * size
        assert np.linalg.norm(change @ basis) < 1e-5 * size < 1e-3 * np.linalg.norm(exact(plain[name] - before) @ basis)


@pytest.mark.parametrize(
    ("optimiser", "backbone", "shape"),
    [(HARD, "mlp", (1, 6, 6)), (ADAM, "mlp", (1, 6, 6)), (HARD, "cnn", (1, 8, 8))],
    ids=["momentum", "adam", "cnn"],
)
def test_over_whole_tasks_what_layers_make_of_the_span_does_not_move(
    optimiser: tuple[str, ...],
    backbone: str,
    shape: tuple[int, ...],
    method_of: Callable,
    splits_of: Callable,
    federate: Callable,
) -> None:
    splits, overrides = splits_of(tasks=3, shape=shape), (*optimiser, f"model.backbone={backbone}")
    method, plain = method_of(Fot, *overrides, splits=splits, **FIXED), method_of(FedAvg, *overrides, splits=splits)
    first, second, third = (federate(method, tasks) for tasks in (1, 2, 3))
    fedavg = federate(plain, 2)
    layers = method.subspace.list_layers(method.networks.load(first.spec, first.weights))
    for layer in layers.values():
        assert moved_within(layer, first, second) < 1e-6
        assert moved_within(layer, first, third) < 1e-6
        assert moved_within(layer, second, third) < 1e-6
        assert moved_within(layer, first, fedavg) > 1e-3


def test_in_double_precision_nothing_leaks_over_many_rounds(method_of: Callable) -> None:
    """By the basis itself, and by its complement where that is narrower."""
    method, random = method_of(Fot), torch.Generator().manual_seed(0)
    server = method.create_server()

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=random, dtype=torch.float64)

    bases = {
        layer: torch.linalg.qr(normal(d, r)).Q for layer, d, r in zip(LAYERS, (36, 12, 12), (30, 3, 8), strict=True)
    }
    server = method.start_task(replace(server, knowledge={**server.knowledge, "bases": bases}), 1)
    assert server.knowledge["complements"].keys() == {"backbone.fc1", "backbone.fc3"}
    start = {f"{layer}.weight": server.weights[f"{layer}.weight"].double() for layer in LAYERS}
    end = dict(start)
    for _ in range(50):
        steps = method.admit_changes(server, {name: 0.1 * normal(*weight.shape) for name, weight in start.items()})
        end = {name: weight + steps[name] for name, weight in end.items()}
    for layer, basis in bases.items():
        name = f"{layer}.weight"
        assert (
            ((end[name] - start[name]) @ basis).norm() < 1e-10 * start[name].norm() < (end[name] - start[name]).norm()
        )


# Where it applies.


def test_a_first_layer_frozen_after_the_first_task_takes_no_part(
    method_of: Callable, federate: Callable, client_of: Callable
) -> None:
    """Table 6, FRZ: no sketch of the images themselves."""
    method = method_of(Fot, *HARD, "model.freeze=[fc1]")
    start, first, second = (federate(method, tasks) for tasks in (0, 1, 2))
    assert set(second.knowledge["bases"]) == {"backbone.fc2", "backbone.fc3"}
    moved = [not torch.equal(a.weights[FC1], b.weights[FC1]) for a, b in ((start, first), (first, second))]
    assert moved == [True, False]
    reply, _ = method.gpse.reply(client_of(method, 0), method.make_gpse_payload(first))
    assert set(reply.parts["sketch"].tensors) == set(LAYERS[1:])


@pytest.mark.parametrize(
    ("protect", "rest"), [(("fc1", "fc2"), "fc3"), (("fc2", "fc3"), "fc1")], ids=["first half", "last half"]
)
@pytest.mark.parametrize("frozen", [True, False], ids=["frozen", "fine-tuned"])
def test_half_of_the_layers_with_the_rest_frozen_or_trained(
    frozen: bool, protect: tuple[str, ...], rest: str, method_of: Callable, federate: Callable
) -> None:
    """Table 14."""
    method = method_of(Fot, *HARD, *([f"model.freeze=[{rest}]"] if frozen else []), protect=protect, **FIXED)
    first, second = federate(method, 1), federate(method, 2)
    assert set(second.knowledge["bases"]) == {f"backbone.{block}" for block in protect}
    assert torch.equal(first.weights[f"backbone.{rest}.weight"], second.weights[f"backbone.{rest}.weight"]) == frozen
    for layer in method.subspace.list_layers(method.networks.load(first.spec, first.weights)).values():
        assert moved_within(layer, first, second) < 1e-6
        assert not torch.equal(first.weights[layer.weight], second.weights[layer.weight])


def test_without_a_layer_to_protect_it_is_fedavg(method_of: Callable, federate: Callable) -> None:
    ours = federate(method_of(Fot, "model.freeze=[fc1, fc2, fc3]"))
    plain = federate(method_of(FedAvg, "model.freeze=[fc1, fc2, fc3]"))
    assert ours.knowledge["bases"] == {}
    assert trees.digest(ours.weights) == trees.digest(plain.weights)


@pytest.mark.parametrize(
    ("protect", "head", "refused"), [("fc1", "free", True), ("fc1", "protected", False), ("fc2", "free", False)]
)
def test_blocks_of_which_none_is_left_to_protect_are_refused(
    protect: str, head: str, refused: bool, method_of: Callable
) -> None:
    method = method_of(Fot, "model.freeze=[fc1]", protect=(protect,), head=head)
    if refused:
        with pytest.raises(UserError, match=r"^methods\.fot\.protect: none of these blocks .*model\.freeze.*$"):
            method.create_server()
    else:
        assert method.create_server().knowledge["bases"]


def test_a_block_that_the_backbone_does_not_have_is_refused(method_of: Callable) -> None:
    with pytest.raises(UserError) as error:
        method_of(Fot, protect=("fc1", "fc4")).create_server()
    assert str(error.value).startswith("methods.fot.protect: fc4 is not a block")
    assert "fc3" in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("stream", "head", "protected"),
    [
        ({"same_classes": True, "permuted": True}, "auto", True),
        ({"same_classes": True, "permuted": True}, "free", False),
        ({}, "auto", False),
        ({}, "protected", True),
        ({"head": "per-task"}, "auto", False),
    ],
)
def test_the_head_is_protected_where_tasks_share_its_rows(
    stream: dict[str, Any], head: str, protected: bool, method_of: Callable, splits_of: Callable, federate: Callable
) -> None:
    """Or as it is set. A head of one task's own is not trained in others."""
    method = method_of(Fot, *HARD, splits=splits_of(**stream), head=head, **FIXED)
    first, second = federate(method, 1), federate(method, 2)
    assert ("heads.0" in second.knowledge["bases"]) == protected
    basis = first.knowledge["bases"].get("heads.0", torch.eye(12)[:, :3])
    change = second.weights["heads.0.weight"][:2] - first.weights["heads.0.weight"]
    stays = protected or stream.get("head") == "per-task"
    assert (float((change @ basis).norm()) < 1e-5) == stays


def test_heads_of_one_task_each_have_nothing_to_protect(method_of: Callable, splits_of: Callable) -> None:
    method = method_of(Fot, splits=splits_of(head="per-task"), head="protected")
    with pytest.raises(UserError, match=r"methods\.fot\.head: protected needs a head that tasks share"):
        method.create_server()


@pytest.mark.parametrize(("lacking", "protected"), [(1, True), (0, False)])
def test_a_domain_may_lack_a_class_that_an_earlier_one_has(
    lacking: int, protected: bool, method_of: Callable, splits_of: Callable
) -> None:
    """Where a later one brings a class, its row is new and has to learn."""
    splits = copy(splits_of(same_classes=True))
    tasks = list(splits.tasks)
    tasks[lacking] = replace(tasks[lacking], classes=(0,))
    splits.tasks = tuple(tasks)
    assert ("heads.0" in method_of(Fot, splits=splits).create_server().knowledge["bases"]) == protected
