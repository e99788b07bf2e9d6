"""MLflow's run of an experiment: one for each method, data and seed, identified by a tag and created once.

All calls go through MlflowClient with the run's id, in batches: there is no active run, which a thread would not see.

If MLflow stops answering during a run, the run goes on and reports it once. What is to be logged is pending until
MLflow answers again; if that is not in this run, the next one of the same command logs it from the store.
"""

import os
import shutil
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from threading import Thread
from typing import Any

import polars as pl
from mlflow import MlflowClient
from mlflow.entities import Dataset, DatasetInput, InputTag, Metric, Param, Run, RunTag
from prefect import task
from prefect.cache_policies import NO_CACHE

from fclmodels.errors import hide_passwords
from fclmodels.experiment.experiment import Experiment
from fclmodels.experiment.stages import Stage
from fclmodels.report import labels
from fclmodels.settings.schema import TrackingSettings
from fclmodels.storage.digests import digest_json
from fclmodels.storage.files import lock_file
from tasks.mlflow.connection import (
    CONNECTION_ERRORS,
    MODEL_TRAINING,
    create_database,
    find_or_create_experiment,
    report_unreachable,
    summarise_error,
)
from tasks.mlflow.naming import describe_run, flatten_params, name_metrics, name_run
from tasks.mlflow.saved_view import VIEW, describe_view

LAST_CALL = 3.0  # seconds to log why a run failed
BATCH = 100  # MLflow takes a thousand metrics at once, but only a hundred params or tags
IDENTITY, LEARNED, ERROR, RESULT = "fcl.identity", "fcl.learned", "fcl.error", "fcl.result"
COLUMNS = ("loss", "bytes_up", "bytes_down", "seconds")  # of rounds.parquet
FAULTS = ("answers", "late", "missing", "lost")  # where clients can fail
STAGES_ONCE: tuple[Stage, ...] = ("begin", "conclude", "evaluate")


class Tracking:
    """The MLflow run of an experiment.

    pending: calls that MLflow has not answered yet, in order.
    """

    def __init__(self, client: MlflowClient, run: Run, faults: bool, tell: Callable[[str], None]) -> None:
        self.client = client
        self.tell = tell
        self.pending: list[Callable[[], None]] = []
        self._is_reported = False
        self.columns = COLUMNS + FAULTS * faults
        self.id: str = run.info.run_id
        # The time of all metrics, so that one that is logged again after a kill is the same metric.
        self.start_time: int = run.info.start_time
        self.complete: bool = run.info.status == "FINISHED"
        self.failed_before: bool = ERROR in run.data.tags
        self.learned = int(run.data.tags.get(LEARNED, -1))

    def begin(self, params: dict[str, str]) -> None:
        """Mark the run as running; log params once, for MLflow refuses to change them."""
        self.client.update_run(self.id, status="RUNNING")
        if self.failed_before:
            self.client.delete_tag(self.id, ERROR)
        if self.learned < 0:
            listed = [Param(name, value) for name, value in params.items()]
            for start in range(0, len(listed), BATCH):
                self.client.log_batch(self.id, params=listed[start : start + BATCH])
            self._set_learned(0)

    def log_task(
        self,
        learned: int,
        rounds: pl.DataFrame,
        summary: dict[str, dict[str, float | None]],
        monitored: pl.DataFrame | None = None,
    ) -> None:
        """Log the rounds of the last task and the metrics of all tasks so far; once, also if the run is resumed."""
        if learned <= self.learned:
            return
        now = self.start_time
        metrics = [Metric(name, value, now, learned) for name, value in name_metrics(summary).items()]
        trained = _list_round_metrics(rounds.select("step", *self.columns))
        metrics += [Metric(name, value, now, step) for step, name, value in trained]
        if monitored is not None:
            last = monitored.filter(pl.col("task") == learned - 1)
            first = rounds["step"][0]
            observed = _list_monitor_metrics(last, first, learned)
            metrics += [Metric(name, value, now, step) for step, name, value in observed]
        self.deliver(partial(self._log, learned, metrics))

    def deliver(self, log: Callable[[], None]) -> None:
        """Log this after all pending calls; it becomes pending itself if MLflow does not answer."""
        self.pending.append(log)
        try:
            while self.pending:
                self.pending[0]()
                del self.pending[0]
        except CONNECTION_ERRORS as problem:
            if not self._is_reported:
                self.tell(
                    f"tracking.uri: {self.client.tracking_uri} stopped answering: {summarise_error(problem)}. "
                    "The run goes on and logs the rest as soon as it answers again; else the same command does later."
                )
            self._is_reported = True

    def mark_failed(self, problem: BaseException) -> None:
        """Log the problem, within seconds: a signal may have cut off a query that still holds SQLite's lock."""
        thread = Thread(target=self._log_failure, args=(problem,), daemon=True)
        thread.start()
        thread.join(LAST_CALL)

    def _log_failure(self, problem: BaseException) -> None:
        with suppress(*CONNECTION_ERRORS):  # the problem itself is reported, not this one
            self.client.set_tag(self.id, ERROR, hide_passwords(f"{type(problem).__name__}: {problem}")[:5000])
            self.client.set_terminated(self.id, "FAILED" if isinstance(problem, Exception) else "KILLED")

    def _log(self, learned: int, metrics: list[Metric]) -> None:
        for start in range(0, len(metrics), 10 * BATCH):
            self.client.log_batch(self.id, metrics=metrics[start : start + 10 * BATCH])
        self._set_learned(learned)

    def _set_learned(self, count: int) -> None:
        self.client.set_tag(self.id, LEARNED, str(count))
        self.learned = count


@contextmanager
def track_experiment(
    experiment: Experiment, settings: TrackingSettings, home: Path, tell: Callable[[str], None]
) -> Iterator[Tracking]:
    """Find or create the experiment's run; mark it as failed if the block fails."""
    uri, params = settings.uri, experiment.params
    with report_unreachable(uri), lock_file(home / "locks" / "mlflow"):  # two cannot create its database at once
        create_database(uri)
        client = MlflowClient(uri)
        name = settings.experiment or f"{params.data.source} {params.stream.kind}"
        tags = MODEL_TRAINING | {VIEW: describe_view()}
        run = _find_or_create_run(client, experiment, find_or_create_experiment(client, uri, name, tags))
        tracking = Tracking(client, run, params.federation.faults.on, tell)
        if not tracking.complete:
            tracking.begin(flatten_params(experiment.settings, _get_method(experiment), experiment.seed))
    try:
        yield tracking
    except BaseException as problem:
        if not tracking.complete:
            tracking.mark_failed(problem)
        raise


@task(name="track", task_run_name="{label}: track", cache_policy=NO_CACHE)
def log_result(tracking: Tracking, label: str, folder: Path, result: dict[str, Any]) -> None:
    """Log totals, tables, figures, knowledge and model of a finished run, unless MLflow has them."""
    if not tracking.complete:
        tracking.deliver(partial(_log_result, tracking, folder, result))


def _log_result(tracking: Tracking, folder: Path, result: dict[str, Any]) -> None:
    from tasks.mlflow.artifacts import log_artifacts  # slow to import: only if there is something to log

    now = tracking.start_time
    totals = {name: result[name] for name in ("seconds", "bytes_up", "bytes_down", "bytes_kept")}
    totals |= {f"peak_{who}": peak for who, peak in result["peaks"].items() if peak is not None}
    totals["client_bytes"] = sum(result["client_bytes"].values())
    metrics = [Metric(f"total/{n}", v, now, 0) for n, v in totals.items()]
    if "rounds_to_best" in result:
        metrics.append(Metric("total/rounds_to_best", result["rounds_to_best"], now, 0))
    if "privacy" in result:
        metrics.append(Metric("epsilon", result["privacy"]["epsilon"], now, 0))
    tags = [RunTag(name, text) for name, text in _make_result_tags(result, tracking.id).items()]
    tracking.client.log_batch(tracking.id, metrics=metrics, tags=tags)
    log_artifacts(tracking.client, tracking.id, folder)
    tracking.client.set_terminated(tracking.id, "FINISHED")


def identify_experiment(experiment: Experiment) -> str:
    """Return a digest of all that the experiment's result depends on: the keys of its steps without a state."""
    keys = [experiment.step("learn", None, task).key for task in range(experiment.tasks)]
    keys += [experiment.step(stage, None, 0).key for stage in STAGES_ONCE]
    return digest_json(keys)


def _find_or_create_run(client: MlflowClient, experiment: Experiment, experiment_id: str) -> Run:
    identity = identify_experiment(experiment)
    runs = client.search_runs([experiment_id], f"tags.`{IDENTITY}` = '{identity}'", max_results=1)
    if runs and runs[0].inputs and runs[0].inputs.dataset_inputs:
        return runs[0]
    params, method, seed = experiment.params, _get_method(experiment), experiment.seed
    tags = {
        IDENTITY: identity,
        "method": method,
        "seed": str(seed),
        "scenario": f"{params.data.source}, {params.stream.kind}, {params.partition.kind}",
        "tasks": str(experiment.tasks),
        "splits": experiment.splits.digest,
        "mlflow.source.type": "LOCAL",
        "mlflow.source.name": f"fcl run --method {method} --seed {seed}",
        **collect_origin_tags(),
    }
    if experiment.splits.grows:
        tags["mlflow.source.name"] = "fcl stream"
    name = name_run(method, seed, experiment.tasks if experiment.splits.grows else None)
    run = runs[0] if runs else client.create_run(experiment_id, run_name=name, tags=tags)
    client.log_inputs(run.info.run_id, [_describe_dataset(experiment)])
    return run


def _get_method(experiment: Experiment) -> str:
    return experiment.label.rpartition("-")[0]


def _describe_dataset(experiment: Experiment) -> DatasetInput:
    splits = experiment.splits
    name = f"{experiment.params.data.source}-splits"
    dataset = Dataset(name, splits.digest[:36], "local", f'{{"uri": "{splits.folder.resolve().as_uri()}"}}')
    return DatasetInput(dataset, [InputTag("mlflow.data.context", "training")])


def collect_origin_tags() -> dict[str, str]:
    """Return tags for the commit of the project, and the DVC stage and experiment that started the run."""
    tags = {"dvc.stage": os.environ.get("DVC_STAGE", ""), "dvc.experiment": os.environ.get("DVC_EXP_NAME", "")}
    if git := shutil.which("git"):
        head = subprocess.run([git, "rev-parse", "--verify", "-q", "HEAD"], capture_output=True, text=True, check=False)
        tags["mlflow.source.git.commit"] = head.stdout.strip()
    return {name: value for name, value in tags.items() if value}


def _make_result_tags(result: dict[str, Any], run: str) -> dict[str, str]:
    """Return tags of the result: digest, description and, if it has them, preset, share of rounds and privacy."""
    tags = {RESULT: digest_json(result["digests"]), "mlflow.note.content": describe_run(result, run)[:5000]}
    if "preset" in result:
        tags["preset"] = result["preset"]["name"]
    if "scaled" in result:
        tags["scaled"] = "{rounds} of {of} rounds".format(**{n: sum(counts) for n, counts in result["scaled"].items()})
    if "privacy" in result:
        tags["privacy"] = labels.describe_privacy(**result["privacy"])
    return tags


def _list_round_metrics(rounds: pl.DataFrame) -> Iterator[tuple[int, str, float]]:
    """Yield step, name and value of each metric of these rounds."""
    for row in rounds.iter_rows(named=True):
        step = row.pop("step")
        yield from ((step, f"train/{name}", value) for name, value in row.items() if value is not None)


def _list_monitor_metrics(rows: pl.DataFrame, first_step: int, learned: int) -> Iterator[tuple[int, str, float]]:
    """Yield step, name and value of each monitor: a round's at its step, a task's at the number of tasks learned."""
    for row in rows.iter_rows(named=True):
        step = learned if row["round"] is None else first_step + row["round"]
        yield step, _name_monitor_metric(row["monitor"], row["layer"], row["about"]), row["value"]


def _name_monitor_metric(monitor: str, layer: str | None, about: int | None) -> str:
    """Return the metric's name, in which tasks are numbered from 1."""
    task = None if about is None else f"task-{about + 1}"
    if monitor in ("used_share", "accuracy"):
        overall = {"used_share": "mean", "accuracy": "all-so-far"}
        return f"{monitor}/{layer or task or overall[monitor]}"
    name = monitor if monitor == "drift" else f"oracle/{monitor}"
    return name if task is None else f"{name}/{task}"
