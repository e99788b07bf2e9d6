"""The monitors that a run's settings switch on while a task is learned."""

from typing import TYPE_CHECKING

import polars as pl

from fclmodels.federation.engine.journal import Log
from fclmodels.federation.monitors.client_models import ClientModels
from fclmodels.federation.monitors.oracles.conflicts import Conflicts
from fclmodels.federation.monitors.oracles.gradients import Oracle
from fclmodels.federation.monitors.oracles.transfer import Transfer
from fclmodels.federation.monitors.progress import Accuracy, Drift
from fclmodels.federation.monitors.rows import Monitor, make_table
from fclmodels.federation.server import Server

if TYPE_CHECKING:
    from fclmodels.federation.engine.rounds import Position
    from fclmodels.federation.method import Method


class Watch:
    """All monitors as one, with one log."""

    def __init__(self, method: "Method", task: int, log: Log, start: Server) -> None:
        on = method.run.params.monitors
        self.log = log
        self.monitors: list[Monitor] = []
        if on.gradients:
            self.monitors.append(Oracle(method, task, log))
        if on.accuracy:
            self.monitors.append(Accuracy(method, task, log))
        if on.drift:
            self.monitors.append(Drift(method, task, log, start))
        if on.conflicts:
            self.monitors.append(Conflicts(method, task, log))
        if on.transfer:
            self.monitors.append(Transfer(method, task, log, start))
        if on.client_models:
            self.monitors.append(ClientModels(method, task, log))

    def look(self, before: "Position", after: "Position") -> None:
        for monitor in self.monitors:
            monitor.look(before, after)

    def on_task_learned(self, server: Server) -> None:
        for monitor in self.monitors:
            monitor.on_task_learned(server)

    def table(self) -> pl.DataFrame:
        return make_table(self.log.read_rows())
