"""MLflow: one run for each method, data and seed, found again by its identity and never doubled.

All goes through MlflowClient with the run's id, in batches; there is no active run that a thread could miss.

Where MLflow stops answering while a run is at work, the run goes on and says so once. What is to be logged waits until
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

from fclmodels.errors import without_passwords
from fclmodels.experiment import Experiment, Stage, digest_of
from fclmodels.report import words
from fclmodels.settings import TrackingSettings
from tasks.locking import locked
from tasks.tracked_words import description, metrics_of, params_of
from tasks.tracking_store import UNREACHED, asked, experiment_named, reason, set_up

LAST_WORDS = 3.0  # seconds
BATCH = 100  # MLflow takes a thousand metrics at once, but only a hundred params or tags
IDENTITY, LEARNED, ERROR, RESULT = "fcl.identity", "fcl.learned", "fcl.error", "fcl.result"
COLUMNS = ("loss", "bytes_up", "bytes_down", "seconds")  # of rounds.parquet
FAULTS = ("answers", "late", "missing", "lost")  # where clients can fail
ONCE: tuple[Stage, ...] = ("begin", "conclude", "evaluate")


class Tracking:
    """The MLflow run of an experiment. waiting: what could not be logged yet, in order."""

    def __init__(self, client: MlflowClient, run: Run, faults: bool, tell: Callable[[str], None]) -> None:
        self.client = client
        self.tell = tell
        self.waiting: list[Callable[[], None]] = []
        self._told = False
        self.columns = COLUMNS + FAULTS * faults
        self.id: str = run.info.run_id
        self.began: int = run.info.start_time  # of all metrics: those that are logged again after a kill are the same
        self.complete: bool = run.info.status == "FINISHED"
        self.failed_before: bool = ERROR in run.data.tags
        self.learned = int(run.data.tags.get(LEARNED, -1))

    def begin(self, params: dict[str, str]) -> None:
        """The run goes on. Params once, for MLflow refuses to change them."""
        self.client.update_run(self.id, status="RUNNING")
        if self.failed_before:
            self.client.delete_tag(self.id, ERROR)
        if self.learned < 0:
            listed = [Param(name, value) for name, value in params.items()]
            for start in range(0, len(listed), BATCH):
                self.client.log_batch(self.id, params=listed[start : start + BATCH])
            self._learned(0)

    def task_learned(
        self,
        learned: int,
        rounds: pl.DataFrame,
        summary: dict[str, dict[str, float | None]],
        monitored: pl.DataFrame | None = None,
    ) -> None:
        """The rounds of the last task, and the metrics of all tasks so far; once, also when the run is resumed."""
        if learned <= self.learned:
            return
        now = self.began
        trained = rounds.select("step", *self.columns)
        metrics = [Metric(name, value, now, learned) for name, value in metrics_of(summary).items()]
        metrics += [Metric(name, value, now, step) for step, name, value in _of_rounds(trained)]
        if monitored is not None:
            last = monitored.filter(pl.col("task") == learned - 1)
            first = rounds["step"][0]
            metrics += [Metric(name, value, now, step) for step, name, value in _of_monitors(last, first, learned)]
        self.deliver(partial(self._log, learned, metrics))

    def deliver(self, log: Callable[[], None]) -> None:
        """Log this after all that waits; it waits too where MLflow does not answer."""
        self.waiting.append(log)
        try:
            while self.waiting:
                self.waiting[0]()
                del self.waiting[0]
        except UNREACHED as problem:
            if not self._told:
                self.tell(
                    f"tracking.uri: {self.client.tracking_uri} stopped answering: {reason(problem)}. The run goes on; "
                    "what is not logged yet is kept, and logged as soon as it answers, or by the same command again."
                )
            self._told = True

    def failed(self, problem: BaseException) -> None:
        """Not waited for long: a signal may have cut off a query that still holds SQLite's lock."""
        thread = Thread(target=self._log_failure, args=(problem,), daemon=True)
        thread.start()
        thread.join(LAST_WORDS)

    def _log_failure(self, problem: BaseException) -> None:
        with suppress(*UNREACHED):  # what is told is the problem
            self.client.set_tag(self.id, ERROR, without_passwords(f"{type(problem).__name__}: {problem}")[:5000])
            self.client.set_terminated(self.id, "FAILED" if isinstance(problem, Exception) else "KILLED")

    def _log(self, learned: int, metrics: list[Metric]) -> None:
        for start in range(0, len(metrics), 10 * BATCH):
            self.client.log_batch(self.id, metrics=metrics[start : start + 10 * BATCH])
        self._learned(learned)

    def _learned(self, count: int) -> None:
        self.client.set_tag(self.id, LEARNED, str(count))
        self.learned = count


@contextmanager
def tracked(
    experiment: Experiment, settings: TrackingSettings, home: Path, tell: Callable[[str], None]
) -> Iterator[Tracking]:
    """The experiment's run: opened or found, and marked as failed where the block fails."""
    uri, params = settings.uri, experiment.params
    with asked(uri), locked(home / "locks" / "mlflow"):  # its database cannot be set up by two at once
        set_up(uri)
        client = MlflowClient(uri)
        name = settings.experiment or f"{params.data.source} {params.stream.kind}"
        run = _run_of(client, experiment, experiment_named(client, uri, name))
        tracking = Tracking(client, run, params.federation.faults.on, tell)
        if not tracking.complete:
            tracking.begin(params_of(experiment.settings, _method(experiment), experiment.seed))
    try:
        yield tracking
    except BaseException as problem:
        if not tracking.complete:
            tracking.failed(problem)
        raise


@task(name="track", task_run_name="{label}: track", cache_policy=NO_CACHE)
def track(tracking: Tracking, label: str, folder: Path, result: dict[str, Any]) -> None:
    """Totals, tables, figure, knowledge and model of a finished run; nothing where MLflow has them already."""
    if not tracking.complete:
        tracking.deliver(partial(_finish, tracking, folder, result))


def _finish(tracking: Tracking, folder: Path, result: dict[str, Any]) -> None:
    from tasks.tracked_artifacts import log_artifacts  # draws and packs: only where there is something to log

    now = tracking.began
    totals = {name: result[name] for name in ("seconds", "bytes_up", "bytes_down", "bytes_kept")}
    metrics = [Metric(f"total/{n}", v, now, 0) for n, v in totals.items()]
    if "rounds_to_best" in result:
        metrics.append(Metric("total/rounds_to_best", result["rounds_to_best"], now, 0))
    if "privacy" in result:
        metrics.append(Metric("epsilon", result["privacy"]["epsilon"], now, 0))
    tags = [RunTag(name, text) for name, text in _tags(result, tracking.id).items()]
    tracking.client.log_batch(tracking.id, metrics=metrics, tags=tags)
    log_artifacts(tracking.client, tracking.id, folder)
    tracking.client.set_terminated(tracking.id, "FINISHED")


def identity_of(experiment: Experiment) -> str:
    """A digest of all that the experiment's result depends on: the keys of its steps from nowhere."""
    keys = [experiment.step("learn", None, task).key for task in range(experiment.tasks)]
    keys += [experiment.step(stage, None, 0).key for stage in ONCE]
    return digest_of(keys)


def _run_of(client: MlflowClient, experiment: Experiment, experiment_id: str) -> Run:
    identity = identity_of(experiment)
    found = client.search_runs([experiment_id], f"tags.`{IDENTITY}` = '{identity}'", max_results=1)
    if found and found[0].inputs and found[0].inputs.dataset_inputs:
        return found[0]
    params, method, seed = experiment.params, _method(experiment), experiment.seed
    name = f"{method} seed {seed}"
    tags = {
        IDENTITY: identity,
        "method": method,
        "seed": str(seed),
        "scenario": f"{params.data.source}, {params.stream.kind}, {params.partition.kind}",
        "tasks": str(experiment.tasks),
        "splits": experiment.splits.digest,
        "mlflow.source.type": "LOCAL",
        "mlflow.source.name": f"fcl run --method {method} --seed {seed}",
        **origin(),
    }
    if experiment.splits.grows:  # a run for each number of tasks
        name += f", {experiment.tasks} tasks"
        tags["mlflow.source.name"] = "fcl stream"
    run = found[0] if found else client.create_run(experiment_id, run_name=name, tags=tags)
    client.log_inputs(run.info.run_id, [_dataset(experiment)])
    return run


def _method(experiment: Experiment) -> str:
    return experiment.label.rpartition("-")[0]


def _dataset(experiment: Experiment) -> DatasetInput:
    splits = experiment.splits
    name = f"{experiment.params.data.source}-splits"
    dataset = Dataset(name, splits.digest[:36], "local", f'{{"uri": "{splits.folder.resolve().as_uri()}"}}')
    return DatasetInput(dataset, [InputTag("mlflow.data.context", "training")])


def origin() -> dict[str, str]:
    """Where the run comes from: the commit, and the DVC stage that started it."""
    tags = {"dvc.stage": os.environ.get("DVC_STAGE", ""), "dvc.experiment": os.environ.get("DVC_EXP_NAME", "")}
    if git := shutil.which("git"):
        head = subprocess.run([git, "rev-parse", "--verify", "-q", "HEAD"], capture_output=True, text=True, check=False)
        tags["mlflow.source.git.commit"] = head.stdout.strip()
    return {name: value for name, value in tags.items() if value}


def _tags(result: dict[str, Any], run: str) -> dict[str, str]:
    """What only the result tells, where it does: its digest, whose preset, how many rounds of how many, privacy."""
    tags = {RESULT: digest_of(result["digests"]), "mlflow.note.content": description(result, run)[:5000]}
    if "preset" in result:
        tags["preset"] = result["preset"]["name"]
    if "scaled" in result:
        tags["scaled"] = "{rounds} of {of} rounds".format(**{n: sum(counts) for n, counts in result["scaled"].items()})
    if "privacy" in result:
        tags["privacy"] = words.privacy(**result["privacy"])
    return tags


def _of_rounds(rounds: pl.DataFrame) -> Iterator[tuple[int, str, float]]:
    for row in rounds.iter_rows(named=True):
        step = row.pop("step")
        yield from ((step, f"train/{name}", value) for name, value in row.items() if value is not None)


def _of_monitors(rows: pl.DataFrame, first_step: int, learned: int) -> Iterator[tuple[int, str, float]]:
    """A round's rows at its step, those of a task at the number of tasks learned; tasks' numbers begin at 1."""
    for row in rows.iter_rows(named=True):
        step = learned if row["round"] is None else first_step + row["round"]
        yield step, _name_of_monitor(row["monitor"], row["layer"], row["about"]), row["value"]


def _name_of_monitor(monitor: str, layer: str | None, about: int | None) -> str:
    task = None if about is None else f"task-{about + 1}"
    if monitor in ("used_share", "accuracy"):
        whole = {"used_share": "mean", "accuracy": "all-so-far"}
        return f"{monitor}/{layer or task or whole[monitor]}"
    name = monitor if monitor == "drift" else f"oracle/{monitor}"
    return name if task is None else f"{name}/{task}"
