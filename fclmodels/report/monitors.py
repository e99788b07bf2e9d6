"""What monitors saw (federation/monitors/), for the page: means over seeds, of the runs that had them on."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl

from fclmodels.report.bounds import ALL_CLIENTS, PLAIN_SGD, uncovered
from fclmodels.report.charts import Chart, Series, line_chart, ticks_above, ticks_around
from fclmodels.report.knowledge import used_shares
from fclmodels.report.matrices import cells
from fclmodels.report.progress import PERCENT, boundaries, drift
from fclmodels.report.runs import Group
from fclmodels.report.tables import spread


def monitors(groups: Sequence[Group]) -> dict[str, Any] | None:
    """Charts and tables, or None where no run had a monitor on."""
    watched = [run.folder for group in groups for run in group.runs if set(run.monitors["monitor"]) - {"used_share"}]
    if not watched:
        return None
    return {
        "runs": watched,
        "gradients": [chart for name in ("rho", "beta") if (chart := _of_monitor(groups, name)).curves],
        "conflicts": [chart for name in CONFLICTS if (chart := _of_monitor(groups, name)).curves],
        "boundaries": boundaries(groups),
        "drift": drift(groups),
        "bounds": [(index, _bounds(group)) for index, group in enumerate(groups) if _runs(group, "theorem_bound")],
    }


CONFLICTS = {
    "cosine_clients": "Between clients, mean",
    "negative_clients": "Between clients, in conflict",
    "divergence": "Between clients, divergence",
    "cosine_tasks": "Between a client’s tasks, mean",
    "negative_tasks": "Between a client’s tasks, in conflict",
}
TITLES = CONFLICTS | {
    "used_share": "Mean over layers",
    "rho": "ρ, the task being learned",
    "beta": "β, mean over earlier tasks",
}
LABELS = {
    "used_share": "r / d, %",
    "rho": "energy left, %",
    "beta": "length left, %",
    "cosine_clients": "cosine, %",
    "negative_clients": "pairs, %",
    "divergence": "lengths of the mean",
    "cosine_tasks": "cosine, %",
    "negative_tasks": "pairs, %",
}


def used(groups: Sequence[Group]) -> list[Chart]:
    """The mean over layers, then each layer."""
    seen = [{run.folder: of_run for run in group.runs if len(of_run := used_shares(run))} for group in groups]
    columns = [of_run["layer"] for of_group in seen for of_run in of_group.values()]
    layers = dict.fromkeys(layer for column in columns for layer in column.drop_nulls())
    return [_chart(groups, seen, "used_share", layer) for layer in (None, *layers)] if layers else []


def _of_monitor(groups: Sequence[Group], monitor: str) -> Chart:
    return _chart(groups, [_runs(group, monitor) for group in groups], monitor, None)


def _chart(groups: Sequence[Group], seen: Sequence[dict[Path, pl.DataFrame]], monitor: str, layer: str | None) -> Chart:
    found = [_line(index, group, seen[index], monitor, layer) for index, group in enumerate(groups) if seen[index]]
    lines = [line for line in found if line.x]
    return line_chart(layer or TITLES[monitor], lines, "task", LABELS[monitor], _ticks(monitor, lines))


def _ticks(monitor: str, lines: Sequence[Series]) -> Sequence[float]:
    """Shares reach from 0 to 100; cosines may be below 0 and divergences above 1, as far as was seen."""
    points = [(m, s) for line in lines for m, s in zip(line.mean, line.std, strict=True) if m is not None]
    if monitor in ("cosine_clients", "cosine_tasks"):
        return ticks_around([(0.0, None), *points])
    if monitor == "divergence":
        return ticks_above(max((mean + (std or 0) for mean, std in points), default=0))
    return PERCENT


def _line(index: int, group: Group, seen: dict[Path, pl.DataFrame], monitor: str, layer: str | None) -> Series:
    """By task, shares and cosines in percent: in each run the mean over rounds, and over the tasks it is about."""
    scale = 1 if monitor == "divergence" else 100
    of_runs = [
        run.filter(pl.col("layer").eq_missing(pl.lit(layer))).group_by("task").agg(pl.col("value").sort().mean())
        for run in seen.values()
    ]
    together = pl.concat(of_runs).group_by("task").agg(pl.col("value").sort() * scale).sort("task")
    values = [spread(values) for values in together["value"].to_list()]
    tasks = (together["task"] + 1).to_list()
    return Series(index, group.label, tasks, [mean for mean, _ in values], [std for _, std in values], [*seen])


def _runs(group: Group, monitor: str) -> dict[Path, pl.DataFrame]:
    """The rows of a monitor in each run that has some."""
    of_runs = {run.folder: run.monitors.filter(pl.col("monitor") == monitor) for run in group.runs}
    return {folder: rows for folder, rows in of_runs.items() if not rows.is_empty()}


def _bounds(group: Group) -> dict[str, Any]:
    """beta of each pair of tasks, and how far the loss of each old task had risen at the end, beside its bound."""
    tasks = group.runs[0].tasks
    watched = {run.folder: run.monitors for run in group.runs if "theorem_bound" in run.monitors["monitor"]}
    betas, rises, bounds = (
        cells(np.stack([_matrix(table.filter(pl.col("monitor") == name), tasks) for table in watched.values()]))
        for name in ("beta", "loss_increase", "theorem_bound")
    )
    return {
        "seeds": len(watched),
        "runs": [*watched],
        "betas": [(task, row[: task - 1]) for task, row in enumerate(betas, start=1) if task > 1],
        "rises": list(zip(rises[-1][:-1], bounds[-1][:-1], strict=True)),
        "uncovered": uncovered(group.runs[0], {**PLAIN_SGD, **ALL_CLIENTS}),
    }


def _matrix(rows: pl.DataFrame, tasks: int) -> np.ndarray:
    """[task, about]: the mean over rounds, NaN where there is no row."""
    values = np.full((tasks, tasks), np.nan)
    means = rows.drop_nulls("about").group_by("task", "about").agg(pl.col("value").sort().mean())
    for task, about, value in means.iter_rows():
        values[task, about] = value
    return values
