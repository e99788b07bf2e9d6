"""A stream that grows: arrivals in `arrivals.incoming` are taken in, learned, registered and gated, in their order.

    take in -> version -> learn -> conclude -> evaluate, judge -> publish, track -> register

A run of the flow looks for arrivals once and ends. The next run resumes one that was stopped: data/streams has the
tasks that were taken in, the store those that were learned, MLflow those that were registered.

A task starts from the newest state, even where code or settings have changed since that was learned: the store finds
the outcomes of a task by the splits up to it, method, seed and model. If one of these changes, learning starts anew.
"""

import asyncio
import signal
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from mlflow import MlflowClient
from prefect import flow
from prefect.client.schemas.schedules import CronSchedule
from prefect.runner import Runner
from prefect.types.entrypoint import EntrypointType

from fclmodels.data.arrivals.arrival_folders import ArrivedFolder, list_arrived
from fclmodels.data.arrivals.growing_stream import GrowingStream, StreamPart, assemble, join_parts
from fclmodels.data.sources.image_folder import ImageFolder
from fclmodels.data.splits.split_reader import Splits
from fclmodels.data.streams.arrival import Arrival
from fclmodels.errors import UserError
from fclmodels.experiment import gate
from fclmodels.experiment.experiment import Experiment
from fclmodels.experiment.run_folder import gather_tables, refuse_foreign
from fclmodels.federation.engine.checkpoints import Checkpoints
from fclmodels.settings.load import follow_seed, load_params
from fclmodels.settings.schema import ImageSettings, Params
from fclmodels.storage.digests import digest_json
from fclmodels.storage.files import lock_file
from fclmodels.storage.object_store import Store
from flows.cli.progress import SilentProgress, create_progress
from flows.cli.terminal import format_percent, tell
from flows.experiment import run_task
from flows.prefect.environment import HOME
from flows.prefect.killed_runs import end_killed_runs
from tasks.arrivals import STREAMS, add_to_dvc, take_in
from tasks.caching import Outcome, run_cached
from tasks.evaluation import judge, summarise_tasks
from tasks.mlflow.connection import create_database, report_unreachable
from tasks.mlflow.registry import announce, has_verdict, register
from tasks.mlflow.runs import Tracking, log_result, track_experiment
from tasks.reporting import publish, show_matrix
from tasks.training import begin

Row = dict[str, Any]
ABANDONED = 30.0  # days without use, after which unreferenced objects and checkpoints are deleted


@flow(name="stream")
def stream(params: Path = Path("params.yaml"), overrides: Sequence[str] = (), quiet: bool = False) -> list[Row]:
    """Learn all new arrivals; return a row for each: champion, challenger or set aside, with the reason."""
    settings = adapt_to_arrivals(load_params(params, overrides))
    name = settings.arrivals.name
    with lock_file(HOME / "locks" / f"stream-{name}", lambda: tell(f"{name}: waiting for another fcl stream")):
        if killed := end_killed_runs():
            announce(name, "taken-over", ", ".join(killed), ["killed before its end; this run does its work"])
        return list(StreamLearner(settings, quiet).learn_all())


def serve(cron: str, params: Path, overrides: Sequence[str], quiet: bool) -> None:
    """Run the flow on a schedule in this process until Ctrl-C or SIGTERM, one run at a time."""
    try:
        CronSchedule(cron=cron)
    except ValueError:
        right = 'minute, hour, day, month, weekday, as "0 2 * * *"'
        raise UserError(f'--cron: "{cron}" is not a schedule. Right: {right}.') from None
    name = adapt_to_arrivals(load_params(params, overrides)).arrivals.name
    runner = ScheduleRunner(name=name, limit=1)
    runner.add_flow(
        stream,
        name=name,
        cron=cron,
        parameters={"params": params, "overrides": list(overrides), "quiet": quiet},
        entrypoint_type=EntrypointType.MODULE_PATH,
    )
    with suppress(KeyboardInterrupt):
        tell(f"{name}: looks for arrivals at {cron} (UTC); Ctrl-C ends it", quiet)
        asyncio.run(runner.start())


class ScheduleRunner(Runner):
    """A Prefect runner that ends on SIGTERM as it does on Ctrl-C."""

    def handle_sigterm(self, *_: object) -> None:
        """Interrupt instead: Prefect's own handler does not wait for the processes that it stops."""
        signal.raise_signal(signal.SIGINT)


def adapt_to_arrivals(params: Params) -> Params:
    """Return the settings with the arrivals as data and stream; raise UserError where they do not fit a stream."""
    if not isinstance(params.data, ImageSettings):
        raise UserError(f"data.source: {params.data.source} has no images, and arrivals are images. Use image-folder.")
    if params.partition.val == 0:
        raise UserError("partition.val is 0, and the gate judges models by val rows. Set it above 0, such as 0.1.")
    if not isinstance(params.federation.rounds, int):
        raise UserError("federation.rounds lists tasks, and a stream has no last one. Give one number for all tasks.")
    shared = {name: getattr(params.data, name) for name in ImageSettings.model_fields}
    data = shared | {"source": ImageFolder.name, "root": params.arrivals.incoming}
    blocks = {"data": ImageFolder.Settings(**data), "stream": Arrival.Settings(kind=Arrival.name)}
    return follow_seed(params.model_copy(update=blocks), params.arrivals.seed)


def identify_version(settings: Params, parts: Sequence[StreamPart]) -> tuple[dict[str, str], str]:
    """Return tags of the model version that has learned these parts, and the key that identifies it."""
    arrivals = settings.arrivals
    tags = {"method": arrivals.method, "seed": str(arrivals.seed), "splits": join_parts(parts)[1]["digest"]}
    return tags, digest_json({"stream": arrivals.name, **tags, "model": settings.model.model_dump(mode="json")})


class StreamLearner:
    """Learns the tasks of a stream with one method.

    outcomes_by_task: the outcomes of the steps of each task that is learned and registered.
    """

    def __init__(self, settings: Params, quiet: bool) -> None:
        self.settings = settings
        self.quiet = quiet
        self.name = settings.arrivals.name
        self.folder = Path("streams") / self.name
        self.growing = GrowingStream(STREAMS / self.name)
        self.store = Store(HOME / "store")
        self.outcomes_by_task: list[list[Outcome]] = []
        refuse_foreign(self.folder)
        assert isinstance(settings.data, ImageSettings)
        self.growing.refuse_other(settings.data, settings.partition.clients)
        with report_unreachable(settings.tracking.uri):
            create_database(settings.tracking.uri)  # before a client, which would create one that a kill spoils
            self.registry = MlflowClient(settings.tracking.uri)
            self.registry.search_registered_models(max_results=1)

    @property
    def outcomes(self) -> list[Outcome]:
        """The outcomes of all tasks so far, in order."""
        return [outcome for outcomes in self.outcomes_by_task for outcome in outcomes]

    def learn_all(self) -> Iterator[Row]:
        """Complete the tasks that were taken in, then take in and learn one arrival after the other."""
        for part in self.growing.parts:
            yield from self.complete(part)
        while arrival := next(filter(self.is_new, list_arrived(self.settings.arrivals.incoming)), None):
            try:
                part = take_in(self.growing, arrival, arrival.name, self.settings)
            except UserError as mistake:
                yield self.set_aside(arrival, str(mistake))
            else:
                yield from self.complete(part)

    def is_new(self, arrival: ArrivedFolder) -> bool:
        return not self.growing.has(arrival)

    def set_aside(self, arrival: ArrivedFolder, reason: str) -> Row:
        """Announce that an arrival cannot be learned, note the reason in its folder, and return its row."""
        announce(self.name, "set-aside", arrival.name, [reason])
        arrival.set_aside(reason)
        tell(f"{self.name}: {arrival.name} is set aside: {reason}", self.quiet)
        return make_row(arrival.name, {}, "set aside", reason)

    def complete(self, part: StreamPart) -> Iterator[Row]:
        """Learn and register a task as far as that is not done yet; yield its row if it is registered here."""
        arrivals, parts = self.settings.arrivals, self.growing.parts[: part.number]
        tags, key = identify_version(self.settings, parts)
        record = self.store.recall(key)
        with report_unreachable(self.settings.tracking.uri):
            is_registered = has_verdict(self.registry, self.name, key)
        if record and is_registered:
            self.outcomes_by_task.append(record["outcomes"])
            return
        add_to_dvc(self.growing.folder)
        folder = assemble(parts, HOME / "streams" / self.name)
        with Experiment(self.settings, arrivals.method, arrivals.seed, Splits.open(folder), HOME) as run:
            tracking, result = self.learn(run, key, record)
        if tracking.pending:
            raise UserError(f"{self.name}: {part.name} is learned and stored. The next fcl stream registers it.")
        if is_registered:  # only the state had been lost
            return
        verdict = gate.judge(gather_tables(self.store, self.outcomes, ("val_accuracy",))["val_accuracy"], arrivals.gate)
        test = result["metrics"][gate.READING]
        metrics = {
            "acc": test["acc"],
            "forgetting": test["fgt"],
            "val_acc": verdict.acc,
            "val_forgetting": verdict.forgetting,
        }
        tags |= {name: f"{value:.4f}" for name, value in metrics.items() if value is not None}
        with report_unreachable(self.settings.tracking.uri):
            registered = register(self.registry, self.name, part.number, key, tracking.id, tags, verdict)
        tell("{}: version {version} is the {became}. {why}".format(self.name, **registered).rstrip(" "), self.quiet)
        self.drop_old_states()
        yield make_row(part.name, metrics, **registered)

    def drop_old_states(self) -> None:
        """Delete states but for the newest and, to fall back on, the one before; all tables and knowledge stay."""
        before = list_objects(self.outcomes)
        for task, outcomes in enumerate(self.outcomes_by_task[:-2]):
            stateless = [drop_states(outcome) for outcome in outcomes]
            if stateless != outcomes:
                self.outcomes_by_task[task] = stateless
                self.record(identify_version(self.settings, self.growing.parts[: task + 1])[1], stateless)
        for key in self.store.forget(before - list_objects(self.outcomes)):
            (HOME / "results" / key).unlink(missing_ok=True)
        self.store.drop_abandoned(ABANDONED)
        Checkpoints.drop_abandoned(HOME / "checkpoints", ABANDONED)

    def record(self, key: str, outcomes: list[Outcome]) -> None:
        """Store the outcomes of one task's steps under the key of its version."""
        self.store.record(key, {"outcomes": outcomes, "objects": dict(enumerate(sorted(list_objects(outcomes))))})

    def learn(self, run: Experiment, key: str, record: Outcome | None) -> tuple[Tracking, dict[str, Any]]:
        """Run the last task's steps unless they are recorded, publish, track; return the tracking and result.json."""
        rounds = [run.method.run.count_rounds(task) for task in range(run.tasks)]
        run.listener = progress = create_progress(f"{self.name}, {run.label}", rounds, self.quiet)
        name = self.settings.tracking.experiment or f"stream {self.name}"
        settings = self.settings.tracking.model_copy(update={"experiment": name})
        with track_experiment(run, settings, HOME, tell) as tracking, progress:
            outcomes = record["outcomes"] if record else self.run_steps(run, progress)
            self.record(key, outcomes)
            self.outcomes_by_task.append(outcomes)
            learned = [outcome for outcome in self.outcomes if outcome["stage"] == "learn"]
            for tasks, outcome in enumerate(learned, start=1):
                table = self.store.get_table(outcome["objects"]["rounds"])
                summary = summarise_tasks(self.store, self.outcomes, tasks)
                tracking.log_task(tasks, table, summary, run.collect_monitors(self.outcomes))
            summary = summarise_tasks(self.store, self.outcomes, run.tasks)
            progress.on_task_learned(run.tasks - 1, summary, record is not None)
            result = publish(run, run.label, self.outcomes, self.folder)
            show_matrix(self.name, self.folder)
            log_result(tracking, run.label, self.folder, result)
        return tracking, result

    def run_steps(self, run: Experiment, progress: SilentProgress) -> list[Outcome]:
        """Run the last task's steps from the state after the task before; return their outcomes."""
        task = run.tasks - 1
        first = [] if task else [run_cached(begin, run.step("begin", None, 0), f"{run.label}: begin")]
        before = ("conclude", task - 1) if task else ("begin", 0)
        (start,) = (o for o in [*self.outcomes, *first] if (o["stage"], o["task"]) == before)
        if "state" not in start["objects"]:
            raise UserError(
                f"{self.name}: the state after task {task} is gone, and none is left to learn it from. Delete "
                f"{self.store.root / 'done'} to learn all tasks again."
            )
        learned, concluded, evaluated = run_task(run, start["objects"]["state"], task)
        for remark in run.list_remarks(concluded):
            progress.remark(remark)
        state = concluded["objects"]["state"]
        judged = run_cached(judge, run.step("judge", state, task + 1), f"{run.label}: judge after {task + 1} tasks")
        return [*first, learned, concluded, evaluated, judged]


def list_objects(outcomes: Sequence[Outcome]) -> set[str]:
    """Return the digests of all objects of the store that these outcomes name."""
    return {digest for outcome in outcomes for digest in outcome["objects"].values()}


def drop_states(outcome: Outcome) -> Outcome:
    """Return the outcome with its tables and knowledge alone."""
    objects = {n: d for n, d in outcome["objects"].items() if n != "state" and not n.startswith("memory-")}
    return {**outcome, "objects": objects}


def make_row(task: str, metrics: dict[str, float | None], became: str, why: str, version: str | None = None) -> Row:
    """Return a task's row: its status, accuracy and forgetting on test rows, and those on val rows for the gate."""
    numbers = {name: metrics.get(name) for name in ("acc", "forgetting", "val_acc", "val_forgetting")}
    return {"task": task, "became": became, "version": version, **numbers, "why": why}


def format_rows(rows: Sequence[Row]) -> list[Row]:
    """Return the rows with shares in percent."""
    return [{n: format_percent(v) if isinstance(v, float) else v for n, v in row.items()} for row in rows]
