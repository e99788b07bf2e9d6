"""GPSE: what clients sketch, and what the server finds in the sum, wherever it runs."""

from collections.abc import Callable
from dataclasses import replace
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pytest
import scipy
import torch
from torch import Tensor

from fclmodels.data.splits.split_reader import Splits
from fclmodels.errors import UserError
from fclmodels.experiment.experiment import Experiment
from fclmodels.federation.client import Client
from fclmodels.federation.engine.listener import Listener
from fclmodels.federation.engine.rounds import sample_clients
from fclmodels.federation.messages import Part, Payload
from fclmodels.federation.server import Server
from fclmodels.methods.fot import RANK_RULES, Fot
from fclmodels.numerics.subspace import principal
from fclmodels.storage import trees

HARD = ("optimizer.momentum=0.9", "optimizer.weight_decay=0.1", "federation.local_epochs=2")
FIXED: dict[str, Any] = {"threshold_by": "fixed", "budget": 1.0}
LAYERS = ("backbone.fc1", "backbone.fc2", "backbone.fc3")
FEW = {(0, 0): 1, (0, 1): 9, (0, 2): 4, (1, 1): 3, (1, 2): 8, (1, 3): 1, (2, 0): 5, (2, 3): 6}  # tasks, clients


def exact(tensor: Tensor) -> np.ndarray:
    return tensor.detach().double().numpy()


def inputs(weights: dict[str, Tensor], splits: Splits, task: int, clients: tuple[int, ...]) -> dict[str, np.ndarray]:
    """What each layer of the MLP sees of these clients' images: X [d, n] in double precision."""
    rows = np.concatenate([splits.select_rows(task, "train", client).samples for client in clients])
    x = ((exact(splits.images[torch.from_numpy(rows)]) / 255 - 0.5) / 0.25).reshape(len(rows), -1).T
    seen = {}
    for layer in LAYERS:
        seen[layer] = x
        x = np.maximum(exact(weights[f"{layer}.weight"]) @ x + exact(weights[f"{layer}.bias"])[:, None], 0)
    return seen


def covered(basis: Tensor, X: np.ndarray) -> float:
    """The share of the energy of X that lies in the span."""
    return float(((exact(basis).T @ X) ** 2).sum() / (X**2).sum())


def test_the_sum_of_sketches_spans_what_all_clients_inputs_span(
    method_of: Callable, splits_of: Callable, federate: Callable
) -> None:
    """Of clients with different classes, through the final global model."""
    splits = splits_of(train=3)
    method = method_of(Fot, splits=splits, threshold=1.0, **FIXED)
    server = federate(method, 1)
    together, alone = (inputs(server.weights, splits, 0, clients) for clients in ((0, 1, 2, 3), (0,)))
    for layer, X in together.items():
        basis = server.knowledge["bases"][layer]
        assert 1 - covered(basis, X) < 1e-6
        assert basis.shape[1] <= np.linalg.matrix_rank(X)
        assert basis.shape[1] > np.linalg.matrix_rank(alone[layer])
    assert server.knowledge["bases"]["backbone.fc1"].shape[1] == 12


@pytest.mark.parametrize("rule", ["total-energy", "release"])
def test_even_a_threshold_of_1_does_not_take_rounding_for_a_direction(
    rule: str, method_of: Callable, splits_of: Callable, client_of: Callable
) -> None:
    """A basis that covers all that is seen leaves a residual of rounding alone."""
    splits = splits_of(train=3)
    method = method_of(Fot, splits=splits, threshold=1.0, rank_rule=rule)
    server = method.start_task(method.create_server(), 0)
    seen = inputs(server.weights, splits, 0, (0, 1, 2, 3))
    covering = {layer: torch.from_numpy(scipy.linalg.orth(X)).float() for layer, X in seen.items()}
    payload = {**method.make_gpse_payload(server), "bases": Part("basis", covering)}
    answers = [method.answer_gpse(client_of(method, k), payload).tensors for k in range(4)]
    sums = {p: {layer: sum(of[p][layer] for of in answers) for layer in LAYERS} for p in ("sketch", "energy")}
    for layer, sketch in sums["sketch"].items():
        assert float(sketch.abs().max()) > 0
        sigma, share = method.measure(layer, principal(sketch)[1], sums)
        assert RANK_RULES[rule](sigma, share, 1.0) == 0


@pytest.mark.parametrize("threshold", [0.8, 0.97])
def test_a_basis_covers_the_threshold_and_with_one_vector_fewer_would_not(
    threshold: float, method_of: Callable, splits_of: Callable, federate: Callable
) -> None:
    """In both tasks, measured on the clients' real inputs; sketches are so wide that sampling hardly matters.

    The first layer has fewer columns than it has inputs twice, the others have more: both ways to sketch.
    """
    splits, added = splits_of(train=30), 0
    method = method_of(Fot, splits=splits, threshold=threshold, threshold_step=0.0, sketch_linear=300.0, **FIXED)
    for task in (0, 1):
        server = federate(method, task + 1)
        for layer, X in inputs(server.weights, splits, task, (0, 1, 2, 3)).items():
            basis, ranks = server.knowledge["bases"][layer], [0, *server.knowledge["ranks"][layer]]
            assert basis.shape[1] == ranks[-1]
            assert covered(basis, X) > threshold - 0.01
            if ranks[-1] > ranks[-2]:
                added += 1
                assert covered(basis[:, :-1], X) < threshold + 0.01
    assert added == 6


@pytest.mark.parametrize(("rule", "added"), [("total-energy", 0), ("release", 1)])
def test_what_is_covered_already_adds_nothing_but_in_the_release(
    rule: str, added: int, method_of: Callable, splits_of: Callable, federate: Callable
) -> None:
    """The second task shows the first one's images a little brighter."""
    splits = splits_of(same_classes=True)
    knowledge = federate(
        method_of(Fot, splits=splits, rank_rule=rule, threshold=0.4, threshold_step=0.0, head="free", **FIXED)
    ).knowledge
    assert [ranks[1] - ranks[0] for ranks in knowledge["ranks"].values()] == [added] * 3
    assert min(ranks[0] for ranks in knowledge["ranks"].values()) > 0


def test_bases_only_grow_and_stay_orthonormal(method_of: Callable, splits_of: Callable, federate: Callable) -> None:
    method = method_of(Fot, splits=splits_of(tasks=5))
    second, last = (federate(method, tasks).knowledge for tasks in (2, 5))
    for layer, basis in last["bases"].items():
        earlier = second["bases"][layer]
        assert torch.equal(basis[:, : earlier.shape[1]], earlier)
        assert np.linalg.norm(exact(basis.T @ basis) - np.eye(basis.shape[1]), 2) < 1e-5
        assert last["ranks"][layer] == sorted(last["ranks"][layer])
        assert len(last["ranks"][layer]) == 5
        assert last["ranks"][layer][:2] == second["ranks"][layer]


def test_the_threshold_rises_with_each_task(method_of: Callable, splits_of: Callable, federate: Callable) -> None:
    """As in Table 9, and never above 1."""
    cifar = method_of(Fot, threshold=0.87, threshold_step=0.001, **FIXED)
    table = [0.87, 0.871, 0.872, 0.873, 0.874, 0.875, 0.876, 0.877, 0.878, 0.879]
    assert [cifar.subspace.find_threshold(task) for task in range(10)] == pytest.approx(table)
    steep = method_of(Fot, threshold=0.87, threshold_step=0.1, **FIXED)
    assert [steep.subspace.find_threshold(task) for task in (1, 2, 3)] == pytest.approx([0.97, 1, 1])
    flat = method_of(Fot, threshold=0.87, threshold_step=0.0, **FIXED)
    one, two = (federate(method).knowledge["ranks"]["backbone.fc1"] for method in (flat, steep))
    assert one[0] == two[0]
    assert one[1] < two[1]


def test_sketches_are_as_wide_as_is_set_for_the_kind_of_layer(
    method_of: Callable, splits_of: Callable, client_of: Callable
) -> None:
    splits = splits_of(shape=(1, 8, 8))
    method = method_of(Fot, "model.backbone=cnn", splits=splits, sketch_conv=2.0, sketch_linear=0.001)
    server = method.start_task(method.create_server(), 0)
    reply, _ = method.gpse.reply(client_of(method, 1), method.make_gpse_payload(server))
    assert {name: tuple(sketch.shape) for name, sketch in reply.parts["sketch"].tensors.items()} == {
        "backbone.conv1": (9, 18),
        "backbone.conv2": (18, 36),
        "backbone.fc1": (16, 1),
    }


def learned(experiment: Experiment, folder: Path) -> tuple[pl.DataFrame, list[dict[str, Any]]]:
    """The ledger, and what was known after each task."""
    experiment.run(folder)
    files = sorted((folder / "knowledge").glob("task-*"))
    return pl.read_parquet(folder / "ledger.parquet"), [trees.load(file) for file in files]


def test_all_clients_of_a_task_are_asked_for_sums_at_its_end(
    experiment_of: Callable, splits_of: Callable, tmp_path: Path
) -> None:
    """Also those that no round took, and one with a single sample; not those that do not have the task."""
    splits = splits_of(tasks=3, train=FEW)
    ledger, known_after = learned(
        experiment_of("federation.clients_per_round=2", "methods.fot.threshold_by=fixed", method="fot", splits=splits),
        tmp_path / "run",
    )
    up = ledger.filter(pl.col("part") == "sketch")
    assert set(up.select("task", "client").rows()) == set(FEW)
    assert set(up["round"]) == {-1}
    assert set(up["kind"]) == {"sketch"}
    assert set(ledger.filter(pl.col("direction") == "up")["least"]) == {"sum"}
    down = ledger.filter(pl.col("part") == "bases")
    assert down.select("task", "client", "round").rows() == up.select("task", "client", "round").rows()
    samples = [sum(n for (task, _), n in FEW.items() if task == t) for t in range(3)]
    assert [knowledge["columns"]["backbone.fc1"] for knowledge in known_after] == [[n, n] for n in samples]
    assert all(min(knowledge["ranks"][layer]) > 0 for knowledge in known_after for layer in LAYERS)


def test_the_releases_extraction_comes_with_the_last_round(
    experiment_of: Callable, splits_of: Callable, tmp_path: Path
) -> None:
    """No exchange more; the sketches are those of the clients that the last round took."""
    splits = splits_of(tasks=3, train=FEW)
    experiment = experiment_of(
        *("federation.clients_per_round=2", "federation.rounds=3", "methods.fot.gpse=local"),
        method="fot",
        splits=splits,
    )
    ledger, known_after = learned(experiment, tmp_path / "run")
    assert set(ledger["round"]) == {0, 1, 2}
    up = ledger.filter(pl.col("part") == "sketch")
    method = experiment.method
    servers = [Server(method.run.make_spec(task + 1), {}, task) for task in range(3)]
    last = {(server.task, client, 2) for server in servers for client in sample_clients(method, server, 2)}
    assert set(up.select("task", "client", "round").rows()) == last
    assert set(ledger.filter(pl.col("direction") == "up")["least"]) == {"sum"}
    assert ledger.filter(pl.col("part") == "bases").select("task", "client").is_unique().all()
    assert [len(knowledge["ranks"]["backbone.fc1"]) for knowledge in known_after] == [1, 2, 3]


def test_in_the_release_a_client_sketches_what_its_own_model_sees(
    method_of: Callable, splits_of: Callable, client_of: Callable
) -> None:
    method = method_of(Fot, "federation.rounds=1", "optimizer.lr=0.5", splits=splits_of(train=3), gpse="local")
    server = method.start_task(method.create_server(), 0)
    tensors = method.train(client_of(method, 2), method.make_payload(server)).tensors
    own = {name: weight + tensors["update"][name] / 3 for name, weight in server.weights.items()}
    for weights, inside in ((own, True), (server.weights, False)):
        X = inputs(weights, splits_of(train=3), 0, (2,))["backbone.fc3"]
        span = torch.from_numpy(scipy.linalg.orth(X))
        assert (1 - covered(span, exact(tensors["sketch"]["backbone.fc3"])) < 1e-6) == inside


def test_late_replies_have_no_sketch_so_the_releases_extraction_refuses_them(method_of: Callable) -> None:
    with pytest.raises(UserError, match="gpse: local takes sketches from the last round's replies"):
        method_of(Fot, "federation.faults.late=0.5", gpse="local")


def test_a_client_with_running_statistics_of_its_own_sketches_what_its_own_model_sees(
    method_of: Callable, splits_of: Callable, client_of: Callable
) -> None:
    method = method_of(
        Fot, "model.backbone=resnet18", "model.width=2", splits=splits_of(train=3), batch_norm="local", samples=None
    )
    server = method.start_task(method.create_server(), 0)
    payload, newcomer = method.make_gpse_payload(server), client_of(method, 2)
    memory = method.train(newcomer, method.make_payload(server)).memory
    with_statistics = {**payload, "weights": Part("weights", {**server.weights, **memory["personal"]})}

    def energy(client: Client, payload: Payload) -> Tensor:
        return method.answer_gpse(client, payload).tensors["energy"]["backbone.layer4.1.conv2"]

    own = energy(replace(newcomer, memory=memory), payload)
    assert torch.equal(own, energy(newcomer, with_statistics))
    assert not torch.allclose(own, energy(newcomer, payload))


# Where and how often it runs does not matter.


class Interruption(Listener):
    """Ends the run at a moment of a round: (task, round, clients that have answered)."""

    def __init__(self, *moment: int) -> None:
        self.moment = moment

    def on_client_done(self, task: int, round: int, done: int, of: int) -> None:
        if (task, round, done) == self.moment:
            raise KeyboardInterrupt


KNOWLEDGE = ("federation.privacy.noise_multiplier=2", "federation.privacy.covers=knowledge")


@pytest.mark.parametrize("variant", [("methods.fot.gpse=local",), KNOWLEDGE])
def test_a_run_that_was_interrupted_ends_as_one_that_was_not(
    variant: tuple[str, ...],
    experiment_of: Callable,
    remains: Callable,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """In the middle of the last round, and while clients are asked for sketches."""
    settings = (*HARD, *variant, "federation.checkpoint_seconds=0", "federation.clients_per_round=3")
    experiment_of(*settings, method="fot").run(tmp_path / "whole")
    home, sketch, calls = tmp_path / "home", Fot.draw_sketches, count(1)

    def broken(*call: Any) -> Any:
        if next(calls) == 3:
            raise KeyboardInterrupt
        return sketch(*call)

    monkeypatch.setattr(Fot, "draw_sketches", broken)
    with pytest.raises(KeyboardInterrupt):
        experiment_of(*settings, method="fot", home=home).run(tmp_path / "run")
    monkeypatch.undo()
    with pytest.raises(KeyboardInterrupt):
        experiment_of(*settings, method="fot", home=home, listener=Interruption(1, 1, 2)).run(tmp_path / "run")
    experiment_of(*settings, method="fot", home=home).run(tmp_path / "run")
    assert remains(tmp_path / "run") == remains(tmp_path / "whole")


@pytest.mark.slow
def test_workers_give_the_same_bits(
    experiment_of: Callable, splits_of: Callable, remains: Callable, tmp_path: Path
) -> None:
    settings = (
        *HARD,
        "model.dropout=[0.2, 0.5]",
        *KNOWLEDGE,
        "federation.privacy.sample_rate=0.7",
    )
    splits = splits_of(tasks=3, train=FEW)
    workers = ("federation.executor=processes", "federation.workers=2")
    experiment_of(*settings, method="fot", splits=splits).run(tmp_path / "serial")
    with experiment_of(*settings, *workers, method="fot", splits=splits) as experiment:
        experiment.run(tmp_path / "workers")
    assert remains(tmp_path / "workers") == remains(tmp_path / "serial")
