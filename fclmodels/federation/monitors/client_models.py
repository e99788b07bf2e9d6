"""Local and global accuracy of the clients' own models, after a task's last round (STAMP, Figure 1).

A client's own model is what its training makes of the server's model before that round, before any averaging. The
monitor lets each client of the task train once more from there, with the same random numbers, memory and settings, and
evaluates the result with no task given (or with it, where each task has its own head), mean over the tasks so far:

    local_accuracy     on the client's own test rows (those that clients share count as its own), mean over clients that
                       have some
    global_accuracy    on the test rows of all clients, mean over clients

The server's model has one accuracy for both: `accuracy`, or ACC. A large gap says that clients' models serve their
owners alone. It costs a further round of training by all clients and two evaluations a client, once a task.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import polars as pl

from fclmodels.data.splits.split_reader import Rows
from fclmodels.errors import UserError
from fclmodels.federation import evaluation
from fclmodels.federation.client import Client
from fclmodels.federation.engine.journal import Log
from fclmodels.federation.exchange import TRAIN
from fclmodels.federation.monitors.oracles.gradients import refuse_personal
from fclmodels.federation.monitors.progress import read_accuracies
from fclmodels.federation.monitors.rows import Monitor
from fclmodels.federation.server import Server
from fclmodels.storage import trees

if TYPE_CHECKING:
    from fclmodels.federation.engine.rounds import Position
    from fclmodels.federation.method import Method


def sends_update(method: "Method", task: int) -> bool:
    """Return whether clients of a task send an update of the model."""
    return {"update", "weight"} <= method.exchanges[TRAIN].form(task, 0).keys()


class ClientModels(Monitor):
    """The accuracy of each client's model on its own test rows, and on everyone's."""

    def __init__(self, method: "Method", task: int, log: Log) -> None:
        refuse_personal(method, "client_models", "model")
        if method.has_global_model:
            raise UserError(
                f"monitors.client_models: clients of {method.name} have models of their own, whose accuracies are the "
                "readings personal_*. Set it to false."
            )
        if not sends_update(method, 0):
            raise UserError(
                f"monitors.client_models: clients of {method.name} send no update of the model. Set it to false."
            )
        super().__init__(task, log)
        self.method = method

    def look(self, before: "Position", after: "Position") -> None:
        method = self.method
        if after.round < method.run.count_rounds(self.task) or not sends_update(method, self.task):
            return
        learned, everyone = range(self.task + 1), method.list_participants(self.task)
        shared = [method.run.splits.select_test_rows(task) for task in learned]
        local, everyones = [], []
        for client in everyone:
            model = self._train_again(before, client)
            own = [method.run.splits.select_test_rows(task, client) for task in learned]
            if any(map(len, own)):
                local.append(self._evaluate(model, own))
            everyones.append(self._evaluate(model, shared))
        if local:
            self.note("local_accuracy", sum(local) / len(local), before.round)
        self.note("global_accuracy", sum(everyones) / len(everyones), before.round)

    def _train_again(self, before: "Position", index: int) -> Server:
        """Return the server with the model that a client's training makes of it."""
        method, server = self.method, before.server
        memory = trees.load(before.memories[index], method.run.device) if index in before.memories else {}
        client = Client(index, self.task, before.round, method.run, method.select_rows(self.task, index), memory)
        payload = {**method.exchanges[TRAIN].payload(server), **method.make_own_payload(server, index)}
        parts = method.exchanges[TRAIN].answer(client, payload).tensors
        weight = parts["weight"]["weight"].item()
        changes = {**parts["update"], **parts.get("statistics", {})}
        moved = {name: server.weights[name] + change.cpu() / weight for name, change in changes.items()}
        return replace(server, weights={**server.weights, **moved})

    def _evaluate(self, server: Server, rows: Sequence[Rows]) -> float:
        """Return the mean accuracy over the tasks with test rows."""
        predict, columns = self.method.make_predictor(server), self.method.list_columns(server)
        table = evaluation.read(self.method.run, predict, columns, rows, self.task + 1, alone=False).accuracy
        accuracies = read_accuracies(table.filter(pl.col("after") == self.task + 1), server)
        return sum(accuracies.values()) / len(accuracies)
