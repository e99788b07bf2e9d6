"""Tables that the commands print of one or several runs."""

import os
from collections.abc import Iterable, Sequence
from itertools import groupby
from operator import itemgetter
from pathlib import Path
from statistics import fmean
from typing import Any

import polars as pl

from fclmodels.metrics import select_shown
from fclmodels.report import labels
from fclmodels.report.comparison import Fall, compare_groups, summarise_groups
from fclmodels.report.paper_figures import Figure, collect_figures, list_paper_notes
from fclmodels.report.read_runs import describe_batch_size, group_runs, read_runs
from flows.cli import terminal

MB = 1e6
TITLES = {
    "end of task": "in the exchanges at the end of a task",
    "rounds": "in the rounds of a task",
    "kept": "stored by a client after a task",
}


def print_run(result: dict[str, Any]) -> None:
    """Print a run's metrics by reading, and the notes that belong to them."""
    names = ("acc", "learning_acc", "ft", "avg", "worst_acc")
    rows = [
        {"reading": reading.replace("_", "-")}
        | {name.replace("_", " "): terminal.format_percent(values[name]) for name in names}
        for reading, values in select_shown(result["metrics"]).items()
    ]
    terminal.print_table(rows)
    for note in labels.list_notes(result):
        terminal.tell(note)


def print_comparison(runs: Sequence[Path]) -> None:
    """Print methods by reading, with the paper's rows below if the runs are of a preset, and the notes on them."""
    groups = group_runs(read_runs(runs))
    table, papers = compare_groups(groups).to_dicts(), collect_figures(groups)
    by_fgt = any("fgt" in figure.values for figures in papers.values() for figure in figures)
    titles = {"acc": "accuracy", "learning_acc": "right after"}
    titles |= {"fgt": "forgetting (FGT)"} if by_fgt else {"ft": "forgetting"}
    titles |= {"worst_drop": "worst drop"}
    readings = dict.fromkeys(row["reading"] for row in table)
    for reading in readings:
        rows = [
            {"method": row["method"], "seeds": row["seeds"]}
            | {title: terminal.format_percent(row[name], row[f"{name}_std"]) for name, title in titles.items()}
            for row in table
            if row["reading"] == reading
        ]
        rows += [_make_paper_row(figure, titles) for figure in papers.get(reading, ()) if figure.has_metrics]
        terminal.print_table(rows, title=f"{reading.replace('_', '-')}, in %")
    costs = {row["method"]: _make_cost_row(row) for row in table}
    terminal.print_table(list(costs.values()), title="a run")
    overview = [
        {
            "method": of.group.label,
            "task not given": _format_fall(of.task_not_given),
            "task given": _format_fall(of.task_given),
            "sent": terminal.format_bytes(of.bytes),
            "leaves a client": ", ".join(of.leaves) or "all samples",
        }
        for of in summarise_groups(groups)
    ]
    terminal.print_table(overview, title="at a glance: accuracy in %, right after learning → at the end")
    batches = labels.explain_batches(readings, describe_batch_size(groups))
    for note in filter(None, (batches, *list_paper_notes(groups))):
        terminal.tell(note)


def print_traffic(table: pl.DataFrame) -> None:
    """Print the MB that one client sends, receives or stores at a time, a column a task; `times`: how often in a task.

    A part that shows as 0.000 throughout is left out.
    """
    tasks, names = table["task"].unique().sort().to_list(), _shorten_names(table["run"].unique())
    largest = pl.col("bytes_each").max().over("when", "direction", "kind")
    visible = table.filter(largest / MB >= 0.0005)
    for when, part in groupby(visible.to_dicts(), key=itemgetter("when")):
        rows = []
        for (direction, kind, run), of_run in groupby(part, key=itemgetter("direction", "kind", "run")):
            by_task = {row["task"]: row for row in of_run}
            times = fmean(row["times"] for row in by_task.values())
            sizes = {str(t): f"{by_task[t]['bytes_each'] / MB:.3f}" if t in by_task else None for t in tasks}
            rows.append({"": direction, "kind": kind, "run": names[run], "times": f"{times:.3g}", **sizes})
        terminal.print_table(rows, title=f"{TITLES[when]}: MB each time, by task")
    if len(visible) < len(table):
        terminal.tell("Parts that would show as 0.000 are left out; --json has them.")


def _make_cost_row(row: dict[str, Any]) -> dict[str, Any]:
    """Return a method's costs; it has rounds to best if monitors.accuracy was on."""
    return {
        "method": row["method"],
        "sent up": terminal.format_bytes(row["bytes_up"]),
        "seconds": f"{row['seconds']:.1f}",
        "a round": terminal.format_number(row["seconds_per_round"]),
        "rounds to best": terminal.format_number(row["rounds_to_best"]),
    }


def _format_fall(fall: Fall) -> str:
    return f"{terminal.format_percent(fall.learned)} → {terminal.format_percent(fall.end)}"


def _shorten_names(runs: Iterable[str]) -> dict[str, str]:
    """Return each run's folder relative to the one that they all lie in."""
    folders = {run: os.path.abspath(run) for run in runs}
    shared = os.path.commonpath([os.path.dirname(folder) for folder in folders.values()])
    return {run: os.path.relpath(folder, shared) for run, folder in folders.items()}


def _make_paper_row(figure: Figure, titles: dict[str, str]) -> dict[str, Any]:
    """Return a paper's row of the comparison; a figure is empty if the paper has another metric than the column."""
    figures = {column: figure.text(name) for name, column in titles.items()}
    return {"method": f"paper: {figure.title}", "seeds": None, **figures}
