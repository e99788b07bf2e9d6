"""A backbone before any stream: data of its own -> weights and their card -> MLflow's registry."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from mlflow import MlflowClient
from mlflow.entities import Dataset, DatasetInput, InputTag, Metric, Param
from prefect import flow, task
from prefect.cache_policies import NO_CACHE

from fclmodels.data.prepare import Prepared
from fclmodels.federation.executor import torch_threads
from fclmodels.federation.run import choose_device
from fclmodels.params import flat
from fclmodels.pretrain import CARD, WEIGHTS, Pretraining, PretrainParams, load, refuse_foreign
from fclmodels.settings import Params, PartitionSettings, StreamSettings, TrackingSettings
from fclmodels.store import Store
from flows.environment import HOME
from flows.terminal import tell
from tasks import data
from tasks.caching import Outcome, stored_task
from tasks.locking import locked
from tasks.tracking import BATCH, IDENTITY, origin
from tasks.tracking_store import asked, experiment_named, set_up

OUT = Path("data/pretrained/letters")
PARAMS = Path("pretrain/params.yaml")
EXPERIMENT = "pretraining"
FOLDER = "pretrained"  # of a run's artifacts


@flow(name="pretrain", flow_run_name="{out}")
def pretrain(
    out: Path = OUT, params: Path = PARAMS, overrides: Sequence[str] = (), quiet: bool = False
) -> dict[str, Any]:
    """Train, publish, register; what was trained before is not trained again. Returns the card and the version."""
    refuse_foreign(out)
    settings = load(params, overrides)

    def told(line: str) -> None:
        tell(f"{settings.name}: {line}", quiet)

    device = choose_device(settings.device)
    client, experiment = _mlflow(settings.tracking)
    with locked(HOME / "locks" / "pretrain", lambda: told("another fcl is at it; waiting")):
        step = Pretraining(settings, prepared_for(settings), Store(HOME / "store"), device, told)
        known = step.done() is not None
        if known:
            told("trained before; not again")
        outcome = (train if known else train.with_options(refresh_cache=True))(step=step, label=settings.name)
        card = publish(step, settings.name, outcome, out)
        version = track(client, experiment, step, settings.name, outcome, out)
    return {**card, "version": version}


@stored_task("{label}: train")
def train(step: Pretraining, label: str) -> Outcome:
    """The weights and what was measured of them, as objects of the store."""
    with torch_threads(step.params.pretrain.threads):
        return step.done() or step.run()


@task(name="publish pretrained", task_run_name="{label}: publish", cache_policy=NO_CACHE)
def publish(step: Pretraining, label: str, outcome: Outcome, folder: Path) -> dict[str, Any]:
    """The folder from what training left in the store; never cached, for DVC deletes it before each run."""
    return step.publish(folder, outcome)


@task(name="register", task_run_name="{label}: register", cache_policy=NO_CACHE)
def track(client: MlflowClient, experiment: str, step: Pretraining, label: str, outcome: Outcome, folder: Path) -> int:
    """A run with the training's numbers and files, and a version of the model of this name: one each, not doubled."""
    run = _finished_run(client, experiment, step) or _logged(client, experiment, step, outcome, folder)
    if not client.search_registered_models(f"name = '{label}'"):
        client.create_registered_model(label)
    there = [v for v in client.search_model_versions(f"name = '{label}'") if v.run_id == run]
    if there:
        return int(there[0].version)
    card = step.card(outcome)
    tags = {"source": card["source"], "classes": ", ".join(card["classes"])[:5000], "backbone": card["backbone"]}
    source = f"{client.get_run(run).info.artifact_uri}/{FOLDER}"
    return int(client.create_model_version(label, source, run, tags, description=card["description"]).version)


def prepared_for(settings: PretrainParams) -> Prepared:
    """The data that these settings ask for, decoded once for all trainings."""
    asked = Params(data=settings.data, stream=StreamSettings(), partition=PartitionSettings(), model=settings.model)
    wanted = data.origin_of_prepared(asked)
    folder = HOME / "data" / f"prepared-{wanted.name}"
    with locked(HOME / "data" / "lock"):
        if not wanted.is_of(folder):
            data.prepare(asked, folder)
    return Prepared.open(folder)


def _mlflow(settings: TrackingSettings) -> tuple[MlflowClient, str]:
    """The client and the id of the experiment; asked before any work."""
    uri = settings.uri
    with asked(uri), locked(HOME / "locks" / "mlflow"):  # its database cannot be set up by two at once
        set_up(uri)
        client = MlflowClient(uri)
        return client, experiment_named(client, uri, settings.experiment or EXPERIMENT)


def _finished_run(client: MlflowClient, experiment: str, step: Pretraining) -> str | None:
    """The run of this training; one that was cut short goes."""
    for run in client.search_runs([experiment], f"tags.`{IDENTITY}` = '{step.key}'"):
        if run.info.status == "FINISHED":
            return str(run.info.run_id)
        client.delete_run(run.info.run_id)
    return None


def _logged(client: MlflowClient, experiment: str, step: Pretraining, outcome: Outcome, folder: Path) -> str:
    card = step.card(outcome)
    tags = {IDENTITY: step.key, "source": card["source"], "mlflow.note.content": card["description"], **origin()}
    run = client.create_run(experiment, run_name=card["name"], tags=tags)
    id = str(run.info.run_id)
    params = [Param(name, str(value)) for name, value in flat(card["settings"]).items()]
    for start in range(0, len(params), BATCH):
        client.log_batch(id, params=params[start : start + BATCH])
    now = run.info.start_time
    metrics = [Metric("train/loss", loss, now, epoch) for epoch, loss in enumerate(outcome["losses"], start=1)]
    last = len(outcome["losses"])
    metrics.append(Metric("held_out/accuracy", outcome["accuracy"], now, last))
    metrics.append(Metric("total/seconds", outcome["seconds"], now, last))
    for start in range(0, len(metrics), 10 * BATCH):
        client.log_batch(id, metrics=metrics[start : start + 10 * BATCH])
    uri = step.prepared.folder.resolve().as_uri()
    prepared = Dataset(card["source"], card["digests"]["prepared"][:36], "local", f'{{"uri": "{uri}"}}')
    client.log_inputs(id, [DatasetInput(prepared, [InputTag("mlflow.data.context", "pretraining")])])
    for file in (WEIGHTS, CARD):
        client.log_artifact(id, str(folder / file), FOLDER)
    client.set_terminated(id, "FINISHED")
    return id
