"""A short run of the same shapes, whose costs are measured: the first tasks, a few clients, two rounds of one epoch.

It runs in a process of its own, which may not take more memory than is free, so that a method that needs too much
ends here and not the run.
"""

import json
import os
import resource
import signal
import subprocess
import sys
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import polars as pl

from fclmodels import machine
from fclmodels.data.splits.split_reader import Splits
from fclmodels.errors import UserError
from fclmodels.experiment.costs.excerpt import choose_typical_clients, write_excerpt
from fclmodels.experiment.experiment import Experiment
from fclmodels.experiment.stages import Outcome
from fclmodels.federation.engine.cohort import BEFORE_ROUNDS
from fclmodels.federation.executors.auto_choice import Choice
from fclmodels.settings.load import collect_settings, load_params
from fclmodels.settings.schema import Params
from fclmodels.storage.sealed_json import write_json

TASKS, CLIENTS, ROUNDS, ROWS = 3, 4, 2, 512
# Replies come in time and unchanged, and each round has all clients.
SETTINGS = (
    f"federation.rounds={ROUNDS}",
    "federation.rounds_scale=1",
    "federation.local_epochs=1",
    "federation.clients_per_round=null",
    "federation.faults={}",
    "federation.attack={}",
    "monitors={}",
)
WHEN = {  # an exchange, by its number
    "before": pl.col("round") <= -BEFORE_ROUNDS,
    "first": pl.col("round") == 0,
    "later": pl.col("round") == 1,
    "after": pl.col("round").is_between(-BEFORE_ROUNDS, -1, closed="right"),
}
Traffic = dict[str, float]


@dataclass(frozen=True)
class TaskCosts:
    """The measured costs of one task of the trial."""

    clients: int  # that took part
    rows: int  # of theirs
    up: Traffic  # bytes of a client before the rounds, in its first and in a later round, after them
    down: Traffic
    memory: float  # bytes of a client's memory after the task
    stored: int  # bytes of the server's state in the store, after the rounds and after the task's end
    seconds_a_row: float  # of training
    conclude_seconds: float


@dataclass(frozen=True)
class Trial:
    """What a trial has measured."""

    tasks: list[TaskCosts]
    main_bytes: int  # the most that the main process took above what its imports take
    worker_bytes: int  # the most memory of one worker; 0 where clients ran in the main process
    seconds_a_test_row: float
    model_bytes: int

    @classmethod
    def from_json(cls, facts: dict[str, Any]) -> "Trial":
        return cls(**{**facts, "tasks": [TaskCosts(**task) for task in facts["tasks"]]})


class TrialFailedError(UserError):
    """A trial that ended with an error, of which the run itself may know nothing: its splits are others."""


class TooLarge(Exception):  # noqa: N818
    """A trial that needed more memory than it was given."""


def run_trial(params: Params, splits: Splits, method: str, seed: int, choice: Choice, memory: int | None) -> Trial:
    """Run a trial in a process of its own with at most so many bytes of memory; TooLarge where they are too few."""
    with tempfile.TemporaryDirectory(prefix="fcl-trial-") as folder:
        write_json(Path(folder) / "params.yaml", collect_settings(params, method))
        order = {
            "folder": folder,
            "splits": str(splits.folder.absolute()),
            "method": method,
            "seed": seed,
            "executor": "serial" if choice.executor == "serial" else "processes",
            "threads": choice.threads,
            "memory": memory,
        }
        process = subprocess.run(
            [sys.executable, "-m", __spec__.name],
            input=json.dumps(order),
            capture_output=True,
            text=True,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
            check=False,
        )
    lines, problems = process.stdout.splitlines(), process.stderr.splitlines() or ["it ended without a word"]
    answer: dict[str, Any] = json.loads(lines[-1]) if lines else {"error": problems[-1]}
    if "too_large" in answer or process.returncode == -signal.SIGKILL:
        raise TooLarge
    if "error" in answer:
        raise TrialFailedError(f"the trial of its costs failed: {answer['error']}")
    return Trial.from_json(answer["trial"])


def measure(order: dict[str, Any]) -> Trial:
    """Return the costs of a trial in this process."""
    folder = Path(order["folder"])
    overrides = (
        *SETTINGS,
        f"federation.executor={order['executor']}",
        f"federation.threads={order['threads']}",
        "federation.workers=1",
    )
    params = load_params(folder / "params.yaml", overrides)
    whole = Splits.open(Path(order["splits"]))
    tasks = min(TASKS, len(whole.tasks))
    splits = write_excerpt(whole, folder / "splits", tasks, choose_typical_clients(whole, tasks, CLIENTS), ROWS)
    before = machine.read_status("VmRSS") or 0
    limit_memory(order["memory"])
    with Experiment(params, order["method"], order["seed"], splits, folder / "home") as experiment:
        outcomes, peaks = [], []
        for outcome in experiment.run_steps():
            outcomes.append(outcome)
            peaks.append(machine.read_peak_memory())
            if costs := outcome["objects"].get("costs"):  # the server's own training measures anew
                peaks += experiment.store.get_table(costs)["peak_bytes"].to_list()
        worker_bytes = machine.read_peak_memory_of_children()
    return Trial(
        tasks=[measure_task(experiment, outcomes, task) for task in range(tasks)],
        main_bytes=max(peaks) - before,
        worker_bytes=worker_bytes,
        seconds_a_test_row=measure_evaluation(experiment, outcomes),
        model_bytes=experiment.store.find_path(outcomes[0]["objects"]["state"]).stat().st_size,
    )


def limit_memory(most: int | None) -> None:
    """Let this process, and each that it starts, take so many bytes more: an allocation beyond them fails."""
    used = machine.read_status("VmData")
    if most is not None and used is not None:
        hard = resource.getrlimit(resource.RLIMIT_DATA)[1]
        resource.setrlimit(resource.RLIMIT_DATA, (used + most, hard))


def measure_task(experiment: Experiment, outcomes: list[Outcome], task: int) -> TaskCosts:
    """Return the costs of one task from the objects of its steps."""
    store, method = experiment.store, experiment.method
    learn, conclude = (
        next(o for o in outcomes if (o["stage"], o["task"]) == (stage, task)) for stage in ("learn", "conclude")
    )
    ledger = pl.concat([store.get_table(step["objects"]["ledger"]) for step in (learn, conclude)])
    if not ledger.filter(direction="lost").is_empty():
        raise MemoryError("a client")
    clients = method.list_participants(task)
    rows = sum(len(method.select_rows(task, client)) for client in clients)
    traffic = {
        direction: {
            when: float(ledger.filter(of_exchange, direction=direction)["bytes"].sum()) / len(clients)
            for when, of_exchange in WHEN.items()
        }
        for direction in ("up", "down")
    }
    memories = float(ledger.filter(direction="kept").group_by("client", maintain_order=True).last()["bytes"].sum())
    seconds = store.get_table(learn["objects"]["rounds"])["seconds"]
    return TaskCosts(
        clients=len(clients),
        rows=rows,
        up=traffic["up"],
        down=traffic["down"],
        memory=memories / len(clients),
        stored=sum(
            store.find_path(digest).stat().st_size
            for digest in {step["objects"].get(name) for step in (learn, conclude) for name in ("state", "knowledge")}
            if digest
        ),
        seconds_a_row=seconds[-1] / rows,
        conclude_seconds=conclude["seconds"],
    )


def measure_evaluation(experiment: Experiment, outcomes: list[Outcome]) -> float:
    """Return the seconds that the evaluation of one test row takes."""
    learned = experiment.tasks
    seconds = next(o["seconds"] for o in outcomes if (o["stage"], o["task"]) == ("evaluate", learned))
    return float(seconds) / sum(len(experiment.splits.select_test_rows(task)) for task in range(learned))


def main() -> None:
    """Answer the order on standard input with one line of JSON."""
    answer: dict[str, Any]
    try:
        answer = {"trial": asdict(measure(json.load(sys.stdin)))}
    except (MemoryError, RuntimeError, UserError) as problem:
        answer = {"too_large": True} if is_out_of_memory(problem) else {"error": str(problem)}
    print(json.dumps(answer))  # noqa: T201


def is_out_of_memory(problem: Exception) -> bool:
    """Return whether an allocation has failed, here or, by its traceback in the message, in a worker."""
    words = (
        "out of memory",
        "can't allocate memory",
        "not enough memory",
        "Cannot allocate memory",
        "MemoryError",
        "bad_alloc",
    )
    return isinstance(problem, MemoryError) or any(word in str(problem) for word in words)


if __name__ == "__main__":
    main()
    sys.stdout.flush()
    os._exit(0)  # torch's cleanup takes long
