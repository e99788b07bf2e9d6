"""STAMP on a client: single steps and rounds against gradients and displacements that are worked out here."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pytest
import torch
from numpy.testing import assert_allclose
from torch import Tensor
from torch.nn.functional import cross_entropy

from fclmodels.data.batches import Batch
from fclmodels.data.splits.split_reader import Rows, Splits
from fclmodels.errors import UserError
from fclmodels.federation.client import Client
from fclmodels.federation.engine.listener import Listener
from fclmodels.federation.exchange import Memory
from fclmodels.federation.server import Server
from fclmodels.federation.training.local_training import LocalTraining
from fclmodels.methods.fedavg import FedAvg
from fclmodels.methods.fedomg import FedOMG
from fclmodels.methods.parts import vector_table
from fclmodels.methods.parts.replay_memory import pack_samples
from fclmodels.methods.stamp import Stamp
from fclmodels.numerics.alignment import alignment, solve_exactly
from fclmodels.numerics.protonet import prototype_loss
from fclmodels.storage import trees

# One step a round, and coresets that are drawn whole: what a draw would choose is no matter.
ONE_STEP = ("federation.batch_size=64", "optimizer.lr=0.1")
# Client 0 has a single sample a task, client 1 misses a task, client 2 joins at the third.
UNEVEN = {(0, 0): 1, (1, 0): 1, (2, 0): 1, (0, 1): 9, (2, 1): 5, (2, 2): 7, (3, 2): 4, (1, 3): 6, (0, 3): 3, (3, 0): 1}
HARD = (
    "methods.stamp.budget=2",
    "augment.flip=true",
    "optimizer.momentum=0.9",
    "federation.clients_per_round=2",
    "federation.checkpoint_seconds=0",
)
PLAIN = {"protonet": 0, "temporal": "none", "normalise": False}
STAMP = "methods.stamp"
Named = dict[str, np.ndarray]


def third_task(method: Any) -> Server:
    server = method.create_server()
    for task in range(3):
        server = method.start_task(server, task)
    return server


def coreset_of(method: Any, sizes: tuple[int, ...] = (4, 3)) -> tuple[Rows, Memory]:
    """So many samples of each earlier task."""
    rows = Rows.concatenate([method.select_rows(task, 0).take(np.arange(size)) for task, size in enumerate(sizes)])
    return rows, {**pack_samples(method.run.batches.read_raw(rows)), "seen": {}}


def prototypes_of(method: Any, network: Any, rows: Rows) -> tuple[Tensor, Tensor]:
    """The mean features of the stored samples of each class."""
    (batch,) = method.run.batches.iterate_ordered(rows, 64)
    with torch.no_grad():
        features = network.backbone(batch.inputs)
    labels = batch.labels.unique()
    return torch.stack([features[batch.labels == label].mean(0) for label in labels]), labels


def update_of(method: Any, client: Client) -> Named:
    update = method.train(client, method.make_payload(third_task(method))).tensors["update"]
    return {name: tensor.double().numpy() / client.weight for name, tensor in update.items()}


def ga(vectors: list[Named], names: set[str]) -> Named:
    """Of the vectors at their mean norm, kappa 0.5, over 1.5; a name that a vector lacks counts as zeros."""
    shapes = {name: v[name].shape for v in vectors for name in sorted(v) if name in names}
    V = np.stack([np.concatenate([v.get(n, np.zeros(s)).ravel() for n, s in shapes.items()]) for v in vectors])
    norms = np.linalg.norm(V, axis=1, keepdims=True)
    V = torch.from_numpy(V * norms.mean() / np.where(norms > 0, norms, 1))
    found = (V.T @ alignment(V @ V.T, solve_exactly(V @ V.T, 0.5), 0.5)).numpy() / 1.5
    pieces = np.split(found, np.cumsum([int(np.prod(s)) for s in shapes.values()])[:-1])
    return {name: piece.reshape(s) for (name, s), piece in zip(shapes.items(), pieces, strict=True)}


def gradient_of(loss: Tensor, network: torch.nn.Module) -> Named:
    names, parameters = zip(*network.named_parameters(), strict=True)
    found = torch.autograd.grad(loss, parameters, allow_unused=True)
    return {name: g.double().numpy() for name, g in zip(names, found, strict=True) if g is not None}


def loss_of(network: Any, batch: Batch, task: int, protonet: float, prototypes: tuple[Tensor, Tensor]) -> Tensor:
    """Cross entropy over all classes, or in the task's own head, and eq. 7."""
    features = network.backbone(batch.inputs)
    if network.spec.head == "growing":
        loss = cross_entropy(network.compute_logits(features), batch.labels)
    else:
        loss = cross_entropy(network.compute_logits(features, task), batch.labels - 2 * task)
    return loss + protonet * prototype_loss(features, batch.labels, *prototypes)


def gradients_of_tasks(
    method: Any, server: Server, client: Client, rows: Rows, protonet: float, network: Any = None, by: str = "coreset"
) -> list[Named]:
    """Of the third task, and of the samples or prototypes of the first and second."""
    start = method.networks.load(server.spec, server.weights) if network is None else network
    prototypes = prototypes_of(method, start, rows)
    gradients = []
    for task in (2, 0, 1):
        own = client.rows if task == 2 else rows.take(np.flatnonzero(rows.tasks == task))
        (batch,) = method.run.batches.iterate_ordered(own, 64)
        if by == "coreset" or task == 2:
            gradients.append(gradient_of(loss_of(start, batch, task, protonet, prototypes), start))
            continue
        features = start.backbone(batch.inputs)
        means = torch.stack([features[batch.labels == label].mean(0) for label in batch.labels.unique()])
        growing = start.spec.head == "growing"
        logits = start.compute_logits(means, None if growing else task)
        gradients.append(gradient_of(cross_entropy(logits, torch.tensor([0, 1]) + 2 * task * growing), start))
    return gradients


@pytest.mark.parametrize("head", ["growing", "per-task"])
@pytest.mark.parametrize(("protonet", "by"), [(0.0, "coreset"), (0.5, "coreset"), (0.2, "prototypes")])
def test_a_step_goes_down_the_alignment_of_tasks_gradients(
    head: str, protonet: float, by: str, method_of: Callable, client_of: Callable, splits_of: Callable[..., Splits]
) -> None:
    """Of the batch's and of each past task's coreset, or of the coreset's mean features (eq. 3), through the encoder.

    A head that past tasks do not reach keeps its own gradient.
    """
    splits = splits_of(tasks=3, head=head)
    method = method_of(Stamp, *ONE_STEP, splits=splits, temporal="step", protonet=protonet, tasks_from=by)
    server = third_task(method)
    rows, memory = coreset_of(method)
    client = client_of(method, 0, 2, memory=memory)
    update = update_of(method, client)
    gradients = gradients_of_tasks(method, server, client, rows, protonet, by=by)
    past = gradients[1].keys() | gradients[2].keys()
    expected = gradients[0] | ga(gradients, set(past))
    assert update.keys() == expected.keys() == server.weights.keys()
    for name, gradient in expected.items():
        assert_allclose(update[name], -0.1 * gradient, atol=2e-6)
    assert (set(expected) - past) == ({"heads.2.weight", "heads.2.bias"} if head == "per-task" else set())
    bent = [name for name, g in gradients[0].items() if name in past and np.abs(expected[name] - g).max() > 1e-3]
    assert any(name.startswith("backbone.") for name in bent)


def written_out(
    method: Any, server: Server, client: Client, rows: Rows, by: str, lr: float, steps: int
) -> tuple[Named, Named]:
    """Algorithm 1, lines 9 to 21: the update of a client, and of its local steps alone."""
    network = method.networks.load(server.spec, server.weights)
    (batch,) = method.run.batches.iterate_ordered(client.rows, 64)
    names = [name for name, _ in network.named_parameters()]
    total = {name: np.zeros(server.weights[name].shape) for name in names}
    for _ in range(steps):
        gradient = gradient_of(loss_of(network, batch, 2, 0, prototypes_of(method, network, rows)), network)
        with torch.no_grad():
            for name, parameter in network.named_parameters():
                if name in gradient:
                    total[name] += gradient[name]
                    parameter -= lr * torch.from_numpy(gradient[name]).float()
    mean = {name: g / steps for name, g in total.items() if g.any()}
    past = gradients_of_tasks(method, server, client, rows, 0, network, by)[1:]
    aligned = {**mean, **ga([mean, *past], set(past[0]) | set(past[1]))}
    return ({name: -lr * steps * g for name, g in of.items()} for of in (aligned, mean))


@pytest.mark.parametrize("head", ["growing", "per-task"])
@pytest.mark.parametrize("by", ["coreset", "prototypes"])
@pytest.mark.parametrize("temporal_lr", [1.0, 0.5])
def test_a_round_by_default_is_algorithm_1(
    head: str, by: str, temporal_lr: float, method_of: Callable, client_of: Callable, splits_of: Callable[..., Splits]
) -> None:
    """Two steps of lr 0.1 and GA of their mean gradient with past tasks' gradients after them, eta_g = 0.2."""
    settings = {"protonet": 0, "tasks_from": by, "temporal_lr": temporal_lr}
    splits = splits_of(tasks=3, head=head)
    method = method_of(Stamp, *ONE_STEP, "federation.local_epochs=2", splits=splits, **settings)
    assert method.settings.temporal == "algorithm1"
    server = third_task(method)
    rows, memory = coreset_of(method)
    client = client_of(method, 0, 2, memory=memory)
    update = update_of(method, client)
    expected, plain = written_out(method, server, client, rows, by, lr=0.1, steps=2)
    assert {name for name, moved in update.items() if moved.any()} == set(expected)
    for name, moved in expected.items():
        assert_allclose(update[name], temporal_lr * moved, atol=4e-6)
    assert any(np.abs(expected[name] - moved).max() > 1e-3 for name, moved in plain.items())


@pytest.mark.parametrize("temporal", ["algorithm1", "step", "round"])
def test_many_past_tasks_in_a_file_change_no_bit(
    temporal: str,
    method_of: Callable,
    client_of: Callable,
    splits_of: Callable[..., Splits],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As in memory, in each step anew; nothing is left in the folder."""
    updates = []
    for room in (2**28, 0):
        monkeypatch.setattr(vector_table, "IN_MEMORY", room)
        method = method_of(Stamp, "federation.batch_size=4", splits=splits_of(tasks=3), temporal=temporal)
        _, memory = coreset_of(method)
        updates.append(update_of(method, client_of(method, 0, 2, memory=memory)))
    assert all(np.array_equal(updates[0][name], moved) for name, moved in updates[1].items())


@pytest.mark.parametrize("protonet", [0.0, 0.5])
def test_a_round_goes_along_the_alignment_of_tasks_displacements(
    protonet: float, method_of: Callable, client_of: Callable, splits_of: Callable[..., Splits]
) -> None:
    """The task's six steps of 3 or 2 samples, and six with each coreset of 3 or 2, by FedAvg from the same start."""
    overrides = ("federation.batch_size=3", "optimizer.momentum=0.9", "optimizer.weight_decay=0.01")
    splits = splits_of(tasks=3)
    method = method_of(
        Stamp, *overrides, "federation.local_epochs=2", splits=splits, temporal="round", protonet=protonet
    )
    rows, memory = coreset_of(method, (3, 2))
    client = client_of(method, 0, 2, memory=memory)
    update = update_of(method, client)

    server = third_task(method)
    prototypes = prototypes_of(method, method.networks.load(server.spec, server.weights), rows)

    class OneTask(FedAvg):
        def compute_loss(self, training: LocalTraining, batch: Batch) -> Tensor:
            return loss_of(training.network, batch, int(batch.tasks[0]), protonet, prototypes)

    displacements = []
    for task, epochs in ((2, 2), (0, 6), (1, 6)):
        alone = method_of(OneTask, *overrides, f"federation.local_epochs={epochs}", splits=splits)
        own = client.rows if task == 2 else rows.take(np.flatnonzero(rows.tasks == task))
        server = third_task(alone)
        network = alone.networks.load(server.spec, server.weights)
        training = LocalTraining(alone, Client(0, 2, 0, alone.run, own, {}), network, server.weights)
        training.run()
        displacements.append({name: tensor.double().numpy() for name, tensor in training.update().items()})
    expected = ga(displacements, set(update))
    assert update.keys() == expected.keys()
    for name, displacement in expected.items():
        assert_allclose(update[name], displacement, atol=1e-5)
    assert any(np.abs(expected[name] - d).max() > 0.01 for name, d in displacements[0].items())


@pytest.mark.parametrize("temporal", ["step", "round"])
def test_tasks_that_agree_change_nothing(
    temporal: str, method_of: Callable, client_of: Callable, splits_of: Callable[..., Splits]
) -> None:
    """Where the coreset holds the very samples of the task: GA of equal vectors, over 1 + kappa."""
    overrides, splits = ("federation.batch_size=8", "federation.local_epochs=4"), splits_of(tasks=3)
    updates = []
    for way in (temporal, "none"):
        method = method_of(Stamp, *overrides, splits=splits, temporal=way, protonet=0)
        _, memory = coreset_of(method)
        client = client_of(
            method, 0, 2, memory=memory | pack_samples(method.run.batches.read_raw(method.select_rows(2, 0)))
        )
        updates.append(update_of(method, client))
    for name, moved in updates[1].items():
        assert_allclose(updates[0][name], moved, atol=1e-5)


@pytest.mark.parametrize("temporal", ["algorithm1", "step", "round"])
@pytest.mark.parametrize("policy", ["average", "local", "frozen"])
def test_past_passes_leave_running_statistics_to_the_current_task(
    temporal: str, policy: str, method_of: Callable, client_of: Callable, splits_of: Callable[..., Splits]
) -> None:
    """In a single step these are to the bit those of training alone, whatever past tasks' passes have seen."""
    moved, settings = [], ("model.backbone=resnet18", "federation.batch_size=64", "federation.local_epochs=1")
    for way in (temporal, "none"):
        method = method_of(Stamp, *settings, splits=splits_of(tasks=3), temporal=way, batch_norm=policy)
        _, memory = coreset_of(method)
        answer = method.train(client_of(method, 0, 2, memory=memory), method.make_payload(third_task(method)))
        own = answer.tensors.get("statistics") or answer.memory.get("personal", {})
        moved.append((own, trees.digest(answer.tensors["update"])))
    statistics, digests = zip(*moved, strict=True)
    assert all(torch.equal(statistics[0][name], t) for name, t in statistics[1].items())
    assert any(t.any() for t in statistics[1].values()) == (policy != "frozen")
    assert digests[0] != digests[1]


@pytest.mark.parametrize("head", ["growing", "per-task"])
@pytest.mark.parametrize("temporal", ["algorithm1", "step", "round"])
def test_a_client_that_joins_trains_as_one_without_a_past(
    head: str, temporal: str, method_of: Callable, client_of: Callable, splits_of: Callable[..., Splits]
) -> None:
    """As in FedAvg to the bit, weight decay included; the old tasks' own heads stay where they are."""
    method = method_of(
        Stamp, "optimizer.weight_decay=0.1", splits=splits_of(tasks=3, head=head), temporal=temporal, protonet=0
    )
    plain = method_of(FedAvg, "optimizer.weight_decay=0.1", splits=splits_of(tasks=3, head=head))
    mine, fedavgs = (update_of(one, client_of(one, 2, 2)) for one in (method, plain))
    assert all(np.array_equal(mine[name], fedavgs[name]) for name in fedavgs)
    assert not any(mine[name].any() for name in mine.keys() - fedavgs.keys())


def digest_of(method: Any, federate: Callable, tasks: int | None = None) -> str:
    return trees.digest(federate(method, tasks).weights)


def test_without_coresets_it_is_the_alignment_on_the_server(method_of: Callable, federate: Callable) -> None:
    """To the bit: in the first task, and in all tasks where nothing is aligned on clients."""
    for settings, tasks in ((PLAIN | {"temporal": "algorithm1"}, 1), (PLAIN | {"temporal": "round"}, 1), (PLAIN, 2)):
        assert digest_of(method_of(Stamp, **settings), federate, tasks) == digest_of(method_of(FedOMG), federate, tasks)
    on_clients = method_of(Stamp, protonet=0, spatio=False)
    assert digest_of(on_clients, federate, 1) == digest_of(method_of(FedAvg), federate, 1)
    assert digest_of(method_of(Stamp), federate, 1) != digest_of(method_of(FedOMG), federate, 1)


def test_the_ablations_are_methods_of_their_own(
    method_of: Callable, federate: Callable, splits_of: Callable[..., Splits]
) -> None:
    """Table 2: (1) on the server, (2) between tasks, (3) coreset and prototypical network; and the other variants.

    In the third task: of two vectors of one length GA is the mean, with any solver and kappa.
    """
    without_3 = {"selection": "random", "protonet": 0}
    variants: dict[str, dict[str, Any]] = {
        "(1)": {"temporal": "none", **without_3},
        "(2)": {"spatio": False, **without_3},
        "(1)+(2)": without_3,
        "(1)+(3)": {"temporal": "none"},
        "(2)+(3)": {"spatio": False},
        "all": {},
        "by step": {"temporal": "step"},
        "by round": {"temporal": "round"},
        "prototypes": {"tasks_from": "prototypes"},
        "layerwise": {"layerwise": True},
        "descent": {"solver": "descent"},
        "descent on clients": {"clients": {"solver": "descent"}},
        "kappa on clients": {"clients": {"kappa": 0.2}},
        "no network": {"protonet": 0},
    }
    splits, few = splits_of(tasks=3, clients=3), "federation.rounds=1"
    digests = {
        name: digest_of(method_of(Stamp, few, splits=splits, budget=2, **own), federate)
        for name, own in variants.items()
    }
    assert len(set(digests.values())) == len(variants)


@pytest.mark.parametrize(
    "temporal", ["algorithm1", *(pytest.param(name, marks=pytest.mark.slow) for name in ("step", "round"))]
)
def test_old_tasks_are_forgotten_less(
    temporal: str, method_of: Callable, federate: Callable, splits_of: Callable[..., Splits]
) -> None:
    """Loss of earlier tasks' train rows at the end, as a share of FedAvg's; 2 samples a class and client."""
    losses = []
    for kind, settings in ((FedAvg, {}), (Stamp, {"budget": 2, "temporal": temporal})):
        method = method_of(kind, "federation.rounds=8", splits=splits_of(tasks=3, clients=2), **settings)
        server = federate(method)
        network = method.networks.load(server.spec, server.weights).eval()
        rows = Rows.concatenate([method.select_rows(task, client) for task in (0, 1) for client in range(2)])
        (batch,) = method.run.batches.iterate_ordered(rows, 1000)
        losses.append(cross_entropy(network(batch.inputs), batch.labels).item())
    assert losses[1] < 0.75 * losses[0]


# The engine


@pytest.mark.parametrize("chosen", [1, pytest.param(5, marks=pytest.mark.slow), 10])
def test_any_share_of_the_clients_takes_part_and_one_joins_at_the_fifth_task(
    chosen: int, experiment_of: Callable, splits_of: Callable, tmp_path: Path
) -> None:
    """Of ten clients, of which each keeps its samples, as soon as it has some, whoever takes part in the rounds."""
    train = {(task, client): 2 for task in range(5) for client in range(9)} | {(4, 9): 2}
    splits, few = splits_of(tasks=5, clients=10, train=train), ("federation.rounds=2", f"{STAMP}.budget=1")
    experiment_of(*few, f"federation.clients_per_round={chosen}", method="stamp", splits=splits).run(tmp_path / "run")
    ledger = pl.read_parquet(tmp_path / "run" / "ledger.parquet").filter(pl.col("direction") != "down")
    kept = ledger.filter(pl.col("direction") == "kept", pl.col("round") < 0)
    updates = ledger.filter(pl.col("part") == "update").group_by("task", "round").len()
    assert set(updates.filter(pl.col("task") == 4)["len"]) == {chosen}
    assert set(updates.filter(pl.col("task") < 4)["len"]) == {min(chosen, 9)}
    assert set(kept.select("task", "client").iter_rows()) == train.keys()


class Stop(Listener):
    """Ends a run in the middle of a round."""

    def on_client_done(self, task: int, round: int, done: int, of: int) -> None:
        if (task, round, done) == (2, 1, 1):
            raise KeyboardInterrupt


ROUND = ("model.backbone=resnet18", f"{STAMP}.temporal=round", f"{STAMP}.selection=random", f"{STAMP}.batch_norm=local")
VARIANTS = [
    pytest.param((f"{STAMP}.layerwise=true",), marks=pytest.mark.slow),
    pytest.param(ROUND, marks=pytest.mark.slow),
    pytest.param((f"{STAMP}.tasks_from=prototypes", f"{STAMP}.temporal=step"), marks=pytest.mark.slow),
]


@pytest.mark.parametrize("variant", VARIANTS)
def test_interruption_and_workers_change_no_bit(
    variant: tuple[str, ...], experiment_of: Callable, splits_of: Callable, remains: Callable, tmp_path: Path
) -> None:
    """With clients that miss tasks, that join late and that have a single sample; two of them a round."""
    hard = (*HARD, *variant)
    splits, home = splits_of(tasks=4, train=UNEVEN), tmp_path / "home"
    with (
        pytest.raises(KeyboardInterrupt),
        experiment_of(*hard, method="stamp", splits=splits, home=home, listener=Stop()) as experiment,
    ):
        experiment.run(tmp_path / "again")
    workers = ("federation.executor=processes", "federation.workers=2")
    experiment_of(*hard, *workers, method="stamp", splits=splits, home=home).run(tmp_path / "again")
    experiment_of(*hard, method="stamp", splits=splits).run(tmp_path / "plain")
    assert remains(tmp_path / "again") == remains(tmp_path / "plain")


@pytest.mark.parametrize(
    ("settings", "refused", "accepted"),
    [
        (("solver_rounds=7",), "solver_rounds needs solver: descent", "solver=descent"),
        (("temporal=round", "tasks_from=prototypes"), "tasks_from: prototypes gives gradients", "temporal=step"),
        (("temporal=none", "tasks_from=prototypes"), "tasks_from: prototypes gives gradients", "temporal=algorithm1"),
        (("temporal=step", "temporal_lr=2"), "temporal_lr needs temporal: algorithm1", "temporal=algorithm1"),
        (("mix=0.3",), "mix needs returning: restyle", "returning=restyle"),
        (("temporal=none", "spatio=false"), "spatio: false and temporal: none leave nothing to align", "spatio=true"),
    ],
)
def test_settings_that_would_do_nothing_are_refused(
    settings: tuple[str, ...], refused: str, accepted: str, params_of: Callable
) -> None:
    own = [f"methods.stamp.{setting}" for setting in settings]
    with pytest.raises(UserError, match=rf"methods\.stamp: {refused}"):
        params_of(*own)
    params_of(*own, f"methods.stamp.{accepted}")
