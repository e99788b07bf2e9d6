"""Pretraining of a backbone before any stream: its own data -> weights and their card -> MLflow's registry."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from mlflow import MlflowClient
from mlflow.entities import Dataset, DatasetInput, InputTag, Metric, Param
from prefect import flow, task
from prefect.cache_policies import NO_CACHE

from fclmodels.data.prepare import Prepared
from fclmodels.experiment.pretraining import CARD, WEIGHTS, Pretraining, refuse_foreign
from fclmodels.federation.executors.base import set_torch_threads
from fclmodels.federation.run_context import choose_device
from fclmodels.settings.load import flatten_settings
from fclmodels.settings.pretrain import PretrainParams, load_pretrain_params
from fclmodels.settings.schema import Params, PartitionSettings, StreamSettings, TrackingSettings
from fclmodels.storage.files import lock_file
from fclmodels.storage.object_store import Store
from flows.cli.terminal import tell
from flows.prefect.environment import HOME
from tasks import data
from tasks.caching import Outcome, run_cached, step_task
from tasks.mlflow.connection import create_database, find_or_create_experiment, report_unreachable
from tasks.mlflow.runs import BATCH, IDENTITY, collect_origin_tags

OUT = Path("data/pretrained/letters")
PARAMS = Path("pretrain/params.yaml")
EXPERIMENT = "pretraining"
FOLDER = "pretrained"  # among a run's artifacts


@flow(name="pretrain", flow_run_name="{out}")
def pretrain(
    out: Path = OUT, params: Path = PARAMS, overrides: Sequence[str] = (), quiet: bool = False
) -> dict[str, Any]:
    """Train where the store has no such weights yet, publish, register; return the card and the model's version."""
    refuse_foreign(out)
    settings = load_pretrain_params(params, overrides)

    def report(line: str) -> None:
        tell(f"{settings.name}: {line}", quiet)

    device = choose_device(settings.device)
    client, experiment = _connect(settings.tracking)
    with lock_file(HOME / "locks" / "pretrain", lambda: report("waiting for another fcl that pretrains")):
        step = Pretraining(settings, prepare_data(settings), Store(HOME / "store"), device, report)
        if step.recall() is not None:
            report("already trained")
        with set_torch_threads(settings.pretrain.threads):
            outcome = run_cached(train, step, f"{settings.name}: train")
        card = publish(step, settings.name, outcome, out)
        version = track(client, experiment, step, settings.name, outcome, out)
    return {**card, "version": version}


train = step_task(
    "train", "Train a network on samples that belong to no client; store its weights and their measurements."
)


@task(name="publish pretrained", task_run_name="{label}: publish", cache_policy=NO_CACHE)
def publish(step: Pretraining, label: str, outcome: Outcome, folder: Path) -> dict[str, Any]:
    """Write the folder from the store and return the card; never cached, for DVC deletes the folder before each run."""
    return step.publish(folder, outcome)


@task(name="register", task_run_name="{label}: register", cache_policy=NO_CACHE)
def track(client: MlflowClient, experiment: str, step: Pretraining, label: str, outcome: Outcome, folder: Path) -> int:
    """Log a run with the training's numbers and files, and a version of the model of this name; return its number.

    Both are there once, however often this is called.
    """
    run = _find_finished_run(client, experiment, step) or _log_run(client, experiment, step, outcome, folder)
    if not client.search_registered_models(f"name = '{label}'"):
        client.create_registered_model(label)
    versions = [v for v in client.search_model_versions(f"name = '{label}'") if v.run_id == run]
    if versions:
        return int(versions[0].version)
    card = step.build_card(outcome)
    tags = {"source": card["source"], "classes": ", ".join(card["classes"])[:5000], "backbone": card["backbone"]}
    source = f"{client.get_run(run).info.artifact_uri}/{FOLDER}"
    return int(client.create_model_version(label, source, run, tags, description=card["description"]).version)


def prepare_data(settings: PretrainParams) -> Prepared:
    """Return the data of these settings, which are decoded once for all trainings."""
    params = Params(data=settings.data, stream=StreamSettings(), partition=PartitionSettings(), model=settings.model)
    origin = data.get_prepared_origin(params)
    folder = HOME / "data" / f"prepared-{origin.name}"
    with lock_file(HOME / "data" / "lock"):
        if not origin.matches(folder):
            data.prepare(params, folder)
    return Prepared.open(folder)


def _connect(settings: TrackingSettings) -> tuple[MlflowClient, str]:
    """Return a client of the store and the id of the experiment; called before any work."""
    uri = settings.uri
    with report_unreachable(uri), lock_file(HOME / "locks" / "mlflow"):  # two cannot create its database at once
        create_database(uri)
        client = MlflowClient(uri)
        return client, find_or_create_experiment(client, uri, settings.experiment or EXPERIMENT)


def _find_finished_run(client: MlflowClient, experiment: str, step: Pretraining) -> str | None:
    """Return the id of the run of this training; delete one that did not finish."""
    for run in client.search_runs([experiment], f"tags.`{IDENTITY}` = '{step.key}'"):
        if run.info.status == "FINISHED":
            return str(run.info.run_id)
        client.delete_run(run.info.run_id)
    return None


def _log_run(client: MlflowClient, experiment: str, step: Pretraining, outcome: Outcome, folder: Path) -> str:
    card = step.build_card(outcome)
    tags = {
        IDENTITY: step.key,
        "source": card["source"],
        "mlflow.note.content": card["description"],
        **collect_origin_tags(),
    }
    run = client.create_run(experiment, run_name=card["name"], tags=tags)
    id = str(run.info.run_id)
    params = [Param(name, str(value)) for name, value in flatten_settings(card["settings"]).items()]
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
