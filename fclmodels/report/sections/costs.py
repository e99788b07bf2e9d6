"""Costs of runs for the page: traffic, time, losses by rounds, failing clients, and accuracy against cost."""

from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple

import polars as pl

from fclmodels.report import labels
from fclmodels.report.charts.axes import choose_ticks_from_zero
from fclmodels.report.charts.line_charts import LineChart, Series, draw_line_chart
from fclmodels.report.charts.scatter_charts import Plane, Spot, draw_against_cost
from fclmodels.report.comparison import COSTS, compute_mean_and_std, list_readings
from fclmodels.report.formatting import format_bytes, format_duration, format_number, format_percent
from fclmodels.report.read_runs import Group, RunFolder, describe_batch_size

LOSS_POINTS = 120  # a loss curve is averaged down to this many
Spread = tuple[float | None, float | None]


def summarise_costs(groups: Sequence[Group]) -> list[dict[str, Any]]:
    """Return costs of a run with their spread, and each as a share of the largest in its column pair, for the bars."""
    rows: list[dict[str, Any]] = []
    for index, group in enumerate(groups):
        values = {name: compute_mean_and_std([run.costs[name] for run in group.runs]) for name in COSTS}
        rounds = compute_mean_and_std([run.rounds.height for run in group.runs])[0]
        rows.append({"index": index, "group": group, "rounds": rounds, **values})
    most_bytes = max((row[name][0] or 0 for row in rows for name in ("bytes_up", "bytes_down")), default=0)
    most_seconds = max((row["seconds"][0] or 0 for row in rows), default=0)
    for row in rows:
        largest = {"bytes_up": most_bytes, "bytes_down": most_bytes, "seconds": most_seconds}
        row["share"] = {name: (row[name][0] or 0) / top if top else 0 for name, top in largest.items()}
    return rows


def summarise_stages(groups: Sequence[Group]) -> list[tuple[str, list[float | None]]]:
    """Return mean seconds of each timed stage, and of a round, a column for each group."""
    names = dict.fromkeys(name for group in groups for run in group.runs for name in run.result.timings)
    rows = [
        (name, [compute_mean_and_std([_read_timing(run, name) for run in group.runs])[0] for group in groups])
        for name in names
    ]
    seconds = [compute_mean_and_std([run.costs["seconds_per_round"] for run in group.runs])[0] for group in groups]
    rows.append(("a round", seconds))
    return [row for row in rows if any(value is not None for value in row[1])]


def _read_timing(run: RunFolder, name: str) -> float | None:
    value = run.result.timings.get(name)
    return float(value) if isinstance(value, int | float) else None


def count_faults(group: Group) -> dict[str, Spread]:
    """Count what became of the clients that were sampled in a run, with the spread; empty where none can fail."""
    counts = [run.result.faults for run in group.runs if run.result.faults]
    return {name: compute_mean_and_std([of.get(name) for of in counts]) for name in labels.FAULTS} if counts else {}


class Cost(NamedTuple):
    """A cost that accuracy is drawn against, and how it is written beside a spot and at a tick."""

    label: str
    measure: Callable[[RunFolder], float]
    format_spot: Callable[[float], str]
    format_tick: Callable[[float], str]


AXES = (
    Cost(
        "bytes of a run, up and down",
        lambda run: run.result.bytes_up + run.result.bytes_down,
        format_bytes,
        format_bytes,
    ),
    Cost("seconds of a run", lambda run: run.result.seconds, format_duration, format_number),
)


def draw_accuracy_against_costs(groups: Sequence[Group]) -> list[Plane]:
    """Draw ACC against bytes and against seconds, in each reading that two methods have.

    A run that costs nothing has no place on a logarithmic axis.
    """
    planes = []
    for reading in list_readings(groups):
        for cost in AXES:
            points = {index: of for index, group in enumerate(groups) if (of := _measure_runs(group, reading, cost))}
            spots = [_build_spot(index, groups[index].label, [*of.values()], cost) for index, of in points.items()]
            folders = [folder for of in points.values() for folder in of]
            title = labels.title_reading(reading, describe_batch_size(groups))
            planes += [draw_against_cost(title, spots, cost.label, cost.format_tick, folders)] if len(spots) > 1 else []
    return planes


def _measure_runs(group: Group, reading: str, cost: Cost) -> dict[Path, tuple[float, float]]:
    """Return cost and ACC in percent of each run that has both."""
    accs = {run.folder: run.metrics.get(reading, {}).get("acc") for run in group.runs}
    return {
        run.folder: (cost.measure(run), 100 * acc)
        for run in group.runs
        if (acc := accs[run.folder]) is not None and cost.measure(run) > 0
    }


def _build_spot(index: int, label: str, seeds: Sequence[tuple[float, float]], cost: Cost) -> Spot:
    """Return the mean over seeds, with each seed near it."""
    x, acc = (fmean(values) for values in zip(*seeds, strict=True))
    text = f"{label}: ACC {format_percent(acc / 100)} %, {cost.format_spot(x)}"
    return Spot(index, text, x, acc, near=seeds if len(seeds) > 1 else ())


def draw_losses(groups: Sequence[Group]) -> list[LineChart]:
    """Draw training loss over all rounds, thinned to LOSS_POINTS; a chart a method, as their losses differ in kind."""
    lines = [_average_loss(index, group) for index, group in enumerate(groups)]
    tops = [
        mean + (std or 0) for line in lines for mean, std in zip(line.mean, line.std, strict=True) if mean is not None
    ]
    y_ticks = choose_ticks_from_zero(max(tops, default=0))
    return [
        draw_line_chart(line.label, [line], "round, over all tasks", "mean loss of the clients", y_ticks)
        for line in lines
        if any(mean is not None for mean in line.mean)
    ]


def _average_loss(index: int, group: Group) -> Series:
    rounds = pl.concat([run.rounds.with_columns(run=pl.lit(i)) for i, run in enumerate(group.runs)])
    width = max(1, -(-rounds.height // len(group.runs) // LOSS_POINTS))
    of_run = rounds.group_by(pl.col("step") // width, "run").agg(pl.mean("loss"), (pl.mean("step") + 1).alias("round"))
    points = of_run.group_by("step").agg(pl.mean("round"), pl.mean("loss"), pl.std("loss").alias("std"))
    points = points.sort("step").fill_nan(None)
    x, mean, std = (points[name].to_list() for name in ("round", "loss", "std"))
    return Series(index, group.label, x, mean, std, [run.folder for run in group.runs])
