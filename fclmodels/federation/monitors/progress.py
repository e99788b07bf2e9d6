r"""Accuracy and drift during the rounds of a task: after every `monitors.every` of them, and after the last one.

accuracy: the accuracy [0, 1] on the test rows of each task so far (about) and their mean (about null), in which all
tasks count the same as in ACC; F.5 of SPECIAL puts their samples together. It is task-aware where each task has its own
head, else task-agnostic. It is about rounds: a change of the model at a task's end (ema averages it then) shows in the
accuracy matrix only. It takes one evaluation; nothing is tuned, chosen or stopped by it.

drift: ||W - W*||, W the model after the round, W* the one that the previous task left, whatever the method makes of it;
over the parameters that W* has (of a head or prompts that have grown, the old ones), not over running statistics.

drift_bound, where the server anchors its model to W*: the bound of SPECIAL's Lemma 4.9. The paper's text at hand lacks
its formula; this is our own derivation, for plain SGD. With ||g|| <= G for all mini-batches (Assumption 4.1), a client
that takes at most K steps moves by at most eta_l K G, and so does their weighted mean u. The server makes of round r

    W_{r+1} - W* = (W_r + eta_g u - W*) / (1 + lambda),    so that    d_{r+1} <= (d_r + eta_g eta_l K G) / (1 + lambda)

with d_0 = 0. By induction d_r <= B = eta_g eta_l K G / lambda for all r, as (B + lambda B) / (1 + lambda) = B. Where
eta_l or G change from round to round, B is the largest over rounds, by the same induction. Under `lambda: auto` some
rounds have no anchor, and so no bound. Here B is that of one round, with G as

largest_gradient: the largest ||g|| at W before the round, over all clients' mini-batches, in evaluation mode, not
augmented. The rounds in between and the steps within a round are not measured: G is a lower estimate.
"""

import math
from typing import TYPE_CHECKING

import polars as pl

from fclmodels.federation import evaluation
from fclmodels.federation.engine.journal import Log
from fclmodels.federation.monitors.oracles.gradients import (
    compute_squared_norm,
    measure_largest_gradient,
    refuse_personal,
)
from fclmodels.federation.monitors.rows import Monitor
from fclmodels.federation.server import Server

if TYPE_CHECKING:
    from fclmodels.federation.engine.rounds import Position
    from fclmodels.federation.method import Method


class Accuracy(Monitor):
    """The accuracy on all tasks so far."""

    def __init__(self, method: "Method", task: int, log: Log) -> None:
        refuse_personal(method, "accuracy", "model")
        super().__init__(task, log)
        self.method = method

    def look(self, before: "Position", after: "Position") -> None:
        round = before.round
        if not is_due(self.method, self.task, round):
            return
        accuracies = evaluate_so_far(self.method, after.server)
        for about, accuracy in accuracies.items():
            self.note("accuracy", accuracy, round, about)
        self.note("accuracy", sum(accuracies.values()) / len(accuracies), round)


class Drift(Monitor):
    """The distance from the last task's model, and its bound."""

    def __init__(self, method: "Method", task: int, log: Log, start: Server) -> None:
        super().__init__(task, log)
        self.method = method
        self.start = start

    def look(self, before: "Position", after: "Position") -> None:
        round = before.round
        if self.task == 0 or not is_due(self.method, self.task, round):
            return
        self.note("drift", measure_drift(self.method, after.server, self.start), round)
        if weight := self.method.find_anchor_weight(after.server):
            G = measure_largest_gradient(self.method, before.server, self.task)
            self.note("largest_gradient", G, round)
            self.note("drift_bound", bound_movement(self.method, self.task, round) * G / weight, round)


def is_due(method: "Method", task: int, round: int) -> bool:
    """Return whether the settings ask for rows after this round."""
    count = round + 1
    return count % method.run.params.monitors.every == 0 or count == method.run.count_rounds(task)


def evaluate_so_far(method: "Method", server: Server) -> dict[int, float]:
    """Return the accuracy by task, up to the one being learned; of the tasks that have test rows."""
    return read_accuracies(evaluation.evaluate_learned(method, server), server)


def read_accuracies(table: pl.DataFrame, server: Server) -> dict[int, float]:
    """Return the accuracy by task in a table: of all rows together, with the task given where each has its own head."""
    reading = "task_aware" if server.spec.head == "per-task" else "task_agnostic"
    rows = table.filter(pl.col("reading") == reading, pl.col("client").is_null(), pl.col("total") > 0).sort("task")
    return {task: correct / total for task, correct, total in rows.select("task", "correct", "total").iter_rows()}


def measure_drift(method: "Method", server: Server, anchor: Server) -> float:
    """Return ||W - W*||."""
    parameters = dict(method.networks.load(server.spec, server.weights).named_parameters())
    pairs = [(server.weights[name], anchor.weights[name]) for name in parameters if name in anchor.weights]
    return math.sqrt(compute_squared_norm(w[tuple(map(slice, old.shape))].double() - old.double() for w, old in pairs))


def bound_movement(method: "Method", task: int, round: int) -> float:
    """Return eta_g eta_l K of a round: how far plain SGD moves the model where no gradient is longer than 1."""
    lr = method.run.params.optimizer.compute_lr(round, round * method.run.params.federation.local_epochs)
    return method.find_server_lr(task) * lr * method.count_local_steps(task)
