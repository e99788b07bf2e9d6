"""Values of the monitors `accuracy` and `drift`, round by round: means over seeds, of the runs that had them on."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import polars as pl

from fclmodels.report.charts.axes import choose_ticks_from_zero
from fclmodels.report.charts.line_charts import LineChart, Series, draw_line_chart
from fclmodels.report.comparison import compute_mean_and_std
from fclmodels.report.read_runs import Group, RunFolder
from fclmodels.report.sections.theorem_assumptions import PLAIN_SGD, list_uncovered

Spread = tuple[float | None, float | None]  # mean and standard deviation

PERCENT = (0, 20, 40, 60, 80, 100)
TITLES = {"old": "Earlier tasks, mean", "new": "The new task", "joint": "All of them, mean"}


def draw_boundaries(groups: Sequence[Group]) -> list[tuple[int, list[LineChart]]]:
    """Draw accuracy against the rounds of each task but the first (SPECIAL Figure 2).

    Returns the task, counted from 1, with charts of the earlier tasks, of the new one and of all of them together.
    """
    watched = [
        (index, group, curves) for index, group in enumerate(groups) if (curves := _average_tasks(group)) is not None
    ]
    tasks = sorted({task for _, _, curves in watched for task in curves["task"].unique() if task > 0})
    return [
        (
            task + 1,
            [
                _draw_accuracy(title, [_build_line(i, g, c, task, which) for i, g, c in watched])
                for which, title in TITLES.items()
            ],
        )
        for task in tasks
    ]


def _average_tasks(group: Group) -> pl.DataFrame | None:
    """Return mean accuracy on earlier tasks, on the new task, and on all, by run, task and rounds so far."""
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


def _build_line(index: int, group: Group, curves: pl.DataFrame, task: int, which: str) -> Series:
    """Return one method's line; that of earlier tasks begins where the last task left all tasks."""
    points = curves.filter(pl.col("task") == task).select("run", "round", which)
    if which == "old":
        before = (
            curves.filter(pl.col("task") == task - 1).sort("round").group_by("run").agg(pl.last("joint").alias("old"))
        )
        points = pl.concat([before.select("run", pl.lit(0, pl.Int32).alias("round"), "old"), points])
    return _average_runs(index, group, points.rename({which: "value"}).with_columns(pl.col("value") * 100), "round")


def _draw_accuracy(title: str, lines: list[Series]) -> LineChart:
    return draw_line_chart(title, lines, "rounds of the task", "accuracy, %", PERCENT)


def draw_drift(groups: Sequence[Group]) -> dict[str, Any] | None:
    """Draw the distance from the last task's model, with its bound where the server is anchored to that."""
    lines = [line for index, group in enumerate(groups) if (line := _build_drift_line(index, group)).x]
    if not lines:
        return None
    highest = max(m + (s or 0) for line in lines for m, s in zip(line.mean, line.std, strict=True) if m is not None)
    chart = draw_line_chart("Drift", lines, "round, over all tasks", "‖W − W*‖", choose_ticks_from_zero(highest))
    bounds = [
        (index, {"rows": rows, "uncovered": list_uncovered(group.runs[0], PLAIN_SGD)})
        for index, group in enumerate(groups)
        if (rows := _compare_with_bound(group))
    ]
    return {"chart": chart, "bounds": bounds}


def _build_drift_line(index: int, group: Group) -> Series:
    """Return a line that begins at 0 with each task, and breaks there."""
    tables = []
    for number, run in enumerate(group.runs):
        first = pl.col("step") - pl.col("round")
        starts = run.rounds.select("task", first.alias("first")).unique()
        rows = run.monitors.filter(pl.col("monitor") == "drift").join(starts, "task")
        at_start = rows.select("task", pl.col("first").alias("x"), pl.lit(0.0).alias("value")).unique()
        at_rounds = rows.select("task", (pl.col("first") + pl.col("round") + 1).alias("x"), "value")
        tables.append(pl.concat([at_start, at_rounds]).with_columns(run=pl.lit(number)))
    x: list[float] = []
    mean: list[float | None] = []
    std: list[float | None] = []
    runs: dict[Path, None] = {}
    for of_task in pl.concat(tables).sort("task").partition_by("task"):
        line = _average_runs(index, group, of_task, "x")
        x += [*line.x, line.x[-1]]
        mean += [*line.mean, None]
        std += [*line.std, None]
        runs |= dict.fromkeys(line.runs)
    return Series(index, group.label, x, mean, std, [*runs])


def _compare_with_bound(group: Group) -> list[tuple[int, Spread, Spread]]:
    """Return each task, counted from 1, with mean and spread of its largest drift and of its largest bound."""
    of_runs = [largest for run in group.runs if not (largest := _find_largest(run)).is_empty()]
    if not of_runs:
        return []
    by_task = pl.concat(of_runs).group_by("task").agg(pl.col("drift", "drift_bound").sort()).sort("task")
    return [
        (task + 1, compute_mean_and_std(drifts), compute_mean_and_std(bounds))
        for task, drifts, bounds in by_task.iter_rows()
    ]


def _find_largest(run: RunFolder) -> pl.DataFrame:
    names = ("drift", "drift_bound")
    of = [pl.col("value").filter(pl.col("monitor") == name).max().alias(name) for name in names]
    return run.monitors.group_by("task").agg(of).drop_nulls()


def _average_runs(index: int, group: Group, points: pl.DataFrame, x: str) -> Series:
    """Return mean and spread at each x over the runs that have a value there; `run` is their index in the group."""
    by_x = points.group_by(x).agg(pl.col("value").sort()).sort(x)
    values = [compute_mean_and_std(values) for values in by_x["value"].to_list()]
    runs = [group.runs[number].folder for number in points["run"].unique().sort()]
    return Series(index, group.label, by_x[x].to_list(), [mean for mean, _ in values], [std for _, std in values], runs)
