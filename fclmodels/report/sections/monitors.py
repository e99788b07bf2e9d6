"""Values of monitors (federation/monitors/) for the page: means over seeds, of the runs that had them on."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl

from fclmodels.report.charts.axes import choose_ticks_around, choose_ticks_from_zero
from fclmodels.report.charts.line_charts import LineChart, Series, draw_line_chart
from fclmodels.report.comparison import compute_mean_and_std
from fclmodels.report.read_runs import Group
from fclmodels.report.sections.accuracy_and_drift import PERCENT, draw_boundaries, draw_drift
from fclmodels.report.sections.knowledge import load_used_shares
from fclmodels.report.sections.matrices import build_cells
from fclmodels.report.sections.theorem_assumptions import ALL_CLIENTS, PLAIN_SGD, list_uncovered


def build_monitors(groups: Sequence[Group]) -> dict[str, Any] | None:
    """Return charts and tables, or None where no run had a monitor on."""
    watched = [run.folder for group in groups for run in group.runs if set(run.monitors["monitor"]) - {"used_share"}]
    if not watched:
        return None
    return {
        "runs": watched,
        "gradients": [chart for name in ("rho", "beta") if (chart := _draw_monitor(groups, name)).curves],
        "conflicts": [chart for name in CONFLICTS if (chart := _draw_monitor(groups, name)).curves],
        "transfer": [chart for name in TRANSFER if (chart := _draw_monitor(groups, name)).curves],
        "client_models": [chart for name in CLIENT_MODELS if (chart := _draw_monitor(groups, name)).curves],
        "features": [chart for name in FEATURES if (chart := _draw_monitor(groups, name)).curves],
        "boundaries": draw_boundaries(groups),
        "drift": draw_drift(groups),
        "bounds": [
            (index, _compare_with_bound(group))
            for index, group in enumerate(groups)
            if _select_rows(group, "theorem_bound")
        ],
    }


CONFLICTS = {
    "cosine_clients": "Between clients, mean",
    "negative_clients": "Between clients, in conflict",
    "divergence": "Between clients, divergence",
    "cosine_tasks": "Between a client’s tasks, mean",
    "negative_tasks": "Between a client’s tasks, in conflict",
}
TRANSFER = {
    "epsilon": "Alignment ε, the smallest of a client",
    "old_loss": "Earlier tasks’ loss",
    "old_loss_bound": "Its bound",
    "gradient_norm": "Gradient over all tasks",
}
CLIENT_MODELS = {"local_accuracy": "On the client’s own test rows", "global_accuracy": "On all clients’"}
FEATURES = {"feature_drift": "During a task, on its own rows"}
TITLES = (
    CONFLICTS
    | TRANSFER
    | CLIENT_MODELS
    | FEATURES
    | {
        "used_share": "Mean over layers",
        "rho": "ρ, the task being learned",
        "beta": "β, mean over earlier tasks",
    }
)
LABELS = {
    "used_share": "r / d, %",
    "rho": "energy left, %",
    "beta": "length left, %",
    "cosine_clients": "cosine, %",
    "negative_clients": "pairs, %",
    "divergence": "lengths of the mean",
    "cosine_tasks": "cosine, %",
    "negative_tasks": "pairs, %",
    "epsilon": "cosine, %",
    "feature_drift": "lengths of the old",
    "local_accuracy": "accuracy, %",
    "global_accuracy": "accuracy, %",
    "old_loss": "loss",
    "old_loss_bound": "loss",
    "gradient_norm": "length",
}


UNSCALED = (
    "divergence",
    "feature_drift",
    "old_loss",
    "old_loss_bound",
    "gradient_norm",
)  # the others are shown in percent


def draw_used_shares(groups: Sequence[Group]) -> list[LineChart]:
    """Draw the used share of input space: the mean over layers, then each layer."""
    rows = [{run.folder: of_run for run in group.runs if len(of_run := load_used_shares(run))} for group in groups]
    columns = [of_run["layer"] for of_group in rows for of_run in of_group.values()]
    layers = dict.fromkeys(layer for column in columns for layer in column.drop_nulls())
    return [_draw(groups, rows, "used_share", layer) for layer in (None, *layers)] if layers else []


def _draw_monitor(groups: Sequence[Group], monitor: str) -> LineChart:
    return _draw(groups, [_select_rows(group, monitor) for group in groups], monitor, None)


def _draw(
    groups: Sequence[Group], rows: Sequence[dict[Path, pl.DataFrame]], monitor: str, layer: str | None
) -> LineChart:
    lines = [_average(index, group, rows[index], monitor, layer) for index, group in enumerate(groups) if rows[index]]
    lines = [line for line in lines if line.x]
    return draw_line_chart(layer or TITLES[monitor], lines, "task", LABELS[monitor], _choose_ticks(monitor, lines))


def _choose_ticks(monitor: str, lines: Sequence[Series]) -> Sequence[float]:
    """Return 0 to 100 for shares; cosines may be below 0, lengths and losses above 1, as far as they were measured."""
    points = [(m, s) for line in lines for m, s in zip(line.mean, line.std, strict=True) if m is not None]
    if monitor in ("cosine_clients", "cosine_tasks", "epsilon"):
        return choose_ticks_around([(0.0, None), *points])
    if monitor in UNSCALED:
        return choose_ticks_from_zero(max((mean + (std or 0) for mean, std in points), default=0))
    return PERCENT


def _average(index: int, group: Group, rows: dict[Path, pl.DataFrame], monitor: str, layer: str | None) -> Series:
    """Return values by task, shares and cosines in percent; of a run, the mean over rounds and earlier tasks."""
    scale = 1 if monitor in UNSCALED else 100
    of_runs = [
        run.filter(pl.col("layer").eq_missing(pl.lit(layer))).group_by("task").agg(pl.col("value").sort().mean())
        for run in rows.values()
    ]
    together = pl.concat(of_runs).group_by("task").agg(pl.col("value").sort() * scale).sort("task")
    values = [compute_mean_and_std(values) for values in together["value"].to_list()]
    tasks = (together["task"] + 1).to_list()
    return Series(index, group.label, tasks, [mean for mean, _ in values], [std for _, std in values], [*rows])


def _select_rows(group: Group, monitor: str) -> dict[Path, pl.DataFrame]:
    """Return the rows of a monitor in each run that has some."""
    of_runs = {run.folder: run.monitors.filter(pl.col("monitor") == monitor) for run in group.runs}
    return {folder: rows for folder, rows in of_runs.items() if not rows.is_empty()}


def _compare_with_bound(group: Group) -> dict[str, Any]:
    """Return beta of each pair of tasks, and the loss increase of each old task at the end beside its bound."""
    tasks = group.runs[0].tasks
    watched = {run.folder: run.monitors for run in group.runs if "theorem_bound" in run.monitors["monitor"]}
    betas, rises, bounds = (
        build_cells(
            np.stack([_build_matrix(table.filter(pl.col("monitor") == name), tasks) for table in watched.values()])
        )
        for name in ("beta", "loss_increase", "theorem_bound")
    )
    return {
        "seeds": len(watched),
        "runs": [*watched],
        "betas": [(task, row[: task - 1]) for task, row in enumerate(betas, start=1) if task > 1],
        "rises": list(zip(rises[-1][:-1], bounds[-1][:-1], strict=True)),
        "uncovered": list_uncovered(group.runs[0], {**PLAIN_SGD, **ALL_CLIENTS}),
    }


def _build_matrix(rows: pl.DataFrame, tasks: int) -> np.ndarray:
    """Return the mean over rounds [task, about], NaN where there is no row."""
    values = np.full((tasks, tasks), np.nan)
    means = rows.drop_nulls("about").group_by("task", "about").agg(pl.col("value").sort().mean())
    for task, about, value in means.iter_rows():
        values[task, about] = value
    return values
