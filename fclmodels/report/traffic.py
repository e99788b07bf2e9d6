"""Traffic of one client in each task: runs side by side, read from their ledgers alone."""

from collections.abc import Sequence
from pathlib import Path

import polars as pl

from fclmodels.report.read_runs import read_table, refuse_missing

WHEN = ("end of task", "rounds", "kept")
DIRECTIONS = ("up", "down", "kept")


def measure_traffic(folders: Sequence[Path]) -> pl.DataFrame:
    """Return a row for each kind of part, run and task.

    Columns: when (in the task's rounds, in the exchanges at its end, or kept after it), direction, kind, run, task
    (from 1), clients (how many took part), times (how often one of them sent, received or kept it, in the mean),
    bytes_each (one message) and bytes_per_client (all of the task), both means over clients.
    """
    ledgers = pl.concat([_read_ledger(folder) for folder in folders])
    messages = ledgers.filter(pl.col("direction").is_in(["up", "down"]))
    memories = ledgers.filter(pl.col("direction") == "kept")
    last_memories = memories.group_by("run", "task", "client", maintain_order=True).last().select(messages.columns)
    rows = pl.concat([messages, last_memories]).with_columns(
        pl.col("task") + 1,
        when=pl.when(pl.col("direction") == "kept")
        .then(pl.lit("kept"))
        .when(pl.col("round") < 0)
        .then(pl.lit("end of task"))
        .otherwise(pl.lit("rounds")),
    )
    sums = rows.group_by("when", "direction", "kind", "run", "task").agg(
        pl.col("client").n_unique().alias("clients"),
        pl.struct("round", "client").n_unique().alias("messages"),
        pl.col("bytes").sum(),
    )
    means = sums.with_columns(
        (pl.col("messages") / pl.col("clients")).alias("times"),
        (pl.col("bytes") / pl.col("messages")).alias("bytes_each"),
        (pl.col("bytes") / pl.col("clients")).alias("bytes_per_client"),
    )
    orders = {"when": WHEN, "direction": DIRECTIONS, "run": [*dict.fromkeys(map(str, folders))]}
    when, direction, run = (pl.col(column).cast(pl.Enum(order)) for column, order in orders.items())
    return means.drop("messages", "bytes").sort(when, direction, "kind", run, "task")


def _read_ledger(folder: Path) -> pl.DataFrame:
    refuse_missing(folder)
    return read_table(folder, "ledger").with_columns(run=pl.lit(str(folder)))
