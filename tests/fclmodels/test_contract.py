"""What every method keeps, however it learns: shapes, determinism, executors, resume, partial participation, bytes.

It runs on each method that is there, a new one (`fcl new-method`) included. Every run here is of partial participation:
two of four clients a round, and one client without the second task. Late and missing clients are in
federation/test_faults.py, also over all methods; deaths at every moment in test_resume.py, over the engine.
"""

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import polars as pl
import pytest
import torch

from fclmodels import state
from fclmodels.data.splits import Splits
from fclmodels.experiment import Experiment, Stage
from fclmodels.federation.cohort import Cohort
from fclmodels.federation.executor import EVALUATIONS, Job
from fclmodels.federation.inspection import form_of, shown
from fclmodels.federation.messages import Reply
from fclmodels.federation.ray_cluster import Actor, RayCluster
from fclmodels.federation.ray_start import cluster
from fclmodels.federation.secure import LOG
from fclmodels.federation.server import Server
from fclmodels.listener import Listener
from fclmodels.plugins import all_of

MakeExperiment = Callable[..., Experiment]
Remains = Callable[[Path], dict[str, Any]]

PARTIAL = ("federation.clients_per_round=2", "federation.checkpoint_seconds=0")
SIZES = {(task, client): 6 + 2 * client for task in range(2) for client in range(4) if (task, client) != (1, 0)}
METHODS = sorted(all_of("method"))
EXECUTORS = ["serial", *(pytest.param(name, marks=pytest.mark.slow) for name in ("processes", "ray"))]


class Stopped(Exception):  # noqa: N818
    pass


class StopsIn(Listener):
    """An interruption in the last round of the second task."""

    def client_done(self, task: int, round: int, done: int, of: int) -> None:
        if (task, round) == (1, 1):
            raise Stopped


@pytest.fixture(scope="module")
def splits(splits_of: Callable[..., Splits]) -> Splits:
    return splits_of(train=SIZES)


@pytest.fixture(scope="module", params=METHODS)
def run(
    request: pytest.FixtureRequest,
    new_experiment: MakeExperiment,
    splits: Splits,
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[Experiment]:
    """An experiment that has run once for all tests here, into home / run; all replies are as they were declared."""
    home = tmp_path_factory.mktemp(request.param)
    with new_experiment(*PARTIAL, method=request.param, splits=splits, home=home) as experiment:
        with declared_replies():
            experiment.run(home / "run")
        yield experiment


@contextmanager
def declared_replies() -> Iterator[None]:
    """While open, a reply of a form that Method.sends does not tell is a mistake."""
    look = Cohort._look

    def compared(cohort: Cohort, job: Job, looks: Any, client: int, reply: Reply, *more: Any) -> None:
        if job.question not in EVALUATIONS:
            declared = cohort.executor.method.sends(job.task, job.round).get(job.question, {})
            masked = cohort.executor.method.run.params.federation.secagg.on
            sent = {name: part for name, part in reply.parts.items() if name != LOG}
            assert shown(form_of(sent), masked) == shown(form_of(declared)), (job.question, client)
        look(cohort, job, looks, client, reply, *more)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Cohort, "_look", compared)
        yield


@pytest.mark.parametrize(
    ("method", "settings"),
    [
        ("fedavg", ("model.backbone=resnet18",)),
        ("fedavg", ("model.backbone=resnet18", "methods.fedavg.batch_norm=local")),
        ("fot", ("methods.fot.gpse=local",)),
        ("fot", ("federation.secagg.on=true",)),
        ("fot", ("federation.privacy.noise_multiplier=1", "federation.weighting=uniform")),
        ("fedprotip", ("methods.fedprotip={exchange: sketch, tip: false, sketch_width: 3}",)),
        ("fedprotip", ("methods.fedprotip={exchange: sketch, tip_reference: mean}", "federation.secagg.on=true")),
        ("special", ("methods.special.lambda=auto",)),
        ("stamp", ("methods.stamp.spatio=false", "model.backbone=resnet18")),
        ("pip-l2p", ("methods.pip-l2p.head=own",)),
    ],
)
def test_other_settings_declare_what_they_send(
    method: str, settings: tuple[str, ...], experiment_of: MakeExperiment, splits_of: Callable, tmp_path: Path
) -> None:
    with declared_replies():
        experiment_of("federation.rounds=1", *settings, method=method, splits=splits_of(val=2)).run(tmp_path / "run")


@pytest.mark.slow
@pytest.mark.parametrize("method", METHODS)
def test_lower_precision_stays_within_local_training(
    method: str, experiment_of: MakeExperiment, splits_of: Callable, tmp_path: Path
) -> None:
    """What clients send, and so the model, is of the types that it is of otherwise, and finite."""
    with declared_replies():
        experiment_of("optimizer.precision=bfloat16", method=method, splits=splits_of()).run(tmp_path / "run")
    weights = state.load(tmp_path / "run" / "model" / "weights.safetensors")
    assert all(tensor.isfinite().all() and tensor.dtype != torch.bfloat16 for tensor in weights.values())


@pytest.fixture(scope="module")
def kept_actors(two_nodes: object) -> Iterator[None]:
    """Actors on two nodes that are not ended but set up again for the next experiment: their start takes seconds."""
    idle: list[Any] = []
    started = RayCluster._started

    def taken(executor: RayCluster) -> Actor:
        return Actor(executor.ray, idle.pop(), executor._set_up) if idle else started(executor)

    with cluster() as ray, pytest.MonkeyPatch.context() as patch:
        patch.setattr(RayCluster, "_started", taken)
        patch.setattr(ray, "kill", idle.append)
        yield


@pytest.fixture(params=EXECUTORS)
def workers(request: pytest.FixtureRequest) -> tuple[str, ...]:
    """Settings of an executor with two workers, where it has any."""
    if request.param == "ray":
        request.getfixturevalue("kept_actors")
    return (f"federation.executor={request.param}", "federation.workers=2")


def test_a_stopped_run_goes_on_and_ends_as_one_that_was_not(
    run: Experiment,
    workers: tuple[str, ...],
    experiment_of: MakeExperiment,
    splits: Splits,
    remains: Remains,
    tmp_path: Path,
) -> None:
    """On each executor as `run` in this process, to the bit. A method whose second task asks no client just runs."""
    settings = {"method": type(run.method).name, "splits": splits, "home": tmp_path / "again"}
    try:
        experiment_of(*PARTIAL, *workers, **settings, listener=StopsIn()).run(tmp_path / "stopped")
    except Stopped:
        experiment_of(*PARTIAL, *workers, **settings).run(tmp_path / "stopped")
    assert remains(tmp_path / "stopped") == remains(run.home / "run")


def test_predictions_have_a_column_for_each_class_and_a_score_for_each_task(run: Experiment, splits: Splits) -> None:
    server = Server.from_tree(last_state(run)["server"])
    inputs = next(run.method.run.batches.ordered(splits.test_rows(0), 5)).inputs
    with torch.inference_mode():
        prediction = run.method.predictor(server)(inputs)
    columns = run.method.columns(server)
    assert prediction.logits.shape == (5, len(columns.labels))
    assert not prediction.logits.isnan().any()
    assert set(columns.labels.tolist()) == set(range(4))
    assert columns.of_tasks(server.spec.tasks).any(1).all()
    for scores, shape in ((prediction.task_scores, (5, 2)), (prediction.batch_scores, (2,))):
        assert scores is None or scores.shape == shape


def test_the_ledger_holds_those_who_took_part_and_every_byte(run: Experiment) -> None:
    """A client without the second task is in none of its rounds, two are in each, and memories weigh what they hold."""
    folder = run.home / "run"
    ledger, result = pl.read_parquet(folder / "ledger.parquet"), json.loads((folder / "result.json").read_text())
    rounds = ledger.filter(pl.col("direction") != "kept", pl.col("round") >= 0)
    assert set(rounds.filter(direction="up")["least"]) <= {"sum", "each"}
    assert (rounds["bytes"] >= 0).all()
    if run.method.pooled_bytes is None:
        assert 0 not in rounds.filter(task=1)["client"]
        of_each = rounds.group_by("task", "round").agg(pl.col("client").n_unique())
        assert of_each["client"].to_list() == [2, 2, 2, 2]
    for way in ("up", "down"):
        assert ledger.filter(direction=way)["bytes"].sum() == result[f"bytes_{way}"]
    kept = ledger.filter(direction="kept").group_by("client").agg(pl.col("bytes").last())
    memories = last_state(run)["memories"]
    assert dict(kept.filter(pl.col("bytes") > 0).iter_rows()) == {
        int(client): run.store.path(digest).stat().st_size for client, digest in memories.items()
    }


def last_state(run: Experiment) -> dict[str, Any]:
    """Found again from nothing but the store."""
    stages: list[tuple[Stage, int]] = [("begin", 0), ("learn", 0), ("conclude", 0), ("learn", 1), ("conclude", 1)]
    last = None
    for stage, task in stages:
        outcome = run.step(stage, last, task).done()
        assert outcome is not None
        last = outcome["objects"]["state"]
    return run.store.get(str(last))
