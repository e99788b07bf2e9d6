"""The round loop: sample clients, send the payload, let them train, aggregate, commit."""

import math
import time
from collections.abc import Callable, Collection
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import polars as pl
import torch

from fclmodels.errors import UserError
from fclmodels.federation import faults
from fclmodels.federation.checkpoints import Checkpoints, Position
from fclmodels.federation.cohort import Cohort
from fclmodels.federation.executor import TRAIN, Executor
from fclmodels.federation.ledger import CentralLedger, Ledger
from fclmodels.federation.log import Log
from fclmodels.federation.server import Server
from fclmodels.listener import Listener

if TYPE_CHECKING:
    from fclmodels.methods.base import Method

SCHEMA = {
    "task": pl.Int16,
    "round": pl.Int32,
    "step": pl.Int32,
    "clients": pl.Int32,
    "answers": pl.Int32,
    "late": pl.Int32,
    "missing": pl.Int32,
    "loss": pl.Float64,
    "server_lr": pl.Float64,
    "bytes_up": pl.Int64,
    "bytes_down": pl.Int64,
    "seconds": pl.Float64,
}

Look = Callable[[Server, Server, int], None]  # at the global model before and after a round


def learn(
    method: "Method",
    server: Server,
    memories: dict[int, Path],
    task: int,
    executor: Executor,
    checkpoints: Checkpoints,
    listener: Listener,
    look: Look | None = None,
) -> Position:
    """All rounds of a task, going on from the last checkpoint if there is one."""
    rounds = method.run.rounds(task)
    position = checkpoints.latest() or Position(method.start_task(server, task), memories, 0)
    ledger = open_ledger(method, checkpoints)
    listener.task_started(task, rounds)
    while position.round < rounds:
        before = position.server if look else None
        position = one_round(method, position, task, executor, checkpoints, ledger, listener)
        if look and before:
            look(before, position.server, position.round - 1)
        if position.round == rounds or checkpoints.age >= method.run.params.federation.checkpoint_seconds:
            checkpoints.commit(position)
    return position


def one_round(
    method: "Method",
    position: Position,
    task: int,
    executor: Executor,
    checkpoints: Checkpoints,
    ledger: Ledger,
    listener: Listener,
) -> Position:
    started = time.perf_counter()
    round = position.round
    up, down = ledger.bytes_up, ledger.bytes_down
    sample = partial(sample_clients, method, task, round, busy=position.late)
    turnout = faults.turnout(method, task, round, position.late, sample)
    chosen = turnout.training
    cohort = Cohort(executor, task, chosen, position.memories, ledger, checkpoints, position.late)
    if method.pooled_bytes is not None and round == 0:
        ledger.pooled(task, method.pooled_bytes(task))
    payload = method.payload(position.server)
    replies = cohort.exchange(
        TRAIN, round, payload, turnout, lambda done: listener.client_done(task, round, done, len(chosen))
    )
    server = method.aggregate(position.server, replies)
    cohort.close()
    refuse_divergence(server, replies.loss, task, round)
    row: dict[str, Any] = {
        "task": task,
        "round": round,
        "step": sum(method.run.rounds(earlier) for earlier in range(task)) + round,
        **turnout.counts(),
        "loss": replies.loss,
        "server_lr": method.server_lr(task),
        "bytes_up": ledger.bytes_up - up,
        "bytes_down": ledger.bytes_down - down,
        "seconds": time.perf_counter() - started,
    }
    checkpoints.rounds.append(row)
    listener.round_done(row)
    return Position(server, cohort.memories, round + 1, cohort.late)


def open_ledger(method: "Method", checkpoints: Checkpoints) -> Ledger:
    return Ledger(checkpoints.ledger) if method.pooled_bytes is None else CentralLedger(checkpoints.ledger)


def refuse_divergence(server: Server, loss: float, task: int, round: int) -> None:
    """A model that is not finite would be evaluated as one that always answers class 0, and forgets nothing."""
    floating = [weights for weights in server.weights.values() if weights.is_floating_point()]
    if not (math.isfinite(loss) and all(norm.isfinite() for norm in torch._foreach_norm(floating))):
        raise UserError(
            f"task {task}, round {round}: training diverged (loss {loss}). "
            "Lower optimizer.lr, federation.server_lr if it is above 1, or the weight of the method's penalty."
        )


def rounds_table(log: Log) -> pl.DataFrame:
    return pl.DataFrame(log.rows(), schema=SCHEMA)


def sample_clients(
    method: "Method", task: int, round: int, draw: int = 0, busy: Collection[int] = ()
) -> tuple[int, ...]:
    """Uniformly and without replacement among those that have the task's data and are not busy; anew in each draw."""
    able = method.participants(task)
    if busy:
        able = tuple(client for client in able if client not in busy)
    wanted = method.run.params.federation.clients_per_round or len(able)
    if wanted >= len(able):
        return able
    order = torch.randperm(len(able), generator=method.run.generator("clients", task, round, *([draw] if draw else [])))
    return tuple(sorted(able[i] for i in order[:wanted].tolist()))
