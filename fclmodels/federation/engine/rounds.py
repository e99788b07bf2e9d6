"""The round loop of a task: sample clients, send the payload, let them train, aggregate, commit."""

import math
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from fclmodels.errors import UserError
from fclmodels.federation.engine import faults
from fclmodels.federation.engine.cohort import BEFORE_ROUNDS, Cohort
from fclmodels.federation.engine.faults import Cause, Late, Turnout
from fclmodels.federation.engine.replies import Replies
from fclmodels.federation.exchange import TRAIN
from fclmodels.federation.executors.base import Executor, set_torch_threads
from fclmodels.federation.protection import inspection
from fclmodels.federation.protection.inspection import Refusal
from fclmodels.federation.protection.reply_checks import NOT_FINITE
from fclmodels.federation.server import Server

if TYPE_CHECKING:
    from fclmodels.federation.engine.checkpoints import Checkpoints
    from fclmodels.federation.engine.ledger import Ledger
    from fclmodels.federation.engine.listener import Listener
    from fclmodels.federation.method import Method
    from fclmodels.federation.training.server_training import ServerTraining

# Torch's threads while the server aggregates and no client trains. The same number everywhere: bits may depend on it.
AGGREGATING = 2


@dataclass(frozen=True)
class Position:
    """The point that a task's training has reached."""

    server: Server
    memories: dict[int, Path]  # files, by client
    round: int  # the next one
    late: dict[int, Late] = field(default_factory=dict)  # replies that have not arrived yet, by client
    usual_length: float = 0.0  # of updates: the largest of the rounds' medians so far


RoundObserver = Callable[[Position, Position], None]  # gets what a round began from, and where it ended


def learn(
    method: "Method",
    server: Server,
    memories: dict[int, Path],
    task: int,
    executor: Executor,
    checkpoints: "Checkpoints",
    ledger: "Ledger",
    listener: "Listener",
    server_training: "ServerTraining | None" = None,
    look: RoundObserver | None = None,
) -> Position:
    """Return the position after all rounds of a task, going on from the last checkpoint if there is one."""
    rounds = method.run.count_rounds(task)
    listener.on_task_start(task, rounds)
    position = checkpoints.load_for_model(method.run.make_spec(task + 1))
    if position is None:
        position = begin_task(method, server, memories, task, executor, checkpoints, ledger, listener, server_training)
    while position.round < rounds:
        before = position
        position = run_round(method, before, task, executor, checkpoints, ledger, listener)
        if look:
            look(before, position)
        if position.round == rounds or checkpoints.age >= method.run.params.federation.checkpoint_seconds:
            checkpoints.commit(position)
    return position


def begin_task(
    method: "Method",
    server: Server,
    memories: dict[int, Path],
    task: int,
    executor: Executor,
    checkpoints: "Checkpoints",
    ledger: "Ledger",
    listener: "Listener",
    server_training: "ServerTraining | None",
) -> Position:
    """Return the position before a task's first round; committed where the method trains or asks questions there."""
    server = method.start_task(server, task)
    aside = inspection.set_aside(server, method.run.params.federation.inspection)
    cohort = Cohort(
        executor,
        task,
        method.list_participants(task),
        memories,
        ledger,
        checkpoints,
        aside=aside,
        first_exchange=BEFORE_ROUNDS,
        server_training=server_training,
    )
    started = method.begin_task(server, cohort)
    report_refusals(cohort.refused, task, listener)
    cohort.close()
    position = Position(inspection.count_refusals(started, cohort.refused), cohort.memories, 0)
    if started is not server:
        checkpoints.commit(position)
    return position


def run_round(
    method: "Method",
    position: Position,
    task: int,
    executor: Executor,
    checkpoints: "Checkpoints",
    ledger: "Ledger",
    listener: "Listener",
) -> Position:
    """Return the position after one round."""
    started = time.perf_counter()
    round = position.round
    up, down = ledger.bytes_up, ledger.bytes_down
    aside = inspection.set_aside(position.server, method.run.params.federation.inspection)
    refuse_emptiness(method, task, aside)
    sample = partial(sample_clients, method, position.server, round, busy={*position.late, *aside})
    turnout = faults.draw_turnout(method, task, round, position.late, sample)
    training = turnout.training
    usual = position.usual_length
    cohort = Cohort(executor, task, training, position.memories, ledger, checkpoints, position.late, usual_length=usual)
    if method.is_centralised and round == 0:
        ledger.note_pooled_samples(task, method.count_pooled_bytes(task))
    replies = cohort.exchange(
        TRAIN,
        round,
        method.exchanges[TRAIN].payload(position.server),
        turnout,
        lambda count: listener.on_client_done(task, round, count, len(training)),
        {client: method.make_own_payload(position.server, client) for client in turnout.downloaders},
    )
    report_refusals(cohort.refused, task, listener)
    refuse_too_few(method, replies, turnout, cohort.lost, task, round)
    refuse_silence(replies, cohort.refused, task, round)
    with set_torch_threads(AGGREGATING):
        server = inspection.count_refusals(method.aggregate(position.server, replies), cohort.refused)
    cohort.close()
    refuse_divergence(server, replies.loss, task, round)
    row: dict[str, Any] = {
        "task": task,
        "round": round,
        "step": sum(method.run.count_rounds(earlier) for earlier in range(task)) + round,
        **turnout.count_clients(),
        "answers": len(replies.clients),
        "lost": len(cohort.lost),
        "refused": len(cohort.refused),
        "median": cohort.median,
        "farthest": cohort.farthest,
        "loss": replies.loss,
        "server_lr": method.find_server_lr(task),
        "bytes_up": ledger.bytes_up - up,
        "bytes_down": ledger.bytes_down - down,
        "seconds": time.perf_counter() - started,
    }
    checkpoints.rounds.append(row)
    listener.on_round_done(row)
    return Position(server, cohort.memories, round + 1, cohort.late, max(usual, cohort.median or 0.0))


def refuse_divergence(server: Server, loss: float | None, task: int, round: int) -> None:
    """Raise UserError where the model is not finite.

    It would be evaluated as one that always answers class 0, and forgets nothing.
    """
    states = (server.weights, *server.networks.values())
    floating = [weights for state in states for weights in state.values() if weights.is_floating_point()]
    if not (math.isfinite(loss or 0.0) and all(norm.isfinite() for norm in torch._foreach_norm(floating))):
        raise make_divergence_error(f"loss {loss}", task, round)


def make_divergence_error(how: str, task: int, round: int) -> UserError:
    """Return the error of a training that diverged."""
    return UserError(
        f"task {task}, round {round}: training diverged ({how}). "
        "Lower optimizer.lr, federation.server_lr if it is above 1, or the weight of the method's penalty."
    )


def refuse_too_few(
    method: "Method", replies: Replies, turnout: Turnout, lost: Mapping[int, Cause], task: int, round: int
) -> None:
    """Raise UserError where too few clients have answered because this machine had no memory to train the others."""
    without_memory = [client for client in lost if client not in turnout.lost]
    least = faults.count_needed_answers(method.run, len(turnout.delays))
    if without_memory and len(replies.clients) < least:
        raise UserError(
            f"task {task}, round {round}: there was no memory to train {len(without_memory)} of {len(turnout.delays)} "
            f"clients (first client {without_memory[0]}), and {least} must answer. "
            "Lower federation.batch_size or federation.workers."
        )


def refuse_silence(replies: Replies, refused: Sequence[Refusal], task: int, round: int) -> None:
    """Raise UserError where all replies of a round are refused: those of the next round would be too."""
    if replies.clients:
        return
    _, client, (part, why) = refused[0]
    if why == NOT_FINITE:
        raise make_divergence_error(f"client {client}'s {part} {why}", task, round)
    raise UserError(
        f"task {task}, round {round}: no reply of {len(refused)} can be used; client {client}'s {part} {why}. "
        "Look at that client, at whether training diverges, or at federation.inspection."
    )


def refuse_emptiness(method: "Method", task: int, aside: Collection[int]) -> None:
    """Raise UserError where all clients of a task are set aside."""
    able = method.list_participants(task)
    if all(client in aside for client in able):
        raise UserError(
            f"task {task}: all {len(able)} clients that have its data are set aside, for their replies were refused. "
            "Look at them, or raise federation.inspection.patience."
        )


def report_refusals(refused: Sequence[Refusal], task: int, listener: "Listener") -> None:
    """Report refusals to the listener."""
    for refusal in refused:
        listener.on_refusal(task, refusal.round, refusal.client, f"{refusal.defect.part} {refusal.defect.why}")


def sample_clients(
    method: "Method", server: Server, round: int, draw: int = 0, busy: Collection[int] = ()
) -> tuple[int, ...]:
    """Return the clients of a round, which the method chooses among those with data of the task that are not busy.

    draw: how many samples for this round were called off; each is a new random choice.
    """
    task = server.task
    available = tuple(client for client in method.list_participants(task) if client not in busy)
    count = method.run.params.federation.clients_per_round or len(available)
    if count >= len(available):
        return available
    random = method.run.make_generator("clients", task, round, *([draw] if draw else []))
    clients = tuple(sorted(method.choose_clients(server, round, available, count, random)))
    if not clients or len({*clients} & {*available}) < len(clients):
        raise ValueError(f"{method.name} must choose each client of a round once, of those available: {clients}")
    return clients
