"""Monitors against independent computations, a problem solved by hand, and runs that they must not disturb."""

import sys
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from fclmodels.backbones.model.heads import shrink_heads
from fclmodels.backbones.model.network import Network, build_skeleton
from fclmodels.data.batches import Batch
from fclmodels.data.splits.split_reader import Splits
from fclmodels.errors import UserError
from fclmodels.experiment.experiment import Experiment
from fclmodels.experiment.step_keys import MONITORS as WATCH_MODULE
from fclmodels.federation.engine import rounds
from fclmodels.federation.engine.checkpoints import Checkpoints
from fclmodels.federation.engine.journal import Log
from fclmodels.federation.engine.ledger import open_ledger
from fclmodels.federation.engine.listener import Listener
from fclmodels.federation.engine.rounds import Position
from fclmodels.federation.executors.client_work import Serial
from fclmodels.federation.method import Method
from fclmodels.federation.monitors.oracles import gradients, theorem2
from fclmodels.federation.monitors.rows import make_row, make_table
from fclmodels.federation.monitors.used_share import measure_used_shares
from fclmodels.federation.server import Server
from fclmodels.federation.training.local_training import LocalTraining
from fclmodels.methods.fedavg import FedAvg
from fclmodels.methods.fot import Fot
from fclmodels.methods.gpm import Gpm
from fclmodels.storage import trees
from fclmodels.tables import ROUNDS

ON = ("monitors.used_share=true", "monitors.gradients=true", "monitors.every=1")
UNEVEN = {(task, client): 3 + 4 * client + task for task in range(2) for client in range(3)}
SPANS = {"backbone.fc1": 5, "backbone.fc2": 9, "backbone.fc3": 0}  # of 36, 12 and 12: one is wider than half

MakeExperiment = Callable[..., Experiment]


class Guarded(Fot):
    """Protects spans that a test gives it."""

    name = "guarded"

    def learning(self, task: int, bases: dict[str, Tensor]) -> Server:
        """In the middle of a task's training."""
        server = self.create_server()
        for earlier in range(task + 1):
            server = self.start_task(replace(server, knowledge={**server.knowledge, "bases": bases}), earlier)
        noise = torch.Generator().manual_seed(3)
        weights = {name: w + 0.1 * torch.randn(w.shape, generator=noise) for name, w in server.weights.items()}
        return replace(server, weights=weights)


class OnlyWeights(Guarded):
    """All that moves is protected."""

    def select_trainable(self, network: Network, task: int) -> dict[str, nn.Parameter]:
        return {
            name: p for name, p in super().select_trainable(network, task).items() if "fc" in name and "weight" in name
        }


def random_bases(ranks: dict[str, int]) -> dict[str, Tensor]:
    widths, random = {"backbone.fc1": 36, "backbone.fc2": 12, "backbone.fc3": 12}, np.random.default_rng(5)
    return {
        name: torch.from_numpy(np.linalg.qr(random.normal(size=(widths[name], rank)))[0]).float()
        for name, rank in ranks.items()
    }


def seen_by(method: Method, before: Server, after: Server, folder: Path) -> dict[tuple[str, int | None], float]:
    """{(monitor, about): value} of one look."""
    log = Log(folder / "log.jsonl")
    gradients.Oracle(method, before.task, log).look(Position(before, {}, 0), Position(after, {}, 1))
    rows = log.read_rows()
    log.close()
    assert {row["round"] for row in rows} == {0}
    return {(row["monitor"], row["about"]): row["value"] for row in rows}


def full_gradients(method: Method, server: Server, task: int) -> list[dict[str, np.ndarray]]:
    """Of each client's loss on all its rows in one batch, in double precision; classes known after the task only."""
    spec = method.run.make_spec(task + 1)
    network = build_skeleton(spec).double().eval()
    network.load_state_dict(
        {n: w[: spec.label_count] if n.startswith("heads.") else w for n, w in server.weights.items()}
    )
    gradients = []
    for client in method.run.splits.list_clients(task):
        rows = method.run.splits.select_rows(task, "train", client)
        (batch,) = method.run.batches.iterate_ordered(rows, len(rows))
        network.zero_grad()
        cross_entropy(network(batch.inputs.double()), batch.labels).backward()
        gradients.append({name: p.grad.numpy().copy() for name, p in network.named_parameters() if p.grad is not None})
    return gradients


def mean(gradients: list[dict[str, np.ndarray]], weights: Iterable[float]) -> dict[str, np.ndarray]:
    shares = np.array(list(weights)) / sum(weights)
    return {name: sum(s * g[name] for s, g in zip(shares, gradients, strict=True)) for name in gradients[0]}


def norm(tensors: Iterable[np.ndarray]) -> float:
    return float(np.sqrt(sum((t**2).sum() for t in tensors)))


@pytest.mark.parametrize("weighting", ["samples", "uniform"])
def test_adequacy_interference_and_constants_are_those_of_whole_gradients(
    weighting: str, method_of: Callable, splits_of: Callable[..., Splits], tmp_path: Path
) -> None:
    """In batches of 4 they are summed, without batches they are checked, with NumPy's projections."""
    splits, bases = splits_of(clients=3, train=UNEVEN), random_bases(SPANS)
    method = method_of(Guarded, f"federation.weighting={weighting}", splits=splits)
    before = method.learning(1, bases)
    after = replace(before, weights={name: w + 0.01 * w.sign() for name, w in before.weights.items()})
    seen = seen_by(method, before, after, tmp_path)
    for task, monitor in ((1, "rho"), (0, "beta")):
        weights = [UNEVEN[task, k] if weighting == "samples" else 1 for k in range(3)]
        here, there = (mean(full_gradients(method, server, task), weights) for server in (before, after))
        left = dict(here)
        for layer, basis in bases.items():
            G, Phi = here[f"{layer}.weight"], basis.double().numpy()
            left[f"{layer}.weight"] = G - G @ Phi @ Phi.T
        share = norm(left.values()) / norm(here.values())
        assert share < 0.97
        if monitor == "rho":
            assert seen["rho", None] == pytest.approx(share**2, rel=1e-5)
        else:
            assert seen["beta", 0] == pytest.approx(share, rel=1e-5)
        moved = norm((after.weights[n] - before.weights[n]).double().numpy() for n in here)
        turned = norm(there[name] - here[name] for name in here)
        assert seen["smoothness", task] == pytest.approx(turned / moved, rel=1e-4)
    whole = method_of(Guarded, "federation.batch_size=100", splits=splits)
    for task in (0, 1):
        largest = max(norm(g.values()) ** 2 for g in full_gradients(method, before, task))
        at_once = seen_by(whole, before, after, tmp_path / str(task))["second_moment", task]
        assert at_once == pytest.approx(largest, rel=1e-5)
        assert seen["second_moment", task] > largest  # Jensen: parts of a mean are longer than it


def test_without_projection_all_of_a_gradient_is_let_through(method_of: Callable, tmp_path: Path) -> None:
    method = method_of(FedAvg)
    server = method.start_task(method.start_task(method.create_server(), 0), 1)
    seen = seen_by(method, server, server, tmp_path)
    assert seen["rho", None] == seen["beta", 0] == 1.0
    assert not any(monitor == "smoothness" for monitor, _ in seen)  # nothing has moved


def test_a_full_basis_lets_nothing_through(method_of: Callable, tmp_path: Path) -> None:
    full = random_bases({"backbone.fc1": 36, "backbone.fc2": 12, "backbone.fc3": 12})
    server = method_of(OnlyWeights).learning(1, full)
    seen = seen_by(method_of(OnlyWeights), server, server, tmp_path / "weights")
    assert seen["rho", None] == seen["beta", 0] == 0.0
    seen = seen_by(method_of(Guarded), server, server, tmp_path / "all")
    assert 0 < seen["rho", None] < 1  # biases and head are free


@pytest.mark.parametrize(
    ("kind", "settings", "moves"),
    [
        (FedAvg, ("model.freeze=[fc1, fc3]",), lambda name: "fc1" not in name and "fc3" not in name),
        (FedAvg, ("model.head=per-task",), lambda name: not name.startswith("heads.0")),
        (Gpm, (), lambda name: name.startswith("backbone") and name.endswith("weight")),
    ],
    ids=["frozen blocks", "heads of other tasks", "frozen biases, and rows of old classes"],
)
def test_what_a_task_does_not_train_counts_as_projected_away(
    kind: type[Method], settings: tuple[str, ...], moves: Callable[[str], bool], method_of: Callable, tmp_path: Path
) -> None:
    method = method_of(kind, *settings)
    server = method.start_task(method.start_task(method.create_server(), 0), 1)
    gradient, _ = gradients.measure_slope(method, server, 0)
    of = {name: float(g.square().sum()) for name, g in gradient.items()}
    share = sum(square for name, square in of.items() if moves(name)) / sum(of.values())
    assert 0 < share < 0.99
    assert seen_by(method, server, server, tmp_path)["beta", 0] == pytest.approx(share**0.5, rel=1e-5)


def test_an_old_tasks_loss_knows_no_class_that_came_later(method_of: Callable) -> None:
    method = method_of(FedAvg)
    server = method.start_task(method.create_server(), 0)
    grown = method.start_task(server, 1)
    assert gradients.compute_loss(method, grown, 0) == gradients.compute_loss(method, server, 0)
    gradient, _ = gradients.measure_slope(method, grown, 0)
    assert gradient["heads.0.weight"].shape == (4, 12)
    assert gradient["heads.0.weight"][2:].count_nonzero() == 0
    assert shrink_heads(grown.weights, server.spec).keys() == server.weights.keys()


def test_dropout_is_off_and_nobody_elses_randomness_moves(method_of: Callable) -> None:
    method = method_of(FedAvg, "model.dropout=[0.5, 0.5]", "augment.flip=true")
    server = method.start_task(method.create_server(), 0)
    before = torch.get_rng_state()
    plain = method_of(FedAvg)
    assert gradients.compute_loss(method, server, 0) == gradients.compute_loss(plain, server, 0)
    with_dropout, without = (gradients.measure_slope(of, server, 0) for of in (method, plain))
    assert with_dropout[1] == without[1]
    assert all(torch.equal(with_dropout[0][name], g) for name, g in without[0].items())
    assert torch.equal(torch.get_rng_state(), before)


class Bowl(FedAvg):
    """L_tau(W) = ||W - tau||^2 / 2 over the backbone: every quantity of Theorem 2 is known."""

    name = "bowl"

    def compute_loss(self, training: LocalTraining, batch: Batch) -> Tensor:
        weights = training.network.backbone.parameters()
        return sum((w - training.client.task).square().sum() / 2 for w in weights)


def watched(method: Method, folder: Path) -> tuple[pl.DataFrame, pl.DataFrame]:
    """What the oracle saw over all tasks, and the rounds table."""
    server, seen, done = method.create_server(), [], []
    for task in range(len(method.run.splits.tasks)):
        checkpoints = Checkpoints(folder / str(task))
        oracle = gradients.Oracle(method, task, checkpoints.monitors)
        server = rounds.learn(
            method,
            server,
            {},
            task,
            Serial(method, 1),
            checkpoints,
            open_ledger(method, checkpoints.ledger),
            Listener(),
            None,
            oracle.look,
        ).server
        oracle.on_task_learned(server)
        seen.append(make_table(checkpoints.monitors.read_rows()))
        done.append(pl.DataFrame(checkpoints.rounds.read_rows(), schema=ROUNDS))
        checkpoints.close()
    return pl.concat(seen), pl.concat(done)


def test_a_quadratic_is_seen_as_it_is(method_of: Callable, tmp_path: Path) -> None:
    """Two tasks of three rounds of two steps from W: W_n = tau + (1 - lr)^n (W_0 - tau)."""
    method = method_of(Bowl, "federation.rounds=3", "optimizer.lr=0.1", "monitors.every=1")
    W = torch.cat([w.flatten() for n, w in method.create_server().weights.items() if "backbone" in n]).double().numpy()
    models = [W]
    for step in range(12):
        models.append(step // 6 + 0.9 * (models[-1] - step // 6))
    squares = {(step // 2, about): ((models[step] - about) ** 2).sum() for step in range(0, 13, 2) for about in (0, 1)}
    seen, done = watched(method, tmp_path)
    values = {tuple(row[:4]): row[5] for row in theorem2.add_bounds(seen, done, lr=0.1).rows()}
    for round in range(6):
        task, within = divmod(round, 3)
        assert values["rho", task, within, None] == 1
        for about in range(task + 1):
            assert values["second_moment", task, within, about] == pytest.approx(squares[round, about], rel=1e-5)
            assert values["smoothness", task, within, about] == pytest.approx(1, rel=1e-5)
    assert [values["beta", 1, within, 0] for within in range(3)] == [1, 1, 1]
    assert values["local_steps", 1, None, None] == 2
    assert values["loss", 0, None, 0] == pytest.approx(squares[3, 0] / 2, rel=1e-5)
    assert values["loss", 1, None, 0] == pytest.approx(squares[6, 0] / 2, rel=1e-5)
    increase = (squares[6, 0] - squares[3, 0]) / 2
    assert values["loss_increase", 1, None, 0] == pytest.approx(increase, rel=1e-4)
    G2 = max(squares[round, about] for round in range(6) for about in range(round // 3 + 1))
    bound = G2 * 3 * (1 * 2 * 0.1 + 1 / 2 * 2**2 * 0.1**2)
    assert values["theorem_bound", 1, None, 0] == pytest.approx(bound, rel=1e-4)
    assert 0 < increase < bound


def test_the_bound_is_equation_13() -> None:
    """4 [3 (0.5 * 5 * 0.1 + 2/2 * 5^2 * 0.1^2) + 2 (0 + 2/2 * 10^2 * 0.01^2)] = 4 (1.5 + 0.02)"""
    later = [theorem2.Stretch(3, 5, 0.1, 0.5), theorem2.Stretch(2, 10, 0.01, 0.0)]
    assert theorem2.compute_forgetting_bound(4, 2, later) == pytest.approx(6.08)


def test_bounds_take_the_largest_that_was_seen_until_then() -> None:
    seen = make_table(
        [
            *(make_row("local_steps", task, 4) for task in range(3)),
            *(make_row("loss", task, value, about=0) for task, value in enumerate((0.5, 0.75, 0.25))),
            make_row("loss", 1, 0.1, about=1),
            make_row("second_moment", 0, 3, 0, 0),
            make_row("second_moment", 1, 2, 0, 1),
            make_row("second_moment", 2, 7, 0, 0),
            make_row("smoothness", 1, 5, 0, 0),
            make_row("smoothness", 2, 1, 0, 0),
            make_row("beta", 1, 0.25, 0, 0),
            make_row("beta", 1, 0.5, 5, 0),
        ]
    )
    done = pl.DataFrame({"task": [0, 1, 1, 2], "server_lr": [1.0, 0.5, 0.5, 1.0]})
    found = theorem2.add_bounds(seen, done, lr=0.1)
    assert found.head(len(seen)).equals(seen)
    values = {tuple(row[:4]): row[5] for row in found.tail(len(found) - len(seen)).rows()}
    first = 2 * (0.5 * 4 * 0.05 + 5 / 2 * (4 * 0.05) ** 2)
    second = 1 * (0 + 5 / 2 * (4 * 0.1) ** 2)  # no beta: that gradient was 0
    assert values == pytest.approx(
        {
            ("loss_increase", 1, None, 0): 0.25,
            ("theorem_bound", 1, None, 0): 3 * first,
            ("loss_increase", 2, None, 0): -0.25,
            ("theorem_bound", 2, None, 0): 7 * (first + second),
        }
    )


def test_used_share_of_each_layer_and_its_mean() -> None:
    shares = measure_used_shares({"a": torch.zeros(8, 2), "b": torch.zeros(10, 10), "c": torch.zeros(5, 0)}, 3)
    assert shares.rows() == [
        ("used_share", 3, None, None, "a", 0.25),
        ("used_share", 3, None, None, "b", 1.0),
        ("used_share", 3, None, None, "c", 0.0),
        ("used_share", 3, None, None, None, pytest.approx(1.25 / 3)),
    ]
    assert measure_used_shares({}, 3).is_empty()


def lasting(result: dict[str, Any]) -> dict[str, Any]:
    return {key: result[key] for key in ("metrics", "digests", "bytes_up", "bytes_down", "bytes_kept")}


def test_a_watched_run_is_the_same_run(experiment_of: MakeExperiment, tmp_path: Path) -> None:
    first = experiment_of(method="fot").run(tmp_path / "alone")
    second = experiment_of(*ON, method="fot").run(tmp_path / "watched")
    assert lasting(first) == lasting(second)
    assert not (tmp_path / "alone" / "monitors.parquet").exists()
    seen = pl.read_parquet(tmp_path / "watched" / "monitors.parquet")
    counts = dict(seen.group_by("monitor").len().rows())
    # 2 tasks of 2 rounds, 3 layers; 3 pairs of a task and one up to it, looked at in 2 rounds each
    assert counts == {
        **{"used_share": 2 * 4, "rho": 4, "beta": 2, "second_moment": 6, "smoothness": 6},
        **{"loss": 3, "local_steps": 2, "loss_increase": 1, "theorem_bound": 1},
    }
    assert seen.filter(pl.col("monitor") == "rho", pl.col("task") == 0)["value"].to_list() == [1, 1]
    assert (seen.filter(pl.col("monitor") == "beta")["value"] < 1).all()


def test_an_old_task_that_is_wholly_protected_is_seen_not_to_move(
    experiment_of: MakeExperiment, tmp_path: Path
) -> None:
    """Its inputs are in the span, biases and its rows of the head are frozen: none of its gradient is let through."""
    settings = (
        *("methods.fedprotip.threshold=1.0", "methods.fedprotip.patches=100000", "methods.fedprotip.tip=false"),
        *("methods.fedprotip.threshold_by=fixed", "methods.fedprotip.budget=1"),
    )
    experiment_of(*ON, *settings, method="fedprotip").run(tmp_path / "run")
    seen = pl.read_parquet(tmp_path / "run" / "monitors.parquet").filter(pl.col("task") == 1)
    of = {name: seen.filter(pl.col("monitor") == name)["value"] for name in ("rho", "beta", "loss_increase")}
    assert of["beta"].to_list() == pytest.approx([0, 0], abs=1e-3)
    assert of["loss_increase"].item() == pytest.approx(0, abs=1e-5)
    assert ((of["rho"] > 0.01) & (of["rho"] < 0.99)).all()


def test_every_says_in_which_rounds(experiment_of: MakeExperiment, tmp_path: Path) -> None:
    experiment_of(*ON, "monitors.every=2", "federation.rounds=[5, 1]").run(tmp_path / "run")
    seen = pl.read_parquet(tmp_path / "run" / "monitors.parquet").filter(pl.col("monitor") == "rho")
    assert seen.select("task", "round").rows() == [(0, 0), (0, 2), (0, 4), (1, 0)]


def test_what_is_off_costs_nothing(
    experiment_of: MakeExperiment, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, WATCH_MODULE, None)  # any import of it fails
    experiment_of().run(tmp_path / "run")
    assert not (tmp_path / "run" / "monitors.parquet").exists()


def test_no_bases_no_file(experiment_of: MakeExperiment, tmp_path: Path) -> None:
    experiment_of("monitors.used_share=true").run(tmp_path / "run")
    assert not (tmp_path / "run" / "monitors.parquet").exists()


@pytest.mark.parametrize("where", ["look", "on_task_learned"])
def test_a_resumed_run_has_seen_the_same(
    where: str, experiment_of: MakeExperiment, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It dies right after a look, whose round is not committed, at each of its looks in turn."""
    settings = (*ON, "federation.checkpoint_seconds=0", "federation.clients_per_round=2")
    experiment_of(*settings, method="fot").run(tmp_path / "undisturbed")
    function, calls = getattr(gradients.Oracle, where), iter(range(100))
    deaths = {0, 3, 5} if where == "look" else {0, 2}

    def fatal(*arguments: Any) -> None:
        function(*arguments)
        if next(calls) in deaths:
            raise KeyboardInterrupt

    monkeypatch.setattr(gradients.Oracle, where, fatal)
    for _ in deaths:
        with pytest.raises(KeyboardInterrupt):
            experiment_of(*settings, method="fot", home=tmp_path / "home").run(tmp_path / "run")
    experiment_of(*settings, method="fot", home=tmp_path / "home").run(tmp_path / "run")
    one, other = (pl.read_parquet(tmp_path / name / "monitors.parquet") for name in ("undisturbed", "run"))
    assert one.equals(other)


@pytest.mark.slow
def test_where_clients_run_makes_no_difference(experiment_of: MakeExperiment, tmp_path: Path) -> None:
    elsewhere = ("federation.executor=processes", "federation.workers=2")
    for name, settings in (("here", ()), ("elsewhere", elsewhere)):
        experiment_of(*ON, *settings, method="fot").run(tmp_path / name)
    here, there = (pl.read_parquet(tmp_path / name / "monitors.parquet") for name in ("here", "elsewhere"))
    assert here.equals(there)


def test_a_model_that_is_not_the_same_for_all_is_refused(experiment_of: MakeExperiment, tmp_path: Path) -> None:
    experiment = experiment_of(*ON, "methods.fedavg.batch_norm=local", "model.backbone=resnet18")
    with pytest.raises(UserError, match=r"monitors\.gradients: fedavg") as error:
        experiment.run(tmp_path / "run")
    assert "\n" not in str(error.value)


def test_features_drift_beside_task_prediction(experiment_of: MakeExperiment, tmp_path: Path) -> None:
    """As the server knows it; nothing where it is not measured: in the first task, or without moved features."""
    experiment_of("monitors.drift=true", method="fedprotip").run(tmp_path / "run")
    rows = pl.read_parquet(tmp_path / "run" / "monitors.parquet").filter(pl.col("monitor") == "feature_drift")
    knowledge = trees.load(max((tmp_path / "run" / "knowledge").glob("task-*")))
    none, drift = knowledge["tip"]["drifts"]
    assert none is None
    assert rows.select("task", "value").rows() == [(1, pytest.approx(drift))]
    assert drift > 0
    for method, settings in (("fot", ()), ("fedprotip", ("methods.fedprotip.tip_later=features",))):
        folder = tmp_path / f"{method} without"
        experiment_of("monitors.drift=true", *settings, method=method).run(folder)
        assert "feature_drift" not in pl.read_parquet(folder / "monitors.parquet")["monitor"].to_list()
