"""Steps of an experiment: one method, one seed, all tasks in turn; each step has a key of all that it depends on.

begin -> evaluate(0) -> for each task: learn -> conclude -> evaluate. Conclude is the end of a task, in which the
method's `finish_task` runs. A step whose outcome is in the store is not run again; a task whose training was
interrupted goes on from its last checkpoint. Prefect chains the same steps (flows/), and for a gate one more: judge,
which evaluates on val rows.
"""

import os
import shutil
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import polars as pl

from fclmodels import plugins, tables
from fclmodels.data.splits.split_reader import Splits
from fclmodels.experiment import run_folder
from fclmodels.experiment.step_keys import SERVER_THREADS, identify, step_key
from fclmodels.federation import evaluation
from fclmodels.federation.engine import rounds
from fclmodels.federation.engine.checkpoints import Checkpoints
from fclmodels.federation.engine.cohort import Cohort
from fclmodels.federation.engine.ledger import Ledger, ledger_table, open_ledger
from fclmodels.federation.engine.listener import Listener
from fclmodels.federation.exchange import EVALUATIONS
from fclmodels.federation.executors.auto_choice import Choice, choose
from fclmodels.federation.executors.base import Executor, set_torch_threads
from fclmodels.federation.executors.client_work import Serial, refuse_unfit_method
from fclmodels.federation.executors.processes import Processes
from fclmodels.federation.protection import inspection
from fclmodels.federation.run_context import Run
from fclmodels.federation.server import Server
from fclmodels.federation.training.server_training import ServerTraining, read_peak_memory, reset_peak_memory
from fclmodels.settings.load import collect_settings, load_method_settings
from fclmodels.settings.schema import Params
from fclmodels.storage.digests import digest_json
from fclmodels.storage.object_store import Store
from fclmodels.storage.sealed_json import write_json

if TYPE_CHECKING:
    from fclmodels.federation.monitors.watch import Watch

Stage = Literal["begin", "learn", "conclude", "evaluate", "judge"]
Outcome = dict[str, Any]


@dataclass(frozen=True)
class Step:
    """One step of an experiment."""

    experiment: "Experiment"
    stage: Stage
    state: str | None  # digest of the state that it begins with
    task: int  # for `evaluate` and `judge`, how many are learned
    key: str  # digest of all that its outcome depends on

    def recall(self) -> Outcome | None:
        """Return the outcome where the store has it and every object it names."""
        outcome = self.experiment.store.recall(self.key)
        if outcome is not None:  # a kill may have come between the record and the removal of the checkpoints
            shutil.rmtree(self.experiment.make_checkpoint_folder(self), ignore_errors=True)
        return outcome

    def run(self) -> Outcome:
        """Run the step, record its outcome, and remove its checkpoints."""
        reset_peak_memory(self.experiment.method.run.device)
        with set_torch_threads(SERVER_THREADS):
            objects, seconds = getattr(self.experiment, f"_{self.stage}")(self)
        peaks = self.experiment.read_peak_memory()
        outcome = {"stage": self.stage, "task": self.task, "objects": objects, "seconds": seconds, "peaks": peaks}
        self.experiment.store.record(self.key, outcome)
        shutil.rmtree(self.experiment.make_checkpoint_folder(self), ignore_errors=True)
        return outcome


class Experiment:
    """A method with a seed on a stream, its steps and their store."""

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
        self.method = kind(load_method_settings(params, method), Run.on(params, splits, seed, self.home))
        refuse_unfit_method(self.method)
        self.label = f"{method}-{seed}"
        self.tasks = len(splits.tasks)
        self._identity = identify(self.method)
        self.choice = choose(self.method, self.home / "choices", digest_json(self._identity))
        self._executor: Executor | None = None

    def __enter__(self) -> "Experiment":
        return self

    def __exit__(self, *_: object) -> None:
        if self._executor is not None:
            self._executor.close()
        self._workers_params.unlink(missing_ok=True)

    @property
    def settings(self) -> dict[str, Any]:
        """Effective settings, with the values that `auto` stands for."""
        settings = collect_settings(self.params, type(self.method).name)
        choice = {"executor": self.choice.executor, "workers": self.choice.workers, "threads": self.choice.threads}
        settings["federation"] = {**settings["federation"], **choice}
        settings["device"] = str(self.method.run.device)
        return settings

    @property
    def code(self) -> str:
        """Digest of the source that training depends on."""
        return str(self._identity["code"])

    def run(self, folder: Path) -> dict[str, Any]:
        """Run every step that is not in the store, then write the run folder; returns the content of result.json."""
        run_folder.refuse_foreign(Path(folder))
        return self.publish(folder, list(self.run_steps()))

    def run_steps(self) -> Iterator[Outcome]:
        """Yield the outcomes of all steps in order; run those that are not in the store."""
        stages: list[tuple[Stage, int]] = [("begin", 0), ("evaluate", 0)]
        for task in range(self.tasks):
            stages += [("learn", task), ("conclude", task), ("evaluate", task + 1)]
        state = None
        for stage, task in stages:
            step = self.step(stage, state, task)
            outcome = step.recall() or step.run()
            state = outcome["objects"].get("state", state)
            yield outcome

    def step(self, stage: Stage, state: str | None, task: int) -> Step:
        """Return a step from a state (None before `begin`); for `evaluate` and `judge`, `task` counts learned tasks."""
        key = step_key(self.method, self._identity, stage, state, task, self.choice.threads)
        return Step(self, stage, state, task, key)

    def publish(self, folder: Path, outcomes: list[Outcome]) -> dict[str, Any]:
        """Write the run folder from the steps' objects in the store; returns the content of result.json."""
        return run_folder.publish(self, Path(folder), outcomes)

    def list_remarks(self, concluded: Outcome) -> list[str]:
        """Return the method's remarks on its knowledge after a task."""
        return self.method.list_remarks(self.store.get(concluded["objects"]["knowledge"]))

    def collect_monitors(self, outcomes: list[Outcome]) -> pl.DataFrame | None:
        """Return the monitors' table of these steps, with bounds; None where no monitor has rows."""
        tables = run_folder.gather_tables(self.store, outcomes, ("monitors", "rounds"))
        if "monitors" not in tables or tables["monitors"].is_empty():
            return None
        from fclmodels.federation.monitors.oracles.theorem2 import add_bounds

        return add_bounds(tables["monitors"], tables["rounds"], self.params.optimizer.lr)

    def read_peak_memory(self) -> dict[str, int | None]:
        """Return the peak memory in bytes of the server's process (or GPU), and of the largest worker so far."""
        workers = self._executor.read_peak_memory() if self._executor else None
        return {"server": read_peak_memory(self.method.run.device), "worker": workers}

    def make_checkpoint_folder(self, step: Step) -> Path:
        return self.home / "checkpoints" / step.key

    # The five stages: each returns the digests of the objects that it put into the store, by name, and its seconds.

    def _begin(self, step: Step) -> tuple[dict[str, str], float]:
        started = time.perf_counter()
        return self._store_state(self.method.create_server(), {}), time.perf_counter() - started

    def _learn(self, step: Step) -> tuple[dict[str, str], float]:
        server, memories, _ = self._load_state(step)
        checkpoints = Checkpoints(self.make_checkpoint_folder(step))
        try:
            watch = self._open_watch(step.task, checkpoints, server)
            look = watch.look if watch else None
            position = rounds.learn(
                self.method,
                server,
                memories,
                step.task,
                self.executor,
                checkpoints,
                open_ledger(self.method, checkpoints.ledger),
                self.listener,
                self._make_server_training(step, checkpoints),
                look,
            )
            holders = Ledger(checkpoints.ledger).list_holders(self.method.make_payload(position.server))
            objects = self._store_state(position.server, position.memories, holders)
            if watch:
                watch.on_task_learned(position.server)
                objects["monitors"] = self.store.put_table(watch.table())
            table = pl.DataFrame(checkpoints.rounds.read_rows(), schema=tables.ROUNDS)
            objects["rounds"] = self.store.put_table(table)
            objects |= self._store_tables(checkpoints)
            return objects, float(table["seconds"].sum())
        finally:
            checkpoints.close()

    def _conclude(self, step: Step) -> tuple[dict[str, str], float]:
        started = time.perf_counter()
        server, memories, holders = self._load_state(step)
        checkpoints = Checkpoints(self.make_checkpoint_folder(step))
        try:
            clients = self.method.list_participants(step.task)
            ledger = Ledger(checkpoints.ledger, holders)
            aside = inspection.set_aside(server, self.params.federation.inspection)
            training = self._make_server_training(step, checkpoints)
            cohort = Cohort(
                *(self.executor, step.task, clients, memories, ledger, checkpoints),
                aside=aside,
                server_training=training,
            )
            try:
                server = inspection.count_refusals(self.method.finish_task(server, cohort), cohort.refused)
            finally:
                rounds.report_refusals(cohort.refused, step.task, self.listener)
            objects = self._store_state(server, cohort.memories)
            objects |= self._store_tables(checkpoints)
            objects["knowledge"] = self.store.put(server.knowledge)
            if self.params.monitors.used_share or self.params.monitors.drift:
                from fclmodels.federation.monitors.used_share import measure_subspaces

                rows = measure_subspaces(server.knowledge, step.task, self.params.monitors)
                objects["monitors"] = self.store.put_table(rows)
            return objects, time.perf_counter() - started
        finally:
            checkpoints.close()

    def _make_server_training(self, step: Step, checkpoints: Checkpoints) -> ServerTraining:
        """Return what runs the server's own training in a step, with its costs in the checkpoints' log."""
        return ServerTraining(
            checkpoints.folder,
            (self.seed, "server-training", step.task, step.stage),
            self.method.run.device,
            rounds.AGGREGATING,
            self.params.federation.checkpoint_seconds,
            lambda row: checkpoints.costs.append({"task": step.task, "stage": step.stage, **row}),
            lambda name, done, of: self.listener.on_server_step(step.task, name, done, of),
        )

    def _store_tables(self, checkpoints: Checkpoints) -> dict[str, str]:
        """Return the ledger of a step and, where the server trained, what that cost, put into the store."""
        objects = {"ledger": self.store.put_table(ledger_table(checkpoints.ledger))}
        if costs := checkpoints.costs.read_rows():
            objects["costs"] = self.store.put_table(pl.DataFrame(costs, schema=tables.COSTS))
        return objects

    def _evaluate(self, step: Step) -> tuple[dict[str, str], float]:
        started = time.perf_counter()
        tables = self._evaluate_tables(step)
        objects = {"accuracy": self.store.put_table(tables.accuracy)}
        if not tables.confusion.is_empty():
            objects["confusion"] = self.store.put_table(tables.confusion)
        return objects, time.perf_counter() - started

    def _judge(self, step: Step) -> tuple[dict[str, str], float]:
        started = time.perf_counter()
        return {
            "val_accuracy": self.store.put_table(self._evaluate_tables(step).accuracy)
        }, time.perf_counter() - started

    def _evaluate_tables(self, step: Step) -> evaluation.Tables:
        server, memories, _ = self._load_state(step)
        is_personal = self.method.is_personal and step.task > 0
        if is_personal and not self.method.has_global_model:
            return self._evaluate_on_clients(step, server, memories)
        tables = evaluation.evaluate(self.method, server, EVALUATIONS[step.stage], self.choice.at_once)
        if is_personal:
            return evaluation.put_beside(tables, self._evaluate_on_clients(step, server, memories))
        return tables

    def _evaluate_on_clients(self, step: Step, server: Server, memories: dict[int, Path]) -> evaluation.Tables:
        checkpoints = Checkpoints(self.make_checkpoint_folder(step))
        try:
            everyone, ledger = tuple(range(self.splits.clients)), Ledger(checkpoints.ledger)
            aside = inspection.set_aside(server, self.params.federation.inspection)
            cohort = Cohort(self.executor, server.task, everyone, memories, ledger, checkpoints, aside=aside)
            own_payloads = {client: self.method.make_own_payload(server, client) for client in cohort.clients}
            replies = cohort.put_question(step.stage, self.method.make_payload(server), own_payloads=own_payloads)
            return evaluation.gather(dict(replies.yield_each("tables")))
        finally:
            checkpoints.close()

    def _open_watch(self, task: int, checkpoints: Checkpoints, start: Server) -> "Watch | None":
        """Return the monitors of a task's rounds, None where none is on."""
        if not self.params.monitors.round_monitors:
            return None
        from fclmodels.federation.monitors.watch import Watch

        return Watch(self.method, task, checkpoints.monitors, start)

    @property
    def executor(self) -> Executor:
        """The executor, started when it is first needed: an experiment whose steps are all in the store starts none."""
        if self._executor is None:
            self._executor = self._start(self.choice)
        return self._executor

    def _start(self, choice: Choice) -> Executor:
        if choice.executor == "serial":
            return Serial(self.method, choice.threads)
        write_json(self._workers_params, collect_settings(self.params, type(self.method).name))
        if choice.executor == "processes":
            return Processes(self.method, self._workers_params, choice.workers or 1, choice.threads)
        from fclmodels.federation.executors.ray.cluster import RayCluster  # Ray is installed with an extra

        return RayCluster(self.method, self._workers_params, choice.workers, choice.threads)

    @property
    def _workers_params(self) -> Path:
        return self.home / "workers" / f"{os.getpid()}-{self.label}.json"

    def _store_state(
        self, server: Server, memories: dict[int, Path], holders: dict[str, list[int]] | None = None
    ) -> dict[str, str]:
        """Put a state into the store: the server's tree, each client's memory as an object, who has which part.

        Returns the digests of the state and of the memories by name.
        """
        digests = {str(client): self.store.adopt(file) for client, file in sorted(memories.items())}
        state = self.store.put({"server": server.to_tree(), "memories": digests, "held": holders or {}})
        return {"state": state, **{f"memory-{client}": digest for client, digest in digests.items()}}

    def _load_state(self, step: Step) -> tuple[Server, dict[int, Path], dict[str, list[int]]]:
        assert step.state is not None
        tree = self.store.get(step.state)
        memories = {int(client): self.store.verify(digest) for client, digest in tree["memories"].items()}
        return Server.from_tree(tree["server"]), memories, tree["held"]
