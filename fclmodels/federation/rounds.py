"""The round loop: sample clients, send the payload, let them train, aggregate, commit."""

import math
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import polars as pl
import torch

from fclmodels.errors import UserError
from fclmodels.federation import faults, inspection
from fclmodels.federation.checkpoints import Checkpoints, Position
from fclmodels.federation.cohort import Cohort
from fclmodels.federation.executor import TRAIN, Executor, torch_threads
from fclmodels.federation.faults import Loss, Turnout
from fclmodels.federation.inspection import Refusal
from fclmodels.federation.ledger import CentralLedger, Ledger
from fclmodels.federation.log import Log
from fclmodels.federation.replies import Replies
from fclmodels.federation.server import Server
from fclmodels.federation.soundness import NOT_FINITE
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
    "lost": pl.Int32,
    "refused": pl.Int32,
    "median": pl.Float64,
    "farthest": pl.Float64,
    "loss": pl.Float64,
    "server_lr": pl.Float64,
    "bytes_up": pl.Int64,
    "bytes_down": pl.Int64,
    "seconds": pl.Float64,
}

# Torch's threads while the server makes a model, when no client trains. Everywhere as many: bits may depend on it.
AGGREGATING = 2
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
    position = checkpoints.of_model(method.run.spec(task + 1)) or Position(method.start_task(server, task), memories, 0)
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
    aside = inspection.set_aside(position.server, method.run.params.federation.inspection)
    refuse_emptiness(method, task, aside)
    sample = partial(sample_clients, method, task, round, busy={*position.late, *aside})
    turnout = faults.turnout(method, task, round, position.late, sample)
    chosen = turnout.training
    usual = position.usual_length
    cohort = Cohort(executor, task, chosen, position.memories, ledger, checkpoints, position.late, usual_length=usual)
    if method.pooled_bytes is not None and round == 0:
        ledger.pooled(task, method.pooled_bytes(task))
    payload = method.payload(position.server)
    replies = cohort.exchange(
        TRAIN, round, payload, turnout, lambda done: listener.client_done(task, round, done, len(chosen))
    )
    tell(cohort.refused, task, listener)
    refuse_too_few(method, replies, turnout, cohort.lost, task, round)
    refuse_silence(replies, cohort.refused, task, round)
    with torch_threads(AGGREGATING):
        server = inspection.counted(method.aggregate(position.server, replies), cohort.refused)
    cohort.close()
    refuse_divergence(server, replies.loss, task, round)
    row: dict[str, Any] = {
        "task": task,
        "round": round,
        "step": sum(method.run.rounds(earlier) for earlier in range(task)) + round,
        **turnout.counts(),
        "answers": len(replies.clients),
        "lost": len(cohort.lost),
        "refused": len(cohort.refused),
        "median": cohort.median,
        "farthest": cohort.farthest,
        "loss": replies.loss,
        "server_lr": method.server_lr(task),
        "bytes_up": ledger.bytes_up - up,
        "bytes_down": ledger.bytes_down - down,
        "seconds": time.perf_counter() - started,
    }
    checkpoints.rounds.append(row)
    listener.round_done(row)
    return Position(server, cohort.memories, round + 1, cohort.late, max(usual, cohort.median or 0.0))


def open_ledger(method: "Method", checkpoints: Checkpoints) -> Ledger:
    return Ledger(checkpoints.ledger) if method.pooled_bytes is None else CentralLedger(checkpoints.ledger)


def refuse_divergence(server: Server, loss: float | None, task: int, round: int) -> None:
    """A model that is not finite would be evaluated as one that always answers class 0, and forgets nothing."""
    floating = [weights for weights in server.weights.values() if weights.is_floating_point()]
    if not (math.isfinite(loss or 0.0) and all(norm.isfinite() for norm in torch._foreach_norm(floating))):
        raise diverged(f"loss {loss}", task, round)


def diverged(how: str, task: int, round: int) -> UserError:
    return UserError(
        f"task {task}, round {round}: training diverged ({how}). "
        "Lower optimizer.lr, federation.server_lr if it is above 1, or the weight of the method's penalty."
    )


def refuse_too_few(
    method: "Method", replies: Replies, turnout: Turnout, lost: Mapping[int, Loss], task: int, round: int
) -> None:
    """Of what was drawn there are enough; a machine without memory for its clients may leave fewer."""
    starved = [client for client in lost if client not in turnout.lost]
    least = faults.answers_needed(method.run, len(turnout.delays))
    if starved and len(replies.clients) < least:
        raise UserError(
            f"task {task}, round {round}: there was no memory to train {len(starved)} of {len(turnout.delays)} clients "
            f"(first client {starved[0]}), and {least} must answer. Lower federation.batch_size or federation.workers."
        )


def refuse_silence(replies: Replies, refused: Sequence[Refusal], task: int, round: int) -> None:
    """Of a round whose replies were all refused nothing can be learned, and the next one would go the same way."""
    if replies.clients:
        return
    _, client, (part, why) = refused[0]
    if why == NOT_FINITE:
        raise diverged(f"client {client}'s {part} {why}", task, round)
    raise UserError(
        f"task {task}, round {round}: no reply of {len(refused)} can be used; client {client}'s {part} {why}. "
        "Look at that client, at whether training diverges, or at federation.inspection."
    )


def refuse_emptiness(method: "Method", task: int, aside: Collection[int]) -> None:
    able = method.participants(task)
    if all(client in aside for client in able):
        raise UserError(
            f"task {task}: all {len(able)} clients that have its data are set aside, for their replies were refused. "
            "Look at them, or raise federation.inspection.patience."
        )


def tell(refused: Sequence[Refusal], task: int, listener: Listener) -> None:
    for refusal in refused:
        listener.refused(task, refusal.round, refusal.client, f"{refusal.fault.part} {refusal.fault.why}")


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
