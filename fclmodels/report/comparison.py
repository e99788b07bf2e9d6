"""Frames of a comparison, which `fcl compare` prints and plots are drawn from.

A mean over seeds is None where one of its runs has no value, and one seed has no standard deviation.
"""

from collections.abc import Iterable, Sequence
from pathlib import Path
from statistics import fmean, stdev
from typing import NamedTuple

import polars as pl

from fclmodels.metrics import CLIENT_METRICS, CONFUSION_METRICS, MATRIX_METRICS, accuracy_curve, sort_readings
from fclmodels.report import labels
from fclmodels.report.read_runs import Group, RunFolder, group_runs, read_runs

METRICS = (*MATRIX_METRICS, *CLIENT_METRICS, *CONFUSION_METRICS)
COSTS = (
    *("bytes_up", "bytes_down", "bytes_kept", "client_bytes", "peak_server", "peak_worker"),
    *("seconds", "seconds_per_round", "rounds_to_best"),
)


def compare_folders(folders: Sequence[Path | str]) -> pl.DataFrame:
    """Return methods side by side, a row for each reading and method.

    Columns: reading, method, seeds (how many), then each metric and cost with its mean over seeds, followed by
    `<name>_std`, the sample standard deviation (n - 1). Accuracies are shares of 1, costs bytes and seconds a run,
    seconds a round, and rounds to the best (metrics.rounds_to_best, where monitors.accuracy was on).
    """
    return compare_groups(group_runs(read_runs(folders)))


def compare_groups(groups: Sequence[Group]) -> pl.DataFrame:
    """Return the frame of `compare_folders` for runs already read and grouped."""
    schema = {"reading": pl.String, "method": pl.String, "seeds": pl.Int64}
    schema |= {column: pl.Float64 for name in (*METRICS, *COSTS) for column in (name, f"{name}_std")}
    rows = [
        _build_row(reading, group)
        for reading in list_readings(groups)
        for group in groups
        if _has_reading(group, reading)
    ]
    return pl.DataFrame(rows, schema=schema)


def list_accuracy_curves(folders: Sequence[Path | str]) -> pl.DataFrame:
    """Return mean accuracy over the tasks learned so far: method, seed, reading, learned (1..T), accuracy."""
    return pl.DataFrame(
        [
            {**names, "reading": reading, "learned": learned, "accuracy": accuracy}
            for names, run in _read_named_runs(folders)
            for reading, a in run.matrices.items()
            for learned, accuracy in enumerate(accuracy_curve(a).tolist(), start=1)
        ]
    ).fill_nan(None)


def list_accuracy_cells(folders: Sequence[Path | str]) -> pl.DataFrame:
    """Return the accuracy matrices, a row a cell: method, seed, reading, learned (0..T), task (from 1), accuracy."""
    return pl.DataFrame(
        [
            {**names, "reading": reading, "learned": learned, "task": task, "accuracy": accuracy}
            for names, run in _read_named_runs(folders)
            for reading, a in run.matrices.items()
            for learned, row in enumerate(a.tolist())
            for task, accuracy in enumerate(row, start=1)
        ]
    ).fill_nan(None)


def sum_bytes_by_task(folders: Sequence[Path | str]) -> pl.DataFrame:
    """Sum what was sent while each task was learned, exchanges at its end included.

    Columns: method, seed, task (from 1), bytes_up, bytes_down.
    """

    def sum_bytes(direction: str) -> pl.Expr:
        return pl.col("bytes").filter(pl.col("direction") == direction).sum().alias(f"bytes_{direction}")

    frames = [
        run.ledger.group_by(pl.col("task") + 1)
        .agg(sum_bytes("up"), sum_bytes("down"))
        .sort("task")
        .select(*(pl.lit(value).alias(key) for key, value in names.items()), pl.all())
        for names, run in _read_named_runs(folders)
    ]
    return pl.concat(frames)


def summarise_ledger(group: Group) -> pl.DataFrame:
    """Return what passed between clients and server and what clients keep, part by part.

    Columns: direction, part, kind, least (what the method needs of it: "sum" or "each"), in_rounds and at_end (whether
    it was sent in rounds, at the end of tasks), largest (bytes of the largest single message), bytes (all messages of
    a run, mean over seeds; for what is kept, `largest` is the one that means something).
    """
    messages = pl.concat([run.ledger for run in group.runs]).filter(pl.col("direction").is_in([*labels.DIRECTIONS]))
    parts = messages.group_by("direction", "part", "kind", "least").agg(
        (pl.col("round") >= 0).any().alias("in_rounds"),
        (pl.col("round") < 0).any().alias("at_end"),
        pl.col("bytes").max().alias("largest"),
        (pl.col("bytes").sum() / len(group.runs)).alias("bytes"),
    )
    return parts.sort("direction", "bytes", "part", "kind", "least", descending=[True, True, False, False, False])


class Fall(NamedTuple):
    """Accuracy right after each task was learned, and at the end: means over tasks and seeds, None where undefined."""

    learned: float | None
    end: float | None


class Overview(NamedTuple):
    """What a method remembers, what it costs, and what leaves a client."""

    group: Group
    task_not_given: Fall  # the test sample's task is not given: the method predicts it, or all classes compete
    task_given: Fall  # it is given
    bytes: float  # of a run, up and down
    seconds: float  # of a run
    leaves: tuple[str, ...]  # kinds of what clients send, the largest first; none where all samples lie in one place


def summarise_groups(groups: Sequence[Group]) -> list[Overview]:
    """Return the few facts of each group that a first look needs."""
    overviews = []
    for group in groups:
        readings = list_readings([group])
        task_not_given = "task_predicted" if "task_predicted" in readings else "task_agnostic"
        sent = summarise_ledger(group).filter(pl.col("direction") == "up")
        by_kind = sent.group_by("kind").agg(pl.col("bytes").sum()).sort("bytes", "kind", descending=[True, False])
        traffic = fmean(run.result.bytes_up + run.result.bytes_down for run in group.runs)
        seconds = fmean(run.result.seconds for run in group.runs)
        falls = _measure_fall(group, task_not_given), _measure_fall(group, "task_aware")
        overviews.append(Overview(group, *falls, traffic, seconds, tuple(by_kind["kind"])))
    return overviews


def _measure_fall(group: Group, reading: str) -> Fall:
    metrics = [run.metrics.get(reading, {}) for run in group.runs]
    return Fall(*(compute_mean_and_std([of.get(name) for of in metrics])[0] for name in ("learning_acc", "acc")))


def list_readings(groups: Iterable[Group]) -> list[str]:
    """Return every reading that some run has, in the usual order, unknown ones last."""
    return sort_readings(reading for group in groups for run in group.runs for reading in run.metrics)


def compute_mean_and_std(values: Sequence[float | None]) -> tuple[float | None, float | None]:
    """Return mean and sample standard deviation: both None where a value is missing, the latter for a single value."""
    numbers = [value for value in values if value is not None]
    if not numbers or len(numbers) < len(values):
        return None, None
    return fmean(numbers), stdev(numbers) if len(numbers) > 1 else None


def _has_reading(group: Group, reading: str) -> bool:
    return any(reading in run.metrics for run in group.runs)


def _build_row(reading: str, group: Group) -> dict[str, str | int | float | None]:
    row: dict[str, str | int | float | None] = {"reading": reading, "method": group.label, "seeds": len(group.runs)}
    for name in METRICS:
        values = [run.metrics.get(reading, {}).get(name) for run in group.runs]
        row[name], row[f"{name}_std"] = compute_mean_and_std(values)
    for name in COSTS:
        row[name], row[f"{name}_std"] = compute_mean_and_std([run.costs[name] for run in group.runs])
    return row


def _read_named_runs(folders: Sequence[Path | str]) -> list[tuple[dict[str, str | int], RunFolder]]:
    groups = group_runs(read_runs(folders))
    return [({"method": group.label, "seed": run.result.seed}, run) for group in groups for run in group.runs]
