"""One method, one seed, all tasks in turn: the steps of an experiment, each named by what its result depends on.

begin -> evaluate(0) -> for each task: learn -> conclude -> evaluate. A step that the store holds is not done again;
a task whose training was interrupted goes on from its last checkpoint. Prefect chains the same steps (flows/), and
where a gate asks for it one more: judge, the same as evaluate on val rows.
"""

import hashlib
import json
import os
import shutil
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import polars as pl
import torch

from fclmodels import params as reading
from fclmodels import plugins, run_folder
from fclmodels.data.splits import Splits
from fclmodels.federation import attacks, evaluation, inspection, private, rounds
from fclmodels.federation.checkpoints import Checkpoints
from fclmodels.federation.choice import Choice, choose
from fclmodels.federation.cohort import Cohort
from fclmodels.federation.executor import EVALUATIONS, Executor, Serial, torch_threads
from fclmodels.federation.ledger import Ledger, ledger_table
from fclmodels.federation.processes import Processes
from fclmodels.federation.run import Run
from fclmodels.federation.secure import refuse_what_needs_more
from fclmodels.federation.server import Server
from fclmodels.fingerprint import source_closure
from fclmodels.listener import Listener
from fclmodels.settings import Params
from fclmodels.state import Tree, write_json
from fclmodels.store import Store

if TYPE_CHECKING:
    from fclmodels.federation.monitors.watch import Watch

Stage = Literal["begin", "learn", "conclude", "evaluate", "judge"]
Outcome = dict[str, Any]
# Server mathematics has one fixed number of threads, whatever the clients have.
SERVER_THREADS = 1
MONITORS = "fclmodels.federation.monitors.watch"  # imported only where one is switched on


@dataclass(frozen=True)
class Step:
    """One step; `key` is a digest of all that its outcome depends on."""

    experiment: "Experiment"
    stage: Stage
    state: str | None
    task: int
    key: str

    def done(self) -> Outcome | None:
        """The outcome where the store holds it and every object it names."""
        outcome = self.experiment.store.recall(self.key)
        if outcome is not None:  # a kill may have come between the record and the end of the checkpoints
            shutil.rmtree(self.experiment.checkpoint_folder(self), ignore_errors=True)
        return outcome

    def run(self) -> Outcome:
        """Do it, record the outcome, and drop the checkpoints that led to it."""
        with torch_threads(SERVER_THREADS):
            objects, seconds = getattr(self.experiment, f"_{self.stage}")(self)
        outcome = {"stage": self.stage, "task": self.task, "objects": objects, "seconds": seconds}
        self.experiment.store.record(self.key, outcome)
        shutil.rmtree(self.experiment.checkpoint_folder(self), ignore_errors=True)
        return outcome


class Experiment:
    def __init__(
        self,
        params: Params,
        method: str,
        seed: int,
        splits: Splits,
        home: Path = Path(".fcl"),
        listener: Listener | None = None,
    ) -> None:
        kind = plugins.find("method", method)
        self.params = params
        self.seed = seed
        self.splits = splits
        self.home = Path(home)
        self.listener = listener or Listener()
        self.store = Store(self.home / "store")
        self.method = kind(reading.method_settings(params, method), Run.on(params, splits, seed, self.home))
        refuse_what_needs_more(self.method)
        private.refuse_what_is_not_covered(self.method)
        attacks.refuse_what_alters_nothing(self.method)
        self.label = f"{method}-{seed}"
        self.tasks = len(splits.tasks)
        self._identity = self._what_all_steps_depend_on()
        self.choice = choose(self.method, self.home / "choices", digest_of(self._identity))
        self._executor: Executor | None = None

    def __enter__(self) -> "Experiment":
        return self

    def __exit__(self, *_: object) -> None:
        if self._executor is not None:
            self._executor.close()
        self._workers_params.unlink(missing_ok=True)

    @property
    def settings(self) -> dict[str, Any]:
        """The effective settings, with what `auto` became."""
        settings = reading.effective(self.params, type(self.method).name)
        chosen = {"executor": self.choice.executor, "workers": self.choice.workers, "threads": self.choice.threads}
        settings["federation"] = {**settings["federation"], **chosen}
        settings["device"] = str(self.method.run.device)
        return settings

    @property
    def code(self) -> str:
        """Digest of the source that training depends on."""
        return str(self._identity["code"])

    def run(self, folder: Path) -> dict[str, Any]:
        """Every step that is not done yet, in turn, then the run folder; returns what result.json says."""
        run_folder.refuse_foreign(Path(folder))
        outcomes = []

        def outcome_of(stage: Stage, state: str | None, task: int) -> Outcome:
            step = self.step(stage, state, task)
            outcomes.append(step.done() or step.run())
            return outcomes[-1]

        state = outcome_of("begin", None, 0)["objects"]["state"]
        outcome_of("evaluate", state, 0)
        for task in range(self.tasks):
            state = outcome_of("learn", state, task)["objects"]["state"]
            state = outcome_of("conclude", state, task)["objects"]["state"]
            outcome_of("evaluate", state, task + 1)
        return self.publish(folder, outcomes)

    def step(self, stage: Stage, state: str | None, task: int) -> Step:
        """A step from a state (None before `begin`); for `evaluate` and `judge`, `task` is how many are learned."""
        depends_on = {**self._identity, "threads": self.choice.threads, "stage": stage, "state": state, "task": task}
        if stage == "learn":
            depends_on["rounds"] = self.method.run.rounds(task)
        monitors = self.params.monitors
        of_rounds = monitors.of_rounds and [*monitors.of_rounds, monitors.every, self.params.evaluation.batch_size]
        if watched := {"learn": of_rounds, "conclude": monitors.used_share}.get(stage):
            depends_on["monitors"] = [watched, source_closure(MONITORS)]
        if stage in EVALUATIONS:
            depends_on["evaluation"] = self.params.evaluation.model_dump(mode="json")
            depends_on["code"] = [depends_on["code"], source_closure(evaluation.__name__)]
        return Step(self, stage, state, task, digest_of(depends_on))

    def publish(self, folder: Path, outcomes: list[Outcome]) -> dict[str, Any]:
        """Write the run folder from what the steps left in the store; returns what result.json says."""
        return run_folder.publish(self, Path(folder), outcomes)

    def remarks(self, concluded: Outcome) -> list[str]:
        """What the method has to say of what it knows after a task."""
        return self.method.remarks(self.store.get(concluded["objects"]["knowledge"]))

    def monitored(self, outcomes: list[Outcome]) -> pl.DataFrame | None:
        """What monitors saw in these steps of the first tasks; None where that is nothing."""
        tables = run_folder.gathered(self.store, outcomes, ("monitors", "rounds"))
        if "monitors" not in tables or tables["monitors"].is_empty():
            return None
        from fclmodels.federation.monitors.theorem2 import with_bounds

        return with_bounds(tables["monitors"], tables["rounds"], self.params.optimizer.lr)

    def checkpoint_folder(self, step: Step) -> Path:
        return self.home / "checkpoints" / step.key

    # The five stages. Each takes a step and returns the objects that it put into the store, and its seconds.

    def _begin(self, step: Step) -> tuple[dict[str, str], float]:
        started = time.perf_counter()
        return self._keep(self.method.setup(), {}), time.perf_counter() - started

    def _learn(self, step: Step) -> tuple[dict[str, str], float]:
        server, memories, _ = self._state(step)
        checkpoints = Checkpoints(self.checkpoint_folder(step))
        try:
            watch = self._watch(step.task, checkpoints, server)
            look = watch.look if watch else None
            position = rounds.learn(
                self.method, server, memories, step.task, self.executor, checkpoints, self.listener, look
            )
            held = Ledger(checkpoints.ledger).held(self.method.payload(position.server))
            objects = self._keep(position.server, position.memories, held)
            if watch:
                watch.task_learned(position.server)
                objects["monitors"] = self.store.put_table(watch.table())
            table = rounds.rounds_table(checkpoints.rounds)
            objects["rounds"] = self.store.put_table(table)
            objects["ledger"] = self.store.put_table(ledger_table(checkpoints.ledger))
            return objects, float(table["seconds"].sum())
        finally:
            checkpoints.close()

    def _conclude(self, step: Step) -> tuple[dict[str, str], float]:
        started = time.perf_counter()
        server, memories, held = self._state(step)
        checkpoints = Checkpoints(self.checkpoint_folder(step))
        try:
            clients = self.method.participants(step.task)
            ledger = Ledger(checkpoints.ledger, held)
            aside = inspection.set_aside(server, self.params.federation.inspection)
            cohort = Cohort(self.executor, step.task, clients, memories, ledger, checkpoints, aside=aside)
            try:
                server = inspection.counted(self.method.finish_task(server, cohort), cohort.refused)
            finally:
                rounds.tell(cohort.refused, step.task, self.listener)
            objects = self._keep(server, cohort.memories)
            objects["ledger"] = self.store.put_table(ledger_table(checkpoints.ledger))
            objects["knowledge"] = self.store.put(server.knowledge)
            if self.params.monitors.used_share:
                from fclmodels.federation.monitors.used_share import used_shares

                shares = used_shares(server.knowledge.get("bases", {}), step.task)
                objects["monitors"] = self.store.put_table(shares)
            return objects, time.perf_counter() - started
        finally:
            checkpoints.close()

    def _evaluate(self, step: Step) -> tuple[dict[str, str], float]:
        started = time.perf_counter()
        tables = self._tables(step)
        objects = {"accuracy": self.store.put_table(tables.accuracy)}
        if not tables.confusion.is_empty():
            objects["confusion"] = self.store.put_table(tables.confusion)
        return objects, time.perf_counter() - started

    def _judge(self, step: Step) -> tuple[dict[str, str], float]:
        started = time.perf_counter()
        return {"val_accuracy": self.store.put_table(self._tables(step).accuracy)}, time.perf_counter() - started

    def _tables(self, step: Step) -> evaluation.Tables:
        server, memories, _ = self._state(step)
        if self.method.personal and step.task > 0:
            return self._evaluated_by_clients(step, server, memories)
        return evaluation.evaluate(self.method, server, EVALUATIONS[step.stage], self.choice.at_once)

    def _evaluated_by_clients(self, step: Step, server: Server, memories: dict[int, Path]) -> evaluation.Tables:
        checkpoints = Checkpoints(self.checkpoint_folder(step))
        try:
            everyone, ledger = tuple(range(self.splits.clients)), Ledger(checkpoints.ledger)
            aside = inspection.set_aside(server, self.params.federation.inspection)
            cohort = Cohort(self.executor, server.task, everyone, memories, ledger, checkpoints, aside=aside)
            replies = cohort.ask(step.stage, self.method.payload(server))
            return evaluation.gather(dict(replies.each("tables")))
        finally:
            checkpoints.close()

    def _watch(self, task: int, checkpoints: Checkpoints, start: Server) -> "Watch | None":
        """It looks on while a task is learned, where a monitor of rounds is set."""
        if not self.params.monitors.of_rounds:
            return None
        from fclmodels.federation.monitors.watch import Watch

        return Watch(self.method, task, checkpoints.monitors, start)

    @property
    def executor(self) -> Executor:
        """Started when it is first needed: an experiment whose steps are all done starts none."""
        if self._executor is None:
            self._executor = self._started(self.choice)
        return self._executor

    def _started(self, choice: Choice) -> Executor:
        if choice.executor == "serial":
            return Serial(self.method, choice.threads)
        write_json(self._workers_params, reading.effective(self.params, type(self.method).name))
        if choice.executor == "processes":
            return Processes(self.method, self._workers_params, choice.workers or 1, choice.threads)
        from fclmodels.federation.ray_cluster import RayCluster  # what Ray needs is installed with an extra

        return RayCluster(self.method, self._workers_params, choice.workers, choice.threads)

    @property
    def _workers_params(self) -> Path:
        return self.home / "workers" / f"{os.getpid()}-{self.label}.json"

    def _keep(
        self, server: Server, memories: dict[int, Path], held: dict[str, list[int]] | None = None
    ) -> dict[str, str]:
        """Put a state into the store: the server's tree, every client's memory as an object, who holds which part."""
        kept = {str(client): self.store.adopt(file) for client, file in sorted(memories.items())}
        state = self.store.put({"server": server.to_tree(), "memories": kept, "held": held or {}})
        return {"state": state, **{f"memory-{client}": digest for client, digest in kept.items()}}

    def _state(self, step: Step) -> tuple[Server, dict[int, Path], dict[str, list[int]]]:
        assert step.state is not None
        tree = self.store.get(step.state)
        memories = {int(client): self.store.checked(digest) for client, digest in tree["memories"].items()}
        return Server.from_tree(tree["server"]), memories, tree["held"]

    def _what_all_steps_depend_on(self) -> Tree:
        """Settings (without those that change no result), seed, splits, kind of device, code."""
        settings = reading.effective(self.params, type(self.method).name)
        for block in ("data", "stream", "partition", "evaluation", "monitors", "device"):
            del settings[block]
        for free in ("rounds", "rounds_scale", "executor", "workers", "threads", "checkpoint_seconds"):
            del settings["federation"][free]
        backbone = plugins.find("backbone", self.params.model.backbone)
        return {
            "method": type(self.method).name,
            "settings": settings,
            "backbone": backbone(self.params.model).depends_on(),
            "server_threads": SERVER_THREADS,
            "seed": self.seed,
            "splits": self.splits.digest,
            "device": self.method.run.device.type,
            "torch": torch.__version__,
            "code": source_closure(type(self.method).__module__, backbone.__module__, rounds.__name__),
        }


def digest_of(content: Tree) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()
