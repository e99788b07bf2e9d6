"""A stream that goes on: what arrived in `arrivals.incoming` is taken in, learned, registered and gated, in its order.

    take in -> version -> learn -> conclude -> evaluate, judge -> publish, track -> register

A run of the flow looks once and ends. Where one was stopped the next goes on: what was taken in stands in data/streams,
what was learned in the store, what was registered in MLflow, and each is asked before it is done again.

A task starts from the newest state, even where code or settings were changed after that was learned: the store knows
the outcomes of a task by the splits that end with it, method, seed and model. Another one of these begins anew.
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

from fclmodels import gate
from fclmodels.data.growing import GrowingStream, Part, assembled, joined
from fclmodels.data.incoming import Arrived, arrived
from fclmodels.data.sources.image_folder import ImageFolder
from fclmodels.data.splits import Splits
from fclmodels.data.streams.arrival import Arrival
from fclmodels.errors import UserError
from fclmodels.experiment import Experiment, digest_of
from fclmodels.federation.checkpoints import Checkpoints
from fclmodels.params import load
from fclmodels.run_folder import gathered, refuse_foreign
from fclmodels.settings import ImageSettings, Params
from fclmodels.store import Store
from flows.environment import HOME
from flows.experiment import one_task
from flows.progress import Silent, watch
from flows.terminal import percent, tell
from tasks.arrivals import STREAMS, take_in, version
from tasks.caching import Outcome, through_store
from tasks.evaluation import judge, so_far
from tasks.locking import locked
from tasks.registry import announce, gated, register
from tasks.reporting import publish, show_matrix
from tasks.tracking import Tracking, track, tracked
from tasks.tracking_store import asked, set_up
from tasks.training import begin

Row = dict[str, Any]
ABANDONED = 30.0  # days


@flow(name="stream")
def stream(params: Path = Path("params.yaml"), overrides: Sequence[str] = (), quiet: bool = False) -> list[Row]:
    """Everything that has arrived and is not learned yet; what became of each."""
    settings = for_arrivals(load(params, overrides))
    name = settings.arrivals.name
    with locked(HOME / "locks" / f"stream-{name}", lambda: tell(f"{name}: another fcl stream is at it; waiting")):
        return list(Line(settings, quiet).go_on())


def serve(cron: str, params: Path, overrides: Sequence[str], quiet: bool) -> None:
    """The flow as a deployment of this process, started by the clock until Ctrl-C or SIGTERM, never twice at once."""
    try:
        CronSchedule(cron=cron)
    except ValueError:
        right = 'minute, hour, day, month, weekday, as "0 2 * * *"'
        raise UserError(f'--cron: "{cron}" is no schedule. Right: {right}.') from None
    name = for_arrivals(load(params, overrides)).arrivals.name
    clock = Clock(name=name, limit=1)
    clock.add_flow(
        stream,
        name=name,
        cron=cron,
        parameters={"params": params, "overrides": list(overrides), "quiet": quiet},
        entrypoint_type=EntrypointType.MODULE_PATH,
    )
    with suppress(KeyboardInterrupt):
        tell(f"{name}: looks for arrivals at {cron} (UTC); Ctrl-C ends it", quiet)
        asyncio.run(clock.start())


class Clock(Runner):
    def handle_sigterm(self, *_: object) -> None:
        """As Ctrl-C: Prefect's own way forgets to wait for what it stops."""
        signal.raise_signal(signal.SIGINT)


def for_arrivals(params: Params) -> Params:
    """The settings, with what arrives as data and stream; refused where they cannot be those of a stream."""
    if not isinstance(params.data, ImageSettings):
        raise UserError(f"data.source: {params.data.source} has no images, and arrivals are images. Use image-folder.")
    if params.partition.val == 0:
        raise UserError("partition.val is 0, and the gate judges models by val rows. Set it above 0, such as 0.1.")
    if not isinstance(params.federation.rounds, int):
        raise UserError("federation.rounds lists tasks, and a stream has no last one. Give one number for all tasks.")
    of_images = {name: getattr(params.data, name) for name in ImageSettings.model_fields}
    data = of_images | {"source": ImageFolder.name, "root": params.arrivals.incoming}
    changed = {"data": ImageFolder.Settings(**data), "stream": Arrival.Settings(kind=Arrival.name)}
    return params.model_copy(update=changed)


def known_by(settings: Params, parts: Sequence[Part]) -> tuple[dict[str, str], str]:
    """Tags of the version that has learned these parts, and the key that it is found again by."""
    of = settings.arrivals
    tags = {"method": of.method, "seed": str(of.seed), "splits": joined(parts)[1]["digest"]}
    return tags, digest_of({"stream": of.name, **tags, "model": settings.model.model_dump(mode="json")})


class Line:
    """A stream as one method learns it: what is done, and what comes next."""

    def __init__(self, settings: Params, quiet: bool) -> None:
        self.settings = settings
        self.quiet = quiet
        self.name = settings.arrivals.name
        self.folder = Path("streams") / self.name
        self.growing = GrowingStream(STREAMS / self.name)
        self.store = Store(HOME / "store")
        self.by_task: list[list[Outcome]] = []
        refuse_foreign(self.folder)
        assert isinstance(settings.data, ImageSettings)
        self.growing.refuse_other(settings.data, settings.partition.clients)
        with asked(settings.tracking.uri):
            set_up(settings.tracking.uri)  # before there is a client, which would make the database in its place
            self.registry = MlflowClient(settings.tracking.uri)
            self.registry.search_registered_models(max_results=1)

    @property
    def outcomes(self) -> list[Outcome]:
        """Of all tasks so far."""
        return [outcome for outcomes in self.by_task for outcome in outcomes]

    def go_on(self) -> Iterator[Row]:
        """Finish what was taken in, then take in and learn one arrival after the other."""
        for part in self.growing.parts:
            yield from self.finish(part)
        while arrival := next(filter(self.is_new, arrived(self.settings.arrivals.incoming)), None):
            try:
                part = take_in(self.growing, arrival, arrival.name, self.settings)
            except UserError as mistake:
                yield self.set_aside(arrival, str(mistake))
            else:
                yield from self.finish(part)

    def is_new(self, arrival: Arrived) -> bool:
        return not self.growing.has(arrival)

    def set_aside(self, arrival: Arrived, reason: str) -> Row:
        announce(self.name, "set-aside", arrival.name, [reason])
        arrival.set_aside(reason)
        tell(f"{self.name}: {arrival.name} is set aside: {reason}", self.quiet)
        return row(arrival.name, {}, "set aside", reason)

    def finish(self, part: Part) -> Iterator[Row]:
        """Learn and register a task as far as that is not done; what became of it, where anything was done."""
        arrivals, parts = self.settings.arrivals, self.growing.parts[: part.number]
        tags, key = known_by(self.settings, parts)
        known = self.store.recall(key)
        with asked(self.settings.tracking.uri):
            done = gated(self.registry, self.name, key)
        if known and done:
            self.by_task.append(known["outcomes"])
            return
        version(self.growing.folder)
        folder = assembled(parts, HOME / "streams" / self.name)
        with Experiment(self.settings, arrivals.method, arrivals.seed, Splits.open(folder), HOME) as run:
            tracking, result = self.learn(run, key, known)
        if tracking.waiting:
            raise UserError(f"{self.name}: {part.name} is learned and kept. The next fcl stream registers it.")
        if done:  # only the state had been lost
            return
        verdict = gate.judge(gathered(self.store, self.outcomes, ("val_accuracy",))["val_accuracy"], arrivals.gate)
        of_test = result["metrics"][gate.READING]
        measured = {
            "acc": of_test["acc"],
            "forgetting": of_test["fgt"],
            "val_acc": verdict.acc,
            "val_forgetting": verdict.forgetting,
        }
        tags |= {name: f"{value:.4f}" for name, value in measured.items() if value is not None}
        with asked(self.settings.tracking.uri):
            became = register(self.registry, self.name, part.number, key, tracking.id, tags, verdict)
        tell("{}: version {version} is the {became}. {why}".format(self.name, **became).rstrip(" "), self.quiet)
        self.forget()
        yield row(part.name, measured, **became)

    def forget(self) -> None:
        """Keep the newest state, and the one before to fall back on; of older tasks what the run folder is made of."""
        before = objects_of(self.outcomes)
        for task, outcomes in enumerate(self.by_task[:-2]):
            stateless = [without_states(outcome) for outcome in outcomes]
            if stateless != outcomes:
                self.by_task[task] = stateless
                self.keep(known_by(self.settings, self.growing.parts[: task + 1])[1], stateless)
        for key in self.store.forget(before - objects_of(self.outcomes)):
            (HOME / "results" / key).unlink(missing_ok=True)
        self.store.drop_abandoned(ABANDONED)
        Checkpoints.drop_abandoned(HOME / "checkpoints", ABANDONED)

    def keep(self, key: str, outcomes: list[Outcome]) -> None:
        """What one task's steps came to, for all that is done after it."""
        self.store.record(key, {"outcomes": outcomes, "objects": dict(enumerate(sorted(objects_of(outcomes))))})

    def learn(self, run: Experiment, key: str, known: Outcome | None) -> tuple[Tracking, dict[str, Any]]:
        """The last task's steps, then all that is left for people; its tracked run, and what result.json says."""
        rounds = [run.method.run.rounds(task) for task in range(run.tasks)]
        run.listener = watcher = watch(f"{self.name}, {run.label}", rounds, self.quiet)
        own = self.settings.tracking.experiment or f"stream {self.name}"
        settings = self.settings.tracking.model_copy(update={"experiment": own})
        with tracked(run, settings, HOME, tell) as tracking, watcher:
            outcomes = known["outcomes"] if known else self.steps(run, watcher)
            self.keep(key, outcomes)
            self.by_task.append(outcomes)
            learned = [outcome for outcome in self.outcomes if outcome["stage"] == "learn"]
            for tasks, outcome in enumerate(learned, start=1):
                table, metrics = self.store.get_table(outcome["objects"]["rounds"]), self.so_far(tasks)
                tracking.task_learned(tasks, table, metrics, run.monitored(self.outcomes))
            watcher.task_learned(run.tasks - 1, self.so_far(run.tasks), known is not None)
            result = publish(run, run.label, self.outcomes, self.folder)
            show_matrix(self.name, self.folder)
            track(tracking, run.label, self.folder, result)
        return tracking, result

    def steps(self, run: Experiment, watcher: Silent) -> list[Outcome]:
        """The outcomes of the last task's steps, from the state that the task before left."""
        task = run.tasks - 1
        begun = [] if task else [through_store(begin, run.step("begin", None, 0), label=run.label)]
        before = ("conclude", task - 1) if task else ("begin", 0)
        (start,) = (o for o in [*self.outcomes, *begun] if (o["stage"], o["task"]) == before)
        if "state" not in start["objects"]:
            raise UserError(
                f"{self.name}: the state after task {task} is gone, and none is left to learn it from. Delete "
                f"{self.store.root / 'done'} to learn all tasks again."
            )
        learned, concluded, evaluated = one_task(run, start["objects"]["state"], task)
        for remark in run.remarks(concluded):
            watcher.remark(remark)
        state = concluded["objects"]["state"]
        judged = through_store(judge, run.step("judge", state, task + 1), label=run.label, learned=task + 1)
        return [*begun, learned, concluded, evaluated, judged]

    def so_far(self, tasks: int) -> dict[str, dict[str, float | None]]:
        return so_far(self.store, self.outcomes, tasks)


def objects_of(outcomes: Sequence[Outcome]) -> set[str]:
    return {digest for outcome in outcomes for digest in outcome["objects"].values()}


def without_states(outcome: Outcome) -> Outcome:
    """With its tables and knowledge alone."""
    objects = {n: d for n, d in outcome["objects"].items() if n != "state" and not n.startswith("memory-")}
    return {**outcome, "objects": objects}


def row(task: str, measured: dict[str, float | None], became: str, why: str, version: str | None = None) -> Row:
    """What became of a task; accuracy and forgetting on test rows, and those on val rows that the gate saw."""
    numbers = {name: measured.get(name) for name in ("acc", "forgetting", "val_acc", "val_forgetting")}
    return {"task": task, "became": became, "version": version, **numbers, "why": why}


def for_people(rows: Sequence[Row]) -> list[Row]:
    """The same with shares in percent."""
    return [{n: percent(v) if isinstance(v, float) else v for n, v in told.items()} for told in rows]
