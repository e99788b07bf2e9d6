"""What a step of an experiment does, stage by stage: begin, learn, conclude, evaluate, judge.

Each stage takes the step and returns the digests of the objects that it put into the store, by name, and its seconds.
"""

import shutil
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import polars as pl

from fclmodels import tables
from fclmodels.experiment.step_keys import SERVER_THREADS
from fclmodels.federation import evaluation
from fclmodels.federation.engine import rounds
from fclmodels.federation.engine.checkpoints import Checkpoints
from fclmodels.federation.engine.cohort import Cohort
from fclmodels.federation.engine.ledger import Ledger, make_ledger_table, open_ledger
from fclmodels.federation.exchange import EVALUATIONS
from fclmodels.federation.executors.base import set_torch_threads
from fclmodels.federation.protection import inspection
from fclmodels.federation.server import Server
from fclmodels.federation.training.server_training import ServerTraining, reset_peak_memory

if TYPE_CHECKING:
    from fclmodels.experiment.experiment import Experiment
    from fclmodels.federation.monitors.watch import Watch

Stage = Literal["begin", "learn", "conclude", "evaluate", "judge"]
Outcome = dict[str, Any]
Objects = tuple[dict[str, str], float]


@dataclass(frozen=True)
class Step:
    """One step of an experiment."""

    experiment: "Experiment"
    stage: Stage
    state: str | None  # digest of the state that it begins with
    task: int  # for `evaluate` and `judge`, how many are learned
    key: str  # digest of all that its outcome depends on

    @property
    def checkpoint_folder(self) -> Path:
        return self.experiment.home / "checkpoints" / self.key

    def recall(self) -> Outcome | None:
        """Return the outcome where the store has it and every object it names."""
        outcome = self.experiment.store.recall(self.key)
        if outcome is not None:  # a kill may have come between the record and the removal of the checkpoints
            shutil.rmtree(self.checkpoint_folder, ignore_errors=True)
        return outcome

    def run(self) -> Outcome:
        """Run the step, record its outcome, and remove its checkpoints."""
        reset_peak_memory(self.experiment.method.run.device)
        with set_torch_threads(SERVER_THREADS):
            objects, seconds = STAGES[self.stage](self)
        peaks = self.experiment.read_peak_memory()
        outcome = {"stage": self.stage, "task": self.task, "objects": objects, "seconds": seconds, "peaks": peaks}
        self.experiment.store.record(self.key, outcome)
        shutil.rmtree(self.checkpoint_folder, ignore_errors=True)
        return outcome


def begin(step: Step) -> Objects:
    """Store the server before the first task."""
    started = time.perf_counter()
    return store_state(step, step.experiment.method.create_server(), {}), time.perf_counter() - started


def learn(step: Step) -> Objects:
    """Run the rounds of a task, from the last checkpoint of an interrupted one."""
    run, method = step.experiment, step.experiment.method
    server, memories, _ = load_state(step)
    checkpoints = Checkpoints(step.checkpoint_folder)
    try:
        watch = open_watch(step, checkpoints, server)
        position = rounds.learn(
            method,
            server,
            memories,
            step.task,
            run.executor,
            checkpoints,
            open_ledger(method, checkpoints.ledger),
            run.listener,
            make_server_training(step, checkpoints),
            watch.look if watch else None,
        )
        holders = Ledger(checkpoints.ledger).list_holders(method.make_payload(position.server))
        objects = store_state(step, position.server, position.memories, holders)
        if watch:
            watch.on_task_learned(position.server)
            objects["monitors"] = run.store.put_table(watch.table())
        table = pl.DataFrame(checkpoints.rounds.read_rows(), schema=tables.ROUNDS)
        objects["rounds"] = run.store.put_table(table)
        return objects | store_tables(step, checkpoints), float(table["seconds"].sum())
    finally:
        checkpoints.close()


def conclude(step: Step) -> Objects:
    """Run the method's exchanges and training after a task's last round."""
    started = time.perf_counter()
    run, method = step.experiment, step.experiment.method
    server, memories, holders = load_state(step)
    checkpoints = Checkpoints(step.checkpoint_folder)
    try:
        clients = method.list_participants(step.task)
        ledger = Ledger(checkpoints.ledger, holders)
        aside = inspection.set_aside(server, run.params.federation.inspection)
        training = make_server_training(step, checkpoints)
        cohort = Cohort(
            *(run.executor, step.task, clients, memories, ledger, checkpoints), aside=aside, server_training=training
        )
        try:
            server = inspection.count_refusals(method.finish_task(server, cohort), cohort.refused)
        finally:
            rounds.report_refusals(cohort.refused, step.task, run.listener)
        objects = store_state(step, server, cohort.memories) | store_tables(step, checkpoints)
        objects["knowledge"] = run.store.put(server.knowledge)
        if run.params.monitors.used_share or run.params.monitors.drift:
            from fclmodels.federation.monitors.used_share import measure_subspaces

            rows = measure_subspaces(server.knowledge, step.task, run.params.monitors)
            objects["monitors"] = run.store.put_table(rows)
        return objects, time.perf_counter() - started
    finally:
        checkpoints.close()


def evaluate(step: Step) -> Objects:
    """Measure accuracy on the test rows of every task."""
    started = time.perf_counter()
    tables = make_tables(step)
    objects = {"accuracy": step.experiment.store.put_table(tables.accuracy)}
    if not tables.confusion.is_empty():
        objects["confusion"] = step.experiment.store.put_table(tables.confusion)
    return objects, time.perf_counter() - started


def judge(step: Step) -> Objects:
    """Measure accuracy on val rows, for a gate."""
    started = time.perf_counter()
    accuracy = make_tables(step).accuracy
    return {"val_accuracy": step.experiment.store.put_table(accuracy)}, time.perf_counter() - started


STAGES: dict[Stage, Callable[[Step], Objects]] = {
    "begin": begin,
    "learn": learn,
    "conclude": conclude,
    "evaluate": evaluate,
    "judge": judge,
}


def make_tables(step: Step) -> evaluation.Tables:
    """Return the tables of an evaluation: of the server's model, of the clients' own, or of both."""
    method = step.experiment.method
    server, memories, _ = load_state(step)
    is_personal = method.is_personal and step.task > 0
    if is_personal and not method.has_global_model:
        return evaluate_on_clients(step, server, memories)
    tables = evaluation.evaluate(method, server, EVALUATIONS[step.stage], step.experiment.choice.at_once)
    return evaluation.put_beside(tables, evaluate_on_clients(step, server, memories)) if is_personal else tables


def evaluate_on_clients(step: Step, server: Server, memories: dict[int, Path]) -> evaluation.Tables:
    """Return the tables of the clients' own models, each measured where it stays."""
    run, method = step.experiment, step.experiment.method
    checkpoints = Checkpoints(step.checkpoint_folder)
    try:
        everyone, ledger = tuple(range(run.splits.clients)), Ledger(checkpoints.ledger)
        aside = inspection.set_aside(server, run.params.federation.inspection)
        cohort = Cohort(run.executor, server.task, everyone, memories, ledger, checkpoints, aside=aside)
        own_payloads = {client: method.make_own_payload(server, client) for client in cohort.clients}
        replies = cohort.put_question(step.stage, method.make_payload(server), own_payloads=own_payloads)
        return evaluation.gather(dict(replies.yield_each("tables")))
    finally:
        checkpoints.close()


def open_watch(step: Step, checkpoints: Checkpoints, start: Server) -> "Watch | None":
    """Return the monitors of a task's rounds, None where none is on."""
    if not step.experiment.params.monitors.round_monitors:
        return None
    from fclmodels.federation.monitors.watch import Watch

    return Watch(step.experiment.method, step.task, checkpoints.monitors, start)


def make_server_training(step: Step, checkpoints: Checkpoints) -> ServerTraining:
    """Return what runs the server's own training in a step, with its costs in the checkpoints' log."""
    run = step.experiment
    return ServerTraining(
        checkpoints.folder,
        (run.seed, "server-training", step.task, step.stage),
        run.method.run.device,
        rounds.AGGREGATING,
        run.params.federation.checkpoint_seconds,
        lambda row: checkpoints.costs.append({"task": step.task, "stage": step.stage, **row}),
        lambda name, done, of: run.listener.on_server_step(step.task, name, done, of),
    )


def store_tables(step: Step, checkpoints: Checkpoints) -> dict[str, str]:
    """Return the ledger of a step and, where the server trained, what that cost, put into the store."""
    store = step.experiment.store
    objects = {"ledger": store.put_table(make_ledger_table(checkpoints.ledger))}
    if costs := checkpoints.costs.read_rows():
        objects["costs"] = store.put_table(pl.DataFrame(costs, schema=tables.COSTS))
    return objects


def store_state(
    step: Step, server: Server, memories: dict[int, Path], holders: dict[str, list[int]] | None = None
) -> dict[str, str]:
    """Put a state into the store: the server's tree, each client's memory as an object, who has which part.

    Returns the digests of the state and of the memories by name.
    """
    store = step.experiment.store
    digests = {str(client): store.adopt(file) for client, file in sorted(memories.items())}
    state = store.put({"server": server.to_tree(), "memories": digests, "held": holders or {}})
    return {"state": state, **{f"memory-{client}": digest for client, digest in digests.items()}}


def load_state(step: Step) -> tuple[Server, dict[int, Path], dict[str, list[int]]]:
    """Return the state that a step begins with: server, clients' memories, who has which part."""
    assert step.state is not None
    store = step.experiment.store
    tree = store.get(step.state)
    memories = {int(client): store.verify(digest) for client, digest in tree["memories"].items()}
    return Server.from_tree(tree["server"]), memories, tree["held"]
