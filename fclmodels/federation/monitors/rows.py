"""The base class of monitors, and the one table of all of them."""

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import polars as pl

from fclmodels.federation.engine.journal import Log
from fclmodels.federation.server import Server
from fclmodels.tables import MONITORS

if TYPE_CHECKING:
    from fclmodels.federation.engine.rounds import Position


def make_table(rows: Sequence[dict[str, Any]]) -> pl.DataFrame:
    """Return rows as the table of monitors."""
    return pl.DataFrame(rows, schema=MONITORS)


def make_row(
    monitor: str, task: int, value: float, round: int | None = None, about: int | None = None, layer: str | None = None
) -> dict[str, Any]:
    """Return one row of the table."""
    return dict(zip(MONITORS, (monitor, task, round, about, layer, value), strict=True))


class Monitor:
    """Observes the training of one task; its rows go to a log that is part of the task's checkpoints."""

    def __init__(self, task: int, log: Log) -> None:
        self.task = task
        self.log = log

    def look(self, before: "Position", after: "Position") -> None:
        """Observe what a round began from, and where it ended."""
        raise NotImplementedError

    def on_task_learned(self, server: Server) -> None:
        """Observe the server after the task's last round."""

    def note(self, monitor: str, value: float, round: int | None = None, about: int | None = None) -> None:
        """Append a row to the log."""
        if math.isfinite(value):  # a share of a gradient that is 0 is not defined: no row
            self.log.append(make_row(monitor, self.task, value, round, about))
