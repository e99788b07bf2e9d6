"""What a monitor is, and the one table of all of them."""

import math
from collections.abc import Sequence
from typing import Any

import polars as pl

from fclmodels.federation.log import Log
from fclmodels.federation.server import Server

SCHEMA = {
    "monitor": pl.String,
    "task": pl.Int16,  # being learned, or just learned where there is no round
    "round": pl.Int32,
    "about": pl.Int16,  # the task whose accuracy, gradient or loss it is
    "layer": pl.String,
    "value": pl.Float64,
}


def table(rows: Sequence[dict[str, Any]]) -> pl.DataFrame:
    return pl.DataFrame(rows, schema=SCHEMA)


def row(
    monitor: str, task: int, value: float, round: int | None = None, about: int | None = None, layer: str | None = None
) -> dict[str, Any]:
    return dict(zip(SCHEMA, (monitor, task, round, about, layer, value), strict=True))


class Monitor:
    """Looks at the training of one task; what it sees goes to a log that the task's checkpoints keep."""

    def __init__(self, task: int, log: Log) -> None:
        self.task = task
        self.log = log

    def look(self, before: Server, after: Server, round: int) -> None:
        """At the global model before and after a round."""
        raise NotImplementedError

    def task_learned(self, server: Server) -> None:
        """At the model after the task's last round."""

    def note(self, monitor: str, value: float, round: int | None = None, about: int | None = None) -> None:
        if math.isfinite(value):  # a share of a gradient that is 0 is not defined: no row
            self.log.append(row(monitor, self.task, value, round, about))
