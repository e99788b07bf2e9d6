"""The monitors `accuracy` and `drift` against independent computations, and the bound of an anchored model's drift."""

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pytest
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.nn.functional import cross_entropy

from fclmodels import metrics
from fclmodels.backbones.model.network import build_skeleton
from fclmodels.data.batches import Batch
from fclmodels.data.splits.split_reader import Splits
from fclmodels.errors import UserError
from fclmodels.experiment.experiment import Experiment
from fclmodels.federation.engine import rounds
from fclmodels.federation.engine.checkpoints import Checkpoints
from fclmodels.federation.engine.ledger import open_ledger
from fclmodels.federation.engine.listener import Listener
from fclmodels.federation.engine.replies import Replies
from fclmodels.federation.executors.client_work import Serial
from fclmodels.federation.method import Method
from fclmodels.federation.monitors.oracles.gradients import measure_largest_gradient
from fclmodels.federation.monitors.rows import make_table
from fclmodels.federation.monitors.watch import Watch
from fclmodels.federation.server import Server
from fclmodels.federation.training.local_training import LocalTraining
from fclmodels.methods.fed_dualp import FedDualP
from fclmodels.methods.fedavg import FedAvg

ON = ("monitors.accuracy=true", "monitors.drift=true", "monitors.every=1")

MakeExperiment = Callable[..., Experiment]


def seen_in(folder: Path, monitor: str) -> pl.DataFrame:
    table = pl.read_parquet(folder / "monitors.parquet")
    return table.filter(pl.col("monitor") == monitor).select("task", "round", "about", "value")


def watched(method: Method, folder: Path, tasks: int = 2) -> tuple[list[dict[str, Any]], list[Server]]:
    """The rows of all tasks, and the server that each task left."""
    servers, rows = [method.create_server()], []
    for task in range(tasks):
        checkpoints = Checkpoints(folder / str(task))
        watch = Watch(method, task, checkpoints.monitors, servers[-1])
        executor = Serial(method, 1)
        position = rounds.learn(
            method,
            servers[-1],
            {},
            task,
            executor,
            checkpoints,
            open_ledger(method, checkpoints.ledger),
            Listener(),
            None,
            watch.look,
        )
        watch.on_task_learned(position.server)
        servers.append(position.server)
        rows += checkpoints.monitors.read_rows()
        checkpoints.close()
    return rows, servers


# accuracy


@pytest.mark.parametrize("head", ["growing", "per-task"])
def test_the_last_look_at_a_task_is_its_row_of_the_accuracy_matrix(
    head: str, experiment_of: MakeExperiment, tmp_path: Path
) -> None:
    """For a method that changes nothing after the last round; with its own head a task is known, else it is not."""
    experiment_of(*ON, f"model.head={head}", "federation.rounds=3").run(tmp_path / "run")
    accuracy = pl.read_parquet(tmp_path / "run" / "accuracy.parquet")
    a = metrics.accuracy_matrix(accuracy, "task_aware" if head == "per-task" else "task_agnostic")
    last = {row[:3]: row[3] for row in seen_in(tmp_path / "run", "accuracy").rows()}
    assert last[0, 2, 0] == last[0, 2, None] == a[1, 0]
    assert (last[1, 2, 0], last[1, 2, 1]) == (a[2, 0], a[2, 1])
    assert last[1, 2, None] == pytest.approx(a[2].mean())
    assert len(last) == 3 * 2 + 3 * 3


def test_every_task_counts_the_same_and_one_without_test_rows_not_at_all(
    splits_of: Callable[..., Splits], method_of: Callable, tmp_path: Path
) -> None:
    """Task 0 has test rows of four clients, task 1 of one, task 2 has none."""
    sizes = {(0, k): 8 for k in range(4)} | {(1, 0): 8}
    splits = splits_of(tasks=3, train=sizes | {(2, 0): 8}, test=4)
    method = method_of(FedAvg, *ON, splits=splits)
    rows = [row for row in watched(method, tmp_path, tasks=2)[0] if (row["task"], row["round"]) == (1, 1)]
    of = {row["about"]: row["value"] for row in rows if row["monitor"] == "accuracy"}
    assert of[0] != of[1]
    assert of[None] == pytest.approx((of[0] + of[1]) / 2)


def test_looks_come_after_every_so_many_rounds_and_after_the_last(
    experiment_of: MakeExperiment, tmp_path: Path
) -> None:
    experiment_of(*ON, "monitors.every=2", "federation.rounds=[5, 4]").run(tmp_path / "run")
    looks = seen_in(tmp_path / "run", "accuracy").filter(pl.col("about").is_null())
    assert looks.select("task", "round").rows() == [(0, 1), (0, 3), (0, 4), (1, 1), (1, 3)]
    assert seen_in(tmp_path / "run", "drift").select("task", "round").rows() == [(1, 1), (1, 3)]


def test_rounds_to_best_are_in_the_result_of_a_run_that_was_watched(
    experiment_of: MakeExperiment, tmp_path: Path
) -> None:
    result = experiment_of(*ON, "federation.rounds=4").run(tmp_path / "run")
    joint = seen_in(tmp_path / "run", "accuracy").filter(pl.col("about").is_null())["value"].to_numpy().reshape(2, 4)
    assert result["rounds_to_best"] == (joint.argmax(1) + 1).sum()
    assert "rounds_to_best" not in experiment_of().run(tmp_path / "alone")


def test_a_resumed_run_has_seen_the_same(
    experiment_of: MakeExperiment, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = (*ON, "federation.checkpoint_seconds=0", "federation.rounds=3")
    experiment_of(*settings).run(tmp_path / "undisturbed")
    look, calls = Watch.look, iter(range(100))

    def fatal(*arguments: Any) -> None:
        look(*arguments)
        if next(calls) in {1, 4, 6}:
            raise KeyboardInterrupt

    monkeypatch.setattr(Watch, "look", fatal)
    for _ in range(3):
        with pytest.raises(KeyboardInterrupt):
            experiment_of(*settings, home=tmp_path / "home").run(tmp_path / "run")
    experiment_of(*settings, home=tmp_path / "home").run(tmp_path / "run")
    one, other = (pl.read_parquet(tmp_path / name / "monitors.parquet") for name in ("undisturbed", "run"))
    assert one.equals(other)


def test_turning_one_on_learns_anew_and_turning_another_does_not(experiment_of: MakeExperiment) -> None:
    """What is watched is decided while a task is learned; evaluation, and what comes after, ask for nothing of it."""

    def keys(*settings: str) -> list[str]:
        return [experiment_of(*settings).step(stage, None, 0).key for stage in ("learn", "conclude", "evaluate")]

    plain, watched = keys(), keys("monitors.accuracy=true")
    assert plain == keys("monitors.every=3")
    assert plain[0] != watched[0] != keys("monitors.accuracy=true", "monitors.every=3")[0]
    assert watched[0] not in (keys("monitors.drift=true")[0], keys("monitors.accuracy=true", "monitors.drift=true")[0])
    assert plain[1:] == watched[1:]


def test_a_model_that_is_not_the_same_for_all_has_a_drift_but_no_accuracy(
    experiment_of: MakeExperiment, tmp_path: Path
) -> None:
    local = ("methods.fedavg.batch_norm=local", "model.backbone=resnet18")
    with pytest.raises(UserError, match=r"monitors\.accuracy: fedavg"):
        experiment_of("monitors.accuracy=true", *local).run(tmp_path / "run")
    experiment_of("monitors.drift=true", "monitors.every=2", *local).run(tmp_path / "run")
    assert len(seen_in(tmp_path / "run", "drift")) == 1


# drift


def test_drift_is_the_distance_from_the_model_that_the_last_task_left(method_of: Callable, tmp_path: Path) -> None:
    """Of the old rows of a head that has grown: the new ones come from nowhere."""
    rows, (_, left, now) = watched(method_of(FedAvg, *ON), tmp_path)
    (value,) = [row["value"] for row in rows if (row["monitor"], row["round"]) == ("drift", 1)]
    squares = [
        ((now.weights[name].double().numpy()[: len(old)] - old.double().numpy()) ** 2).sum()
        for name, old in left.weights.items()
    ]
    assert now.weights["heads.0.weight"].shape[0] > left.weights["heads.0.weight"].shape[0]
    assert value == pytest.approx(math.sqrt(sum(squares)), rel=1e-6)


def test_drift_is_also_that_of_prompts_that_grow(method_of: Callable, tmp_path: Path) -> None:
    """E-prompts grow along their third dimension: what they had before is what has moved."""
    small = ("backbone=vit", "patch=3", "width=8", "depth=2", "attention_heads=2", "mlp_width=8")
    method = method_of(
        FedDualP, "monitors.drift=true", *(f"model.{setting}" for setting in small), g_layers=[0], e_layers=[1]
    )
    rows, (_, left, now) = watched(method, tmp_path)
    pairs = [(now.weights[name], old) for name, old in left.weights.items()]
    grown = [(new.shape, old.shape) for new, old in pairs if new.shape[1:] != old.shape[1:]]
    assert grown  # not only along the first dimension
    squares = [(new[tuple(slice(n) for n in old.shape)] - old).double().square().sum().item() for new, old in pairs]
    assert rows[-1]["value"] == pytest.approx(math.sqrt(sum(squares)), rel=1e-6)


def test_running_statistics_do_not_count(method_of: Callable, tmp_path: Path) -> None:
    """With a learning rate of next to nothing they are all that moves."""
    method = method_of(FedAvg, *ON, "model.backbone=resnet18", "optimizer.lr=1e-30", "monitors.accuracy=false")
    rows, (_, left, now) = watched(method, tmp_path)
    assert any((now.weights[n] - w).abs().max() > 1e-3 for n, w in left.weights.items() if n.endswith("running_mean"))
    assert all(row["value"] < 1e-20 for row in rows if row["monitor"] == "drift")


class Pulled(FedAvg):
    """Anchored as in SPECIAL, on a loss whose gradient is the same everywhere: g = 1 / sqrt(n) in each direction."""

    name = "pulled"
    weight = 0.5

    def start_task(self, server: Server, task: int) -> Server:
        started = super().start_task(server, task)
        return Server(started.spec, started.weights, task, {"anchor": server.weights} if task else {})

    def aggregate(self, server: Server, replies: Replies) -> Server:
        averaged, anchor = super().aggregate(server, replies), server.knowledge.get("anchor", {})
        pulled = {
            name: (w + self.weight * anchor[name]) / (1 + self.weight) if name in anchor else w
            for name, w in averaged.weights.items()
        }
        return Server(averaged.spec, pulled, averaged.task, averaged.knowledge)

    def find_anchor_weight(self, server: Server) -> float:
        return self.weight

    def compute_loss(self, training: LocalTraining, batch: Batch) -> Tensor:
        weights = list(training.network.backbone.parameters())
        return sum(w.sum() for w in weights) / math.sqrt(sum(w.numel() for w in weights))


def test_a_constant_gradient_drifts_by_the_closed_form_and_comes_up_to_its_bound(
    method_of: Callable, splits_of: Callable[..., Splits], tmp_path: Path
) -> None:
    """Every client takes the K steps of the longest one, so that nothing of the bound is slack but the rounds."""
    settings = ("federation.rounds=40", "federation.local_epochs=3", "federation.server_lr=0.5", "optimizer.lr=0.1")
    splits = splits_of(same_classes=True)
    rows, _ = watched(method_of(Pulled, *ON, *settings, "monitors.accuracy=false", splits=splits), tmp_path)
    of = {name: [row["value"] for row in rows if row["monitor"] == name] for name in ("drift", "drift_bound")}
    K = 3 * 2  # epochs of 8 samples in batches of 4
    limit = 0.5 * 0.1 * K * 1 / 0.5
    assert of["drift_bound"] == pytest.approx([limit] * 40, rel=1e-4)
    assert of["drift"] == pytest.approx([limit * (1 - 1.5**-r) for r in range(1, 41)], rel=1e-4)
    assert [row["value"] for row in rows if row["monitor"] == "largest_gradient"] == pytest.approx([1] * 40, rel=1e-4)


def test_a_falling_learning_rate_lowers_the_bound_of_its_round(
    method_of: Callable, splits_of: Callable[..., Splits], tmp_path: Path
) -> None:
    settings = ("federation.rounds=3", "optimizer.lr_decay=0.5", "monitors.accuracy=false")
    rows, _ = watched(method_of(Pulled, *ON, *settings, splits=splits_of(same_classes=True)), tmp_path)
    bounds = [row["value"] for row in rows if row["monitor"] == "drift_bound"]
    assert bounds == pytest.approx([bounds[0], bounds[0] / 2, bounds[0] / 4])


def test_without_an_anchor_there_is_no_bound_and_no_oracle(
    method_of: Callable, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("fclmodels.federation.monitors.progress.measure_largest_gradient", None)  # any call of it fails
    rows, _ = watched(method_of(FedAvg, *ON), tmp_path)
    assert {row["monitor"] for row in rows} == {"accuracy", "drift"}


def test_the_largest_gradient_is_that_of_the_worst_mini_batch_of_all_clients(
    method_of: Callable, splits_of: Callable[..., Splits]
) -> None:
    """Each client has one mini-batch, its whole data; what is frozen does not count."""
    method = method_of(FedAvg, "federation.batch_size=100", "model.freeze=[fc1]", splits=splits_of(clients=3))
    server = method.start_task(method.start_task(method.create_server(), 0), 1)
    norms = []
    for client in range(3):
        (batch,) = method.run.batches.iterate_ordered(method.select_rows(1, client), 100)
        network = build_skeleton(server.spec)
        network.load_state_dict(server.weights)
        cross_entropy(network.eval()(batch.inputs), batch.labels).backward()
        moving = [p.grad.numpy() for name, p in network.named_parameters() if not name.startswith("backbone.fc1")]
        norms.append(math.sqrt(sum((g.astype(float) ** 2).sum() for g in moving)))
    assert np.ptp(norms) > 1e-3
    assert measure_largest_gradient(method, server, 1) == pytest.approx(max(norms), rel=1e-5)


@given(
    weights=st.lists(st.floats(0.01, 10), min_size=1, max_size=30),
    steps=st.lists(st.floats(0, 5), min_size=30, max_size=30),
)
def test_no_drift_passes_the_largest_bound_of_its_rounds(weights: list[float], steps: list[float]) -> None:
    """The induction of progress.py, with an anchor and gradients that change: moves of b_r in the worst direction."""
    drift, bound = 0.0, 0.0
    for weight, step in zip(weights, steps, strict=False):
        drift, bound = (drift + step) / (1 + weight), max(bound, step / weight)
        assert drift <= bound * (1 + 1e-12)


def test_what_is_seen_fits_the_one_table() -> None:
    assert make_table([]).columns == ["monitor", "task", "round", "about", "layer", "value"]


@pytest.mark.parametrize("weight", [0.05, 0.5, 5])
def test_special_stays_within_its_bound(weight: float, experiment_of: MakeExperiment, tmp_path: Path) -> None:
    settings = (*ON, f"methods.special.lambda={weight}", "federation.rounds=12", "federation.clients_per_round=2")
    experiment_of(*settings, method="special").run(tmp_path / "run")
    drift, bound = (seen_in(tmp_path / "run", name) for name in ("drift", "drift_bound"))
    assert drift["round"].to_list() == bound["round"].to_list() == list(range(12))
    assert 0 < drift["value"].max() < bound["value"].max()
