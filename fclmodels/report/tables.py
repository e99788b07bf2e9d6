"""The frames of a comparison: what `fcl compare` prints and what plots are drawn from.

A mean over seeds is None where one of its runs has no value, and one seed has no standard deviation.
"""

from collections.abc import Iterable, Sequence
from pathlib import Path
from statistics import fmean, stdev

import polars as pl

from fclmodels.metrics import OF_CLIENTS, OF_CONFUSION, OF_MATRIX, accuracy_curve, in_order
from fclmodels.report import words
from fclmodels.report.runs import Group, Run, grouped, read_runs

METRICS = (*OF_MATRIX, *OF_CLIENTS, *OF_CONFUSION)
COSTS = ("bytes_up", "bytes_down", "bytes_kept", "seconds", "seconds_per_round", "rounds_to_best")


def comparison(folders: Sequence[Path | str]) -> pl.DataFrame:
    """Methods side by side, a row for each reading and method.

    Columns: reading, method, seeds (how many), then each metric and cost with its mean over seeds, followed by
    `<name>_std`, the sample standard deviation (n - 1). Accuracies are shares of 1, costs bytes and seconds a run,
    seconds a round, and rounds to the best (metrics.rounds_to_best, where monitors.accuracy was on).
    """
    return compare(grouped(read_runs(folders)))


def compare(groups: Sequence[Group]) -> pl.DataFrame:
    """`comparison` of runs already read and grouped."""
    schema = {"reading": pl.String, "method": pl.String, "seeds": pl.Int64}
    schema |= {column: pl.Float64 for name in (*METRICS, *COSTS) for column in (name, f"{name}_std")}
    rows = [_row(reading, group) for reading in readings(groups) for group in groups if _has(group, reading)]
    return pl.DataFrame(rows, schema=schema)


def accuracy_curves(folders: Sequence[Path | str]) -> pl.DataFrame:
    """Mean accuracy over the tasks learned so far: method, seed, reading, learned (1..T), accuracy."""
    return pl.DataFrame(
        [
            {**name, "reading": reading, "learned": learned, "accuracy": accuracy}
            for name, run in _named(folders)
            for reading, a in run.matrices.items()
            for learned, accuracy in enumerate(accuracy_curve(a).tolist(), start=1)
        ]
    ).fill_nan(None)


def accuracy_cells(folders: Sequence[Path | str]) -> pl.DataFrame:
    """The accuracy matrices, a row a cell: method, seed, reading, learned (0..T), task (from 1), accuracy."""
    return pl.DataFrame(
        [
            {**name, "reading": reading, "learned": learned, "task": task, "accuracy": accuracy}
            for name, run in _named(folders)
            for reading, a in run.matrices.items()
            for learned, row in enumerate(a.tolist())
            for task, accuracy in enumerate(row, start=1)
        ]
    ).fill_nan(None)


def bytes_by_task(folders: Sequence[Path | str]) -> pl.DataFrame:
    """What was sent while each task was learned, its closing exchange included: method, seed, task (from 1),
    bytes_up, bytes_down."""

    def sent(direction: str) -> pl.Expr:
        return pl.col("bytes").filter(pl.col("direction") == direction).sum().alias(f"bytes_{direction}")

    frames = [
        run.ledger.group_by(pl.col("task") + 1)
        .agg(sent("up"), sent("down"))
        .sort("task")
        .select(*(pl.lit(value).alias(key) for key, value in name.items()), pl.all())
        for name, run in _named(folders)
    ]
    return pl.concat(frames)


def ledger(group: Group) -> pl.DataFrame:
    """What passed between clients and server and what clients keep, part by part.

    Columns: direction, part, kind, least (what the method needs of it: "sum" or "each"), in_rounds and at_end (whether
    it was sent in rounds, at the end of tasks), largest (bytes of the largest single message), bytes (all messages of
    a run, mean over seeds; for what is kept, `largest` is the one that means something).
    """
    messages = pl.concat([run.ledger for run in group.runs]).filter(pl.col("direction").is_in([*words.DIRECTIONS]))
    parts = messages.group_by("direction", "part", "kind", "least").agg(
        (pl.col("round") >= 0).any().alias("in_rounds"),
        (pl.col("round") < 0).any().alias("at_end"),
        pl.col("bytes").max().alias("largest"),
        (pl.col("bytes").sum() / len(group.runs)).alias("bytes"),
    )
    return parts.sort("direction", "bytes", "part", "kind", "least", descending=[True, True, False, False, False])


def readings(groups: Iterable[Group]) -> list[str]:
    """Every reading that some run has, in the usual order, unknown ones last."""
    return in_order(reading for group in groups for run in group.runs for reading in run.result.metrics)


def spread(values: Sequence[float | None]) -> tuple[float | None, float | None]:
    """Mean and sample standard deviation; both None where a value is missing, the latter for a single value."""
    known = [value for value in values if value is not None]
    if not known or len(known) < len(values):
        return None, None
    return fmean(known), stdev(known) if len(known) > 1 else None


def _has(group: Group, reading: str) -> bool:
    return any(reading in run.result.metrics for run in group.runs)


def _row(reading: str, group: Group) -> dict[str, str | int | float | None]:
    row: dict[str, str | int | float | None] = {"reading": reading, "method": group.label, "seeds": len(group.runs)}
    for name in METRICS:
        values = [run.result.metrics.get(reading, {}).get(name) for run in group.runs]
        row[name], row[f"{name}_std"] = spread(values)
    for name in COSTS:
        row[name], row[f"{name}_std"] = spread([run.costs[name] for run in group.runs])
    return row


def _named(folders: Sequence[Path | str]) -> list[tuple[dict[str, str | int], Run]]:
    groups = grouped(read_runs(folders))
    return [({"method": group.label, "seed": run.result.seed}, run) for group in groups for run in group.runs]
