"""What thirty published methods need of the contract, each in a small method of toys/: it ends alike wherever it runs.

On each executor, after a stop, after deaths, with late and lost clients: the bits of a serial run that nothing
disturbed. Every run is of partial participation, and one client has no data of the second task.
"""

import json
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import polars as pl
import pytest
import torch

from fclmodels.data.splits.split_reader import Splits
from fclmodels.experiment.experiment import Experiment
from fclmodels.federation.engine.listener import Listener
from fclmodels.federation.executors.ray.cluster import Actor, RayCluster
from fclmodels.federation.executors.ray.start import connect_cluster
from fclmodels.federation.server import Server

MakeExperiment = Callable[..., Experiment]
Remains = Callable[[Path], dict[str, Any]]

SIZES = {(task, client): 6 + 2 * client for task in range(2) for client in range(4) if (task, client) != (1, 0)}
TOYS = (
    "beside-network",
    "block-distiller",
    "every-kind",
    "exemplars",
    "exemplars selection=random",
    "first-statistics",
    "fitted-classes",
    "fitted-classes fit=gaussians",
    "fitted-classes fit=nearest-mean",
    "largest-gradients",
    "personal-bias",
    "rota",
    "server-student",
    "several-models",
    "task-biases",
    "two-groups",
)
KILLED_DAILY = ("every-kind", "exemplars", "server-student")
COMMON = ("federation.checkpoint_seconds=0", "federation.rounds=3", "model.dropout=[0.2, 0.2]")
FEW = "federation.clients_per_round=2"
FAULTS = (
    "federation.clients_per_round=3",
    "federation.faults={late: 0.3, missing: 0.1, crash: 0.2, out_of_memory: 0.1}",
)
SETTINGS: dict[str, tuple[str, ...]] = {"few clients": (*COMMON, FEW), "faults": (*COMMON, *FAULTS)}
EXECUTORS = ["serial", *(pytest.param(name, marks=pytest.mark.slow) for name in ("processes", "ray"))]


def read_toy(toy: str) -> tuple[str, tuple[str, ...]]:
    """The method's name, and overrides of settings of its own, which stand behind the name."""
    method, *settings = toy.split()
    return method, tuple(f"methods.{method}.{setting}" for setting in settings)


class Stopped(Exception):  # noqa: N818
    pass


class StopsIn(Listener):
    """An interruption in the last round of the second task."""

    def on_client_done(self, task: int, round: int, done: int, of: int) -> None:
        if (task, round) == (1, 2):
            raise Stopped


@pytest.fixture(scope="module")
def splits(splits_of: Callable[..., Splits]) -> Splits:
    return splits_of(train=SIZES)


@pytest.fixture(scope="module")
def reference(
    toys: Path, new_experiment: MakeExperiment, splits: Splits, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Callable[[str, str], Experiment]]:
    """A toy's experiment under these settings that has run once, in this process and undisturbed, into home / run."""
    experiments: dict[tuple[str, str], Experiment] = {}

    def run(toy: str, settings: str) -> Experiment:
        if (toy, settings) not in experiments:
            (method, own), home = read_toy(toy), tmp_path_factory.mktemp("toy")
            made = new_experiment(*SETTINGS[settings], *own, method=method, splits=splits, home=home)
            experiments[toy, settings] = made
            experiments[toy, settings].run(home / "run")
        return experiments[toy, settings]

    yield run
    for experiment in experiments.values():
        experiment.__exit__()


@pytest.fixture(scope="module")
def idle_actors(two_nodes: object) -> Iterator[None]:
    """Actors on two nodes that are not ended but set up again for the next experiment: their start takes seconds."""
    idle: list[Any] = []
    start = RayCluster._start_actor

    def take(executor: RayCluster) -> Actor:
        return Actor(executor.ray, idle.pop(), executor._set_up) if idle else start(executor)

    with connect_cluster() as ray, pytest.MonkeyPatch.context() as patch:
        patch.setattr(RayCluster, "_start_actor", take)
        patch.setattr(ray, "kill", idle.append)
        yield


@pytest.fixture(params=EXECUTORS)
def workers(request: pytest.FixtureRequest) -> tuple[str, ...]:
    """Settings of an executor with two workers, where it has any."""
    if request.param == "ray":
        request.getfixturevalue("idle_actors")
    return (f"federation.executor={request.param}", "federation.workers=2")


@pytest.mark.parametrize("settings", SETTINGS)
@pytest.mark.parametrize("toy", TOYS)
def test_a_stopped_run_goes_on_and_ends_as_one_that_was_not(
    toy: str,
    settings: str,
    workers: tuple[str, ...],
    reference: Callable[[str, str], Experiment],
    experiment_of: MakeExperiment,
    splits: Splits,
    remains: Remains,
    tmp_path: Path,
) -> None:
    method, settings_of_its_own = read_toy(toy)
    own = {"method": method, "splits": splits, "home": tmp_path / "again"}
    overrides = (*SETTINGS[settings], *settings_of_its_own, *workers)
    try:
        with experiment_of(*overrides, **own, listener=StopsIn()) as experiment:  # its actors are free after it
            experiment.run(tmp_path / "run")
    except Stopped:
        experiment_of(*overrides, **own).run(tmp_path / "run")
    assert remains(tmp_path / "run") == remains(reference(toy, settings).home / "run")


@pytest.mark.parametrize(
    "toy", [toy if toy in KILLED_DAILY else pytest.param(toy, marks=pytest.mark.slow) for toy in TOYS]
)
def test_a_run_that_is_killed_three_times_ends_as_one_that_was_not(
    toy: str, reference: Callable[[str, str], Experiment], forks: Any, splits: Splits, remains: Remains
) -> None:
    """Before its eighth replacement of a file, then again, then in a step of training, and then it comes through."""
    deaths = [("replace", "before", 8), ("replace", "after", 8), ("batch", "after", 9), None]
    method, own = read_toy(toy)
    overrides = (*SETTINGS["faults"], *own)
    ends = [forks.run(toy, method=method, splits=splits, overrides=overrides, die=death) for death in deaths]
    assert ends == [-signal.SIGKILL] * 3 + [0]
    assert remains(forks.folder(toy)) == remains(reference(toy, "faults").home / "run")


def test_the_schedule_of_faults_has_late_lost_and_missing_clients(reference: Callable[[str, str], Experiment]) -> None:
    table = pl.read_parquet(reference("beside-network", "faults").home / "run" / "rounds.parquet")
    sums = table.select(pl.col("late", "lost", "missing").sum()).row(0)
    assert all(sums), sums


@pytest.mark.parametrize("toy", TOYS)
def test_predictions_have_a_column_for_each_class(
    toy: str, reference: Callable[[str, str], Experiment], splits: Splits
) -> None:
    run = reference(toy, "few clients")
    server = Server.from_tree(last_state(run)["server"])
    inputs = next(run.method.run.batches.iterate_ordered(splits.select_test_rows(0), 5)).inputs
    with torch.inference_mode():
        prediction = run.method.make_predictor(server)(inputs)
    columns = run.method.list_columns(server)
    assert prediction.logits.shape == (5, len(columns.labels))
    assert prediction.logits.isfinite().all()


@pytest.mark.parametrize("toy", TOYS)
def test_the_ledger_has_every_byte(toy: str, reference: Callable[[str, str], Experiment]) -> None:
    run = reference(toy, "few clients")
    ledger = pl.read_parquet(run.home / "run" / "ledger.parquet")
    result = json.loads((run.home / "run" / "result.json").read_text())
    for way in ("up", "down"):
        assert ledger.filter(direction=way)["bytes"].sum() == result[f"bytes_{way}"] > 0
    memories = ledger.filter(direction="kept").group_by("client").agg(pl.col("bytes").last())
    assert dict(memories.filter(pl.col("bytes") > 0).iter_rows()) == {
        int(client): run.store.find_path(digest).stat().st_size
        for client, digest in last_state(run)["memories"].items()
    }


@pytest.mark.slow
@pytest.mark.parametrize(
    "toy", ["beside-network", "exemplars", "first-statistics", "fitted-classes", "largest-gradients", "task-biases"]
)
def test_what_needs_sums_alone_learns_about_the_same_under_secure_aggregation(
    toy: str, reference: Callable[[str, str], Experiment], experiment_of: MakeExperiment, splits: Splits, tmp_path: Path
) -> None:
    with_masks = experiment_of(*SETTINGS["few clients"], "federation.secagg.on=true", method=toy, splits=splits)
    with_masks.run(tmp_path / "run")
    servers = [Server.from_tree(last_state(run)["server"]) for run in (reference(toy, "few clients"), with_masks)]
    for name, weights in servers[0].weights.items():
        torch.testing.assert_close(servers[1].weights[name], weights, rtol=1e-3, atol=1e-3)
    for network, state in servers[0].networks.items():
        for name, tensor in state.items():
            torch.testing.assert_close(servers[1].networks[network][name], tensor, rtol=1e-3, atol=1e-2)


def last_state(run: Experiment) -> dict[str, Any]:
    """The state that the run ended with, from its store alone."""
    state, steps = None, [("begin", 0), ("learn", 0), ("conclude", 0), ("learn", 1), ("conclude", 1)]
    for stage, task in steps:
        outcome = run.step(stage, state, task).recall()
        assert outcome is not None
        state = outcome["objects"]["state"]
    return run.store.get(str(state))
