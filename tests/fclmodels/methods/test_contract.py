"""What every method keeps, however it learns: shapes, determinism, executors, resume, partial participation, bytes.

It runs the checks of fclmodels/testing, which are anyone's, on each method that is there, a new one (`fcl new-method`)
included. Every run here is of partial participation: two of four clients a round, and one client without the second
task. Late and missing clients are in federation/engine/test_faults.py, also over all methods; deaths at every moment in
test_resume.py, over the engine.
"""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import polars as pl
import pytest
import torch

from fclmodels.experiment.experiment import Experiment
from fclmodels.federation.executors.processes import share_workers
from fclmodels.federation.executors.ray.cluster import Actor, RayCluster
from fclmodels.federation.executors.ray.start import connect_cluster
from fclmodels.plugins import find, load_all
from fclmodels.storage import trees
from fclmodels.testing.method_trial import MethodTrial, compare_replies
from fclmodels.testing.plugin_declaration import check_declaration

MakeExperiment = Callable[..., Experiment]

METHODS = sorted(load_all("method"))
EXECUTORS = ("processes", "ray")
WATCHED = ("monitors={accuracy: true, drift: true, gradients: true, conflicts: true, every: 1}",)
# A class's mean or centre on a frozen backbone stays where it is when others come, and so do weights that no task
# trains.
WITHOUT_DRIFT = ("nearest-prototype", "pec", "pilora", "ridge", "stsa")
SMALLER = {  # networks and steps of a method's own, where they take seconds
    "dytox": ("methods.dytox.tuning_epochs=3",),
    "fed-cil": ("methods.fed-cil={consolidation: 2, width: 8}",),
    "pec": ("methods.pec={width: 4, outputs: 16, teacher: 4}",),
}
# Settings without which a method does not fit the trial's network of two layers.
LAYERS = {name: (f"methods.{name}.g_layers=[0]", f"methods.{name}.e_layers=[1]") for name in ("fed-dualp", "pip-dualp")}


@pytest.fixture(scope="module", params=METHODS)
def trial(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[MethodTrial]:
    """A method that has run once for all tests here; all its replies have the declared form."""
    method, folder = find("method", request.param), tmp_path_factory.mktemp(request.param)
    own = (*LAYERS.get(request.param, ()), *SMALLER.get(request.param, ()))
    with MethodTrial(method, *own, folder=folder) as made:
        yield made


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
    experiment = experiment_of("federation.rounds=1", *settings, method=method, splits=splits_of(val=2))
    compare_replies(experiment.method)
    experiment.run(tmp_path / "run")


@pytest.mark.slow
@pytest.mark.parametrize("method", METHODS)
def test_lower_precision_stays_within_local_training(
    method: str, experiment_of: MakeExperiment, splits_of: Callable, tmp_path: Path
) -> None:
    """What clients send, and so the model, is of the types that it is of otherwise, and finite."""
    experiment = experiment_of("optimizer.precision=bfloat16", method=method, splits=splits_of())
    compare_replies(experiment.method)
    experiment.run(tmp_path / "run")
    weights = trees.load(tmp_path / "run" / "model" / "weights.safetensors")
    assert all(tensor.isfinite().all() and tensor.dtype != torch.bfloat16 for tensor in weights.values())


@pytest.fixture(scope="module")
def kept_actors(two_nodes: object) -> Iterator[None]:
    """Actors on two nodes that are not ended but set up again for the next experiment: their start takes seconds."""
    idle: list[Any] = []
    started = RayCluster._start_actor

    def taken(executor: RayCluster) -> Actor:
        return Actor(executor.ray, idle.pop(), executor._set_up) if idle else started(executor)

    with connect_cluster() as ray, pytest.MonkeyPatch.context() as patch:
        patch.setattr(RayCluster, "_start_actor", taken)
        patch.setattr(ray, "kill", idle.append)
        yield


@pytest.fixture(scope="module", autouse=True)
def shared_workers() -> Iterator[None]:
    """Worker processes that all experiments here take in turns: their start takes seconds too."""
    with share_workers():
        yield


@pytest.fixture(params=EXECUTORS)
def workers(request: pytest.FixtureRequest) -> tuple[str, ...]:
    """Settings of an executor with two workers."""
    if request.param == "ray":
        request.getfixturevalue("kept_actors")
    return (f"federation.executor={request.param}", "federation.workers=2")


@pytest.mark.parametrize("method", METHODS)
def test_a_method_declares_what_its_listing_and_its_settings_need(method: str) -> None:
    check_declaration("method", find("method", method))


@pytest.mark.slow
def test_a_stopped_run_goes_on_and_ends_as_one_that_was_not(trial: MethodTrial, workers: tuple[str, ...]) -> None:
    """On each executor as in this process, to the bit."""
    trial.check_stopped_run(*workers)


def test_a_watched_run_that_is_stopped_ends_as_one_that_was_neither(trial: MethodTrial) -> None:
    """In this process, with all monitors looking after each round."""
    folder = trial.check_stopped_run(*WATCHED)
    looks = pl.read_parquet(folder / "monitors.parquet").filter(pl.col("about").is_null())
    counts = dict(looks.group_by("monitor").len().rows())
    assert counts["accuracy"] == 4
    assert counts["drift"] == 2
    drift = looks.filter(monitor="drift")["value"]
    assert (drift == 0).all() if trial.name in WITHOUT_DRIFT else (drift > 0).all()
    cosines = looks.filter(pl.col("monitor").str.starts_with("cosine"))["value"]
    assert cosines.is_between(-1, 1).all()


def test_its_exported_model_answers_as_often_right_as_evaluation(trial: MethodTrial) -> None:
    trial.check_exported_model()


def test_predictions_have_a_column_for_each_class_and_a_score_for_each_task(trial: MethodTrial) -> None:
    trial.check_predictions()


def test_the_ledger_holds_those_who_took_part_and_every_byte(trial: MethodTrial) -> None:
    trial.check_ledger()
