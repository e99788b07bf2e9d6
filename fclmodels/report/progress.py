"""What the monitors `accuracy` and `drift` saw, round by round; means over seeds, of the runs that had them on."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import polars as pl

from fclmodels.report.bounds import PLAIN_SGD, uncovered
from fclmodels.report.charts import Chart, Series, line_chart, ticks_above
from fclmodels.report.runs import Group, Run
from fclmodels.report.tables import spread

PERCENT = (0, 20, 40, 60, 80, 100)
WHICH = {"old": "Earlier tasks, mean", "new": "The new task", "joint": "All of them, mean"}


def boundaries(groups: Sequence[Group]) -> list[tuple[int, list[Chart]]]:
    """For each task but the first, counted from 1: accuracy on the earlier tasks, on it and on all of them together,
    against the rounds since it began (SPECIAL Figure 2)."""
    watched = [(index, group, curves) for index, group in enumerate(groups) if (curves := _curves(group)) is not None]
    tasks = sorted({task for _, _, curves in watched for task in curves["task"].unique() if task > 0})
    return [
        (
            task + 1,
            [_accuracy(title, [_line(i, g, c, task, which) for i, g, c in watched]) for which, title in WHICH.items()],
        )
        for task in tasks
    ]


def _curves(group: Group) -> pl.DataFrame | None:
    """By run, task and rounds done: mean accuracy on earlier tasks, on the task, and on all."""
    about = pl.col("about")
    of = {"old": about < pl.col("task"), "new": about == pl.col("task"), "joint": about.is_null()}
    tables = [
        run.monitors.filter(pl.col("monitor") == "accuracy")
        .group_by("task", pl.col("round") + 1)
        .agg(pl.col("value").filter(which).sort().mean().alias(name) for name, which in of.items())
        .with_columns(run=pl.lit(number))
        for number, run in enumerate(group.runs)
    ]
    together = pl.concat(tables)
    return None if together.is_empty() else together


def _line(index: int, group: Group, curves: pl.DataFrame, task: int, which: str) -> Series:
    """Earlier tasks begin where the last task left all that it knew."""
    points = curves.filter(pl.col("task") == task).select("run", "round", which)
    if which == "old":
        before = (
            curves.filter(pl.col("task") == task - 1).sort("round").group_by("run").agg(pl.last("joint").alias("old"))
        )
        points = pl.concat([before.select("run", pl.lit(0, pl.Int32).alias("round"), "old"), points])
    return _series(index, group, points.rename({which: "value"}).with_columns(pl.col("value") * 100), "round")


def _accuracy(title: str, lines: list[Series]) -> Chart:
    return line_chart(title, lines, "rounds of the task", "accuracy, %", PERCENT)


def drift(groups: Sequence[Group]) -> dict[str, Any] | None:
    """A chart of the distance from the last task's model, and its bound where the server is anchored to that."""
    lines = [line for index, group in enumerate(groups) if (line := _drift(index, group)).x]
    if not lines:
        return None
    highest = max(m + (s or 0) for line in lines for m, s in zip(line.mean, line.std, strict=True) if m is not None)
    chart = line_chart("Drift", lines, "round, over all tasks", "‖W − W*‖", ticks_above(highest))
    bounds = [
        (index, {"rows": rows, "uncovered": uncovered(group.runs[0], PLAIN_SGD)})
        for index, group in enumerate(groups)
        if (rows := _bounds(group))
    ]
    return {"chart": chart, "bounds": bounds}


def _drift(index: int, group: Group) -> Series:
    """It begins at 0 with each task, and the line breaks there."""
    tables = []
    for number, run in enumerate(group.runs):
        first = pl.col("step") - pl.col("round")
        starts = run.rounds.select("task", first.alias("first")).unique()
        seen = run.monitors.filter(pl.col("monitor") == "drift").join(starts, "task")
        begun = seen.select("task", pl.col("first").alias("x"), pl.lit(0.0).alias("value")).unique()
        at_rounds = seen.select("task", (pl.col("first") + pl.col("round") + 1).alias("x"), "value")
        tables.append(pl.concat([begun, at_rounds]).with_columns(run=pl.lit(number)))
    x: list[float] = []
    mean: list[float | None] = []
    std: list[float | None] = []
    runs: dict[Path, None] = {}
    for of_task in pl.concat(tables).sort("task").partition_by("task"):
        line = _series(index, group, of_task, "x")
        x += [*line.x, line.x[-1]]
        mean += [*line.mean, None]
        std += [*line.std, None]
        runs |= dict.fromkeys(line.runs)
    return Series(index, group.label, x, mean, std, [*runs])


def _bounds(group: Group) -> list[tuple[int, tuple[float | None, float | None], tuple[float | None, float | None]]]:
    """For each task, counted from 1: the largest drift and the largest bound that were seen, mean and spread."""
    of_runs = [largest for run in group.runs if not (largest := _largest(run)).is_empty()]
    if not of_runs:
        return []
    by_task = pl.concat(of_runs).group_by("task").agg(pl.col("drift", "drift_bound").sort()).sort("task")
    return [(task + 1, spread(drifts), spread(bounds)) for task, drifts, bounds in by_task.iter_rows()]


def _largest(run: Run) -> pl.DataFrame:
    names = ("drift", "drift_bound")
    of = [pl.col("value").filter(pl.col("monitor") == name).max().alias(name) for name in names]
    return run.monitors.group_by("task").agg(of).drop_nulls()


def _series(index: int, group: Group, points: pl.DataFrame, x: str) -> Series:
    """Mean and spread at each place, over the runs (`run`: which of the group's) that have something there."""
    by_x = points.group_by(x).agg(pl.col("value").sort()).sort(x)
    values = [spread(values) for values in by_x["value"].to_list()]
    runs = [group.runs[number].folder for number in points["run"].unique().sort()]
    return Series(index, group.label, by_x[x].to_list(), [mean for mean, _ in values], [std for _, std in values], runs)
