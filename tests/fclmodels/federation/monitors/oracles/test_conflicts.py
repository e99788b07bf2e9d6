"""The monitor `conflicts` against gradients chosen by hand, whole ones in NumPy, and runs that it must not disturb."""

import itertools
import json
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.nn.functional import cross_entropy

from fclmodels.backbones.model.network import build_skeleton
from fclmodels.data.batches import Batch
from fclmodels.data.splits.split_reader import Splits
from fclmodels.errors import UserError
from fclmodels.experiment.experiment import Experiment
from fclmodels.federation.engine.journal import Log
from fclmodels.federation.engine.rounds import Position
from fclmodels.federation.method import Method
from fclmodels.federation.monitors.oracles import conflicts
from fclmodels.federation.server import Server
from fclmodels.federation.training.local_training import LocalTraining
from fclmodels.methods.er import Er
from fclmodels.methods.fedavg import FedAvg

ON = ("monitors.conflicts=true", "monitors.every=1")
CLIENTS = ("cosine_clients", "negative_clients", "divergence")
TASKS = ("cosine_tasks", "negative_tasks")

# Train samples of (task, client): client 0 misses task 1, client 2 joins with it, all three meet in task 2.
UNEVEN = {(0, 0): 5, (0, 1): 9, (1, 1): 6, (1, 2): 11, (2, 0): 7, (2, 1): 4, (2, 2): 3}

MakeExperiment = Callable[..., Experiment]


def learning(method: Method, task: int) -> Server:
    """In the middle of a task's training."""
    server = method.create_server()
    for earlier in range(task + 1):
        server = method.start_task(server, earlier)
    noise = torch.Generator().manual_seed(3)
    weights = {name: w + 0.1 * torch.randn(w.shape, generator=noise) for name, w in server.weights.items()}
    return replace(server, weights=weights)


def seen_by(method: Method, server: Server, folder: Path, round: int = 0) -> dict[str, float]:
    """{monitor: value} of one look."""
    log = Log(folder / "log.jsonl")
    conflicts.Conflicts(method, server.task, log).look(Position(server, {}, round), Position(server, {}, round + 1))
    rows = log.read_rows()
    log.close()
    assert all((row["task"], row["round"], row["about"]) == (server.task, round, None) for row in rows)
    assert len({row["monitor"] for row in rows}) == len(rows)
    return {row["monitor"]: row["value"] for row in rows}


@pytest.fixture
def pool(own_splits: Callable, reopened: Callable) -> Splits:
    """Two tasks of the same four classes, of which each client has two of its own in each; shared test rows."""
    splits = own_splits(tasks=2, classes=4, same_classes=True, shared_test=True, train=12)
    own = {(t, c): [(c + 2 * t) % 4, (c + 2 * t + 1) % 4] for t in range(2) for c in range(4)}
    file = splits.folder / "stream.json"
    facts = json.loads(file.read_text())
    for t, task in enumerate(facts["tasks"]):
        task["classes_by_client"] = {str(c): own[t, c] for c in range(4)}
    file.write_text(json.dumps(facts))
    manifest = pl.read_parquet(splits.folder / "manifest.parquet")
    mine = [row["client"] < 0 or row["label"] in own[row["task"], row["client"]] for row in manifest.to_dicts()]
    manifest.filter(pl.Series(mine)).write_parquet(splits.folder / "manifest.parquet")
    return reopened(splits)


# gradients chosen by hand


class Slopes(FedAvg):
    """L_u^tau is linear in the first two biases, so that a test chooses its gradient, the same in all mini-batches."""

    name = "slopes"
    of: dict[tuple[int, int], tuple[float, float]]  # by client and task

    def compute_loss(self, training: LocalTraining, batch: Batch) -> Tensor:
        slope = torch.tensor(self.of[training.client.index, training.client.task])
        return (slope * training.network.get_parameter("backbone.fc1.bias")[:2]).sum()


def test_angles_worked_out_by_hand(method_of: Callable, splits_of: Callable[..., Splits], tmp_path: Path) -> None:
    """Of the earlier tasks client 0 has two, at 45 and 180 degrees, client 1 one at 135 degrees, client 2 none."""
    sizes = dict.fromkeys([(0, 0), (1, 0), (0, 1), (2, 0), (2, 1), (2, 2), (0, 3), (1, 3)], 8)
    method = method_of(Slopes, splits=splits_of(tasks=3, train=sizes))
    method.of = {(0, 2): (2, 0), (1, 2): (0, 2), (2, 2): (4, 4)}
    method.of |= {(0, 0): (3, 3), (0, 1): (-5, 0), (1, 0): (1, -1), (3, 0): (1, 0), (3, 1): (1, 0)}
    root = 0.5**0.5
    # The mean is (2, 2): two gradients lie 2 from it and one sqrt 8, which is its length.
    assert seen_by(method, learning(method, 2), tmp_path) == pytest.approx(
        {
            "cosine_clients": (0 + root + root) / 3,
            "negative_clients": 0,
            "divergence": (root + root + 1) / 3,
            "cosine_tasks": ((root - 1) / 2 - root) / 2,
            "negative_tasks": (1 / 2 + 1) / 2,
        },
        abs=1e-6,
    )


def test_a_gradient_of_zero_is_in_no_pair_but_counts_in_the_divergence(
    method_of: Callable, splits_of: Callable[..., Splits], tmp_path: Path
) -> None:
    """(3, 0), (0, 3) and 0 have the mean (1, 1), and distances sqrt 5, sqrt 5 and sqrt 2 from it."""
    method = method_of(Slopes, splits=splits_of(clients=3))
    method.of = {(0, 1): (3, 0), (1, 1): (0, 3), (2, 1): (0, 0), (0, 0): (0, 0), (1, 0): (-2, 1), (2, 0): (1, 1)}
    seen = seen_by(method, learning(method, 1), tmp_path)
    assert (seen["cosine_clients"], seen["negative_clients"]) == (0, 0)
    assert seen["divergence"] == pytest.approx((2 * 5**0.5 + 2**0.5) / 3 / 2**0.5)
    assert seen["cosine_tasks"] == pytest.approx(5**-0.5)  # of client 1 alone
    assert seen["negative_tasks"] == 0


def test_opposed_clients_have_no_mean_to_diverge_from(
    method_of: Callable, splits_of: Callable[..., Splits], tmp_path: Path
) -> None:
    method = method_of(Slopes, splits=splits_of(clients=2))
    method.of = {(0, 0): (1, -2), (1, 0): (-1, 2)}
    seen = seen_by(method, learning(method, 0), tmp_path)
    assert seen == pytest.approx({"cosine_clients": -1, "negative_clients": 1})


@pytest.mark.parametrize(
    ("clients", "task", "noted"), [(2, 0, {*CLIENTS}), (1, 0, set()), (1, 1, {*TASKS}), (2, 1, {*CLIENTS, *TASKS})]
)
def test_what_has_no_pair_is_not_noted(
    clients: int, task: int, noted: set[str], method_of: Callable, splits_of: Callable[..., Splits], tmp_path: Path
) -> None:
    method = method_of(FedAvg, splits=splits_of(clients=clients))
    assert seen_by(method, learning(method, task), tmp_path).keys() == noted


def test_where_nothing_moves_that_an_old_task_reached_tasks_have_no_angle(method_of: Callable, tmp_path: Path) -> None:
    method = method_of(FedAvg, "model.freeze=[fc1, fc2, fc3]", "model.head=per-task")
    assert seen_by(method, learning(method, 1), tmp_path).keys() == {*CLIENTS}


# whole gradients of networks


def whole_gradients(method: Method, server: Server, task: int, moves: Callable[[str], bool]) -> dict[int, np.ndarray]:
    """Of each client's loss on all its rows in one batch, in double precision, as one vector over what moves.

    Over classes known after the task only: rows of the head that came later have zeros.
    """
    spec = method.run.make_spec(task + 1)
    own_head = spec.head == "per-task"
    network = build_skeleton(spec).double().eval()
    state = {name: server.weights[name] for name in network.state_dict()}
    network.load_state_dict({n: w if own_head or "heads" not in n else w[: spec.label_count] for n, w in state.items()})
    vectors = {}
    for client in method.run.splits.list_clients(task):
        rows = method.run.splits.select_rows(task, "train", client)
        (batch,) = method.run.batches.iterate_ordered(rows, len(rows))
        network.zero_grad()
        if own_head:
            loss = cross_entropy(network(batch.inputs.double(), task), batch.labels - 2 * task)
        else:
            loss = cross_entropy(network(batch.inputs.double()), batch.labels)
        loss.backward()
        found = {name: p.grad for name, p in network.named_parameters() if p.grad is not None}
        pieces = []
        for name in filter(moves, sorted(server.weights)):
            piece = np.zeros(server.weights[name].shape)
            if name in found:
                piece[: len(found[name])] = found[name].numpy()
            pieces.append(piece.ravel())
        vectors[client] = np.concatenate(pieces)
    return vectors


def cosine(a: np.ndarray, b: np.ndarray) -> float:
    return float(a @ b / np.linalg.norm(a) / np.linalg.norm(b))


def expected(method: Method, server: Server, moves: Callable[[str], bool]) -> dict[str, float]:
    of = [whole_gradients(method, server, task, moves) for task in range(server.task + 1)]
    *earlier, current = of
    pairs = [cosine(a, b) for a, b in itertools.combinations(current.values(), 2)]
    center = np.mean(list(current.values()), axis=0)
    apart = [np.linalg.norm(g - center) for g in current.values()]
    by_client = [[cosine(g, old[k]) for old in earlier if k in old] for k, g in current.items()]
    by_client = [found for found in by_client if found]
    return {
        "cosine_clients": np.mean(pairs),
        "negative_clients": np.mean(np.array(pairs) < 0),
        "divergence": np.mean(apart) / np.linalg.norm(center),
        "cosine_tasks": np.mean([np.mean(found) for found in by_client]),
        "negative_tasks": np.mean([np.mean(np.array(found) < 0) for found in by_client]),
    }


CASES: dict[str, tuple[type[Method], tuple[str, ...], Callable[[str], bool]]] = {
    "a growing head": (FedAvg, (), lambda name: True),
    "heads of their own": (FedAvg, ("model.head=per-task",), lambda n: not n.startswith(("heads.0", "heads.1"))),
    "old heads that move": (Er, ("model.head=per-task",), lambda name: True),
    "frozen blocks": (FedAvg, ("model.freeze=[fc1, fc3]",), lambda n: "fc1" not in n and "fc3" not in n),
    "few clients a round": (FedAvg, ("federation.clients_per_round=1",), lambda name: True),
}


@pytest.mark.parametrize(("kind", "settings", "moves"), CASES.values(), ids=CASES)
def test_they_are_those_of_whole_gradients_of_the_clients_that_have_the_tasks(
    kind: type[Method],
    settings: tuple[str, ...],
    moves: Callable[[str], bool],
    method_of: Callable,
    splits_of: Callable[..., Splits],
    tmp_path: Path,
) -> None:
    """In batches of 4 they are summed, without batches they are checked."""
    method = method_of(kind, *settings, splits=splits_of(tasks=3, clients=3, train=UNEVEN))
    server = learning(method, 2)
    wanted = expected(method, server, moves)
    assert seen_by(method, server, tmp_path) == pytest.approx(wanted, rel=1e-4)
    assert 0 < wanted["divergence"] < 10
    assert abs(wanted["cosine_tasks"]) > 0.01


def test_in_a_task_pool_each_client_has_tasks_of_its_own(method_of: Callable, pool: Splits, tmp_path: Path) -> None:
    method = method_of(FedAvg, splits=pool)
    assert {tuple(np.unique(pool.select_rows(1, "train", k).labels)) for k in range(4)} == {
        (2, 3),
        (0, 3),
        (0, 1),
        (1, 2),
    }
    server = learning(method, 1)
    wanted = expected(method, server, lambda name: True)
    assert seen_by(method, server, tmp_path) == pytest.approx(wanted, rel=1e-4)
    assert 0 < wanted["negative_clients"] < 1


def test_dropout_is_off_nothing_is_augmented_and_nobody_elses_randomness_moves(
    method_of: Callable, tmp_path: Path
) -> None:
    method, plain = method_of(FedAvg, "model.dropout=[0.5, 0.5]", "augment.flip=true"), method_of(FedAvg)
    server, before = learning(plain, 1), torch.get_rng_state()
    noisy = replace(learning(method, 1), weights=server.weights)
    assert seen_by(method, noisy, tmp_path / "method") == seen_by(plain, server, tmp_path / "plain")
    assert torch.equal(torch.get_rng_state(), before)


def test_a_look_takes_one_pass_over_each_clients_rows_of_a_task(
    method_of: Callable, splits_of: Callable[..., Splits], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    passes: Counter[tuple[int, int]] = Counter()
    mini_batches = conflicts.iterate_mini_batches

    def counted(method: Method, training: LocalTraining, *rest: Any) -> Iterator[tuple[int, dict[str, Tensor]]]:
        passes[training.client.task, training.client.index] += 1
        yield from mini_batches(method, training, *rest)

    monkeypatch.setattr(conflicts, "iterate_mini_batches", counted)
    method = method_of(FedAvg, splits=splits_of(tasks=3, clients=3, train=UNEVEN))
    seen_by(method, learning(method, 1), tmp_path)
    assert passes == Counter([(1, 1), (1, 2), (0, 1)])  # client 0 has no part in task 1
    passes.clear()
    seen_by(method, learning(method, 2), tmp_path)
    assert passes == Counter(UNEVEN.keys())


# from Gram matrices


@given(seed=st.integers(0, 10_000), n=st.integers(2, 12), shared=st.sampled_from([0.0, 1.0, 1e3]))
def test_all_follows_from_the_gram_matrix(seed: int, n: int, shared: float) -> None:
    """Also where gradients all but agree; they are so small that their squares are 0 in single precision."""
    random = np.random.default_rng(seed)
    V = (1e-25 * (random.standard_normal((n, 50)) + shared * random.standard_normal(50))).astype(np.float32)
    vectors = [{"a": torch.from_numpy(row[:20].reshape(4, 5)), "b": torch.from_numpy(row[20:])} for row in V]
    G = conflicts.compute_inner_products(vectors)
    X = V.astype(float)
    pairs = [cosine(a, b) for a, b in itertools.combinations(X, 2)]
    np.testing.assert_allclose(conflicts.compute_cosines(G).numpy(), pairs, rtol=0, atol=1e-12)
    center = X.mean(0)
    apart = np.linalg.norm(X - center, axis=1).mean() / np.linalg.norm(center)
    assert conflicts.compute_divergence(G) == pytest.approx(apart, rel=1e-6, abs=1e-9)


def test_a_mean_that_is_left_after_cancelling_is_measured_exactly() -> None:
    """Two vectors of length 1e4 whose mean has length 1: in single precision its square is lost."""
    one, other = torch.tensor([1.0, 10_001.0]), torch.tensor([1.0, -10_001.0])
    G = conflicts.compute_inner_products([{"a": one}, {"a": other}])
    assert conflicts.compute_divergence(G) == pytest.approx(10_001, rel=1e-6)


# runs


def lasting(result: dict[str, Any]) -> dict[str, Any]:
    return {key: result[key] for key in ("metrics", "digests", "bytes_up", "bytes_down", "bytes_kept")}


# The paper's hinge is 0 on what is learned: a gradient of 0 has no angle.
NEVER_FLAT = {name: (f"methods.{name}.nca=release",) for name in ("afc", "podnet")}


@pytest.mark.parametrize("name", ["fedavg", "fot", "stamp", "pip-dualp", "icarl", "podnet", "afc"])
def test_a_watched_run_is_the_same_run(
    name: str, experiment_of: MakeExperiment, splits_of: Callable[..., Splits], tmp_path: Path
) -> None:
    settings, given = {"splits": splits_of(clients=2), "method": name}, NEVER_FLAT.get(name, ())
    alone = experiment_of(*given, **settings).run(tmp_path / "alone")
    assert lasting(experiment_of(*ON, *given, **settings).run(tmp_path / "watched")) == lasting(alone)
    seen = pl.read_parquet(tmp_path / "watched" / "monitors.parquet")
    counts = dict(seen.group_by("monitor").len().rows())
    assert counts == dict.fromkeys(CLIENTS, 4) | dict.fromkeys(TASKS, 2)
    cosines = seen.filter(pl.col("monitor").str.starts_with("cosine"))["value"]
    assert cosines.is_between(-1, 1).all()
    assert not (tmp_path / "alone" / "monitors.parquet").exists()


def test_a_task_pool_with_few_clients_a_round_is_watched(
    experiment_of: MakeExperiment, pool: Splits, tmp_path: Path
) -> None:
    settings = (*ON, "monitors.every=2", "federation.rounds=[3, 2]", "federation.clients_per_round=2")
    experiment_of(*settings, splits=pool, method="stamp").run(tmp_path / "run")
    seen = pl.read_parquet(tmp_path / "run" / "monitors.parquet")
    looks = {name: rows.select("task", "round").rows() for (name,), rows in seen.group_by("monitor")}
    assert looks == {name: [(0, 0), (0, 2), (1, 0)] for name in CLIENTS} | {name: [(1, 0)] for name in TASKS}


def test_turning_it_on_learns_anew_and_nothing_else(experiment_of: MakeExperiment) -> None:
    def keys(*settings: str) -> list[str]:
        return [experiment_of(*settings).step(stage, None, 0).key for stage in ("learn", "conclude", "evaluate")]

    plain, watched = keys(), keys("monitors.conflicts=true")
    assert plain[0] != watched[0] != keys("monitors.gradients=true")[0]
    assert watched[0] != keys("monitors.conflicts=true", "monitors.gradients=true")[0]
    assert plain[1:] == watched[1:]


def test_a_model_that_is_not_the_same_for_all_is_refused(experiment_of: MakeExperiment, tmp_path: Path) -> None:
    experiment = experiment_of(*ON, "methods.fedavg.batch_norm=local", "model.backbone=resnet18")
    with pytest.raises(UserError, match=r"monitors\.conflicts: fedavg .* no global gradient"):
        experiment.run(tmp_path / "run")
