"""Tables of several runs as the commands print them."""

import os
from collections.abc import Iterable, Sequence
from itertools import groupby
from operator import itemgetter
from pathlib import Path
from statistics import fmean
from typing import Any

import polars as pl

from fclmodels import report
from fclmodels.report import words
from fclmodels.report.presets import Figure
from fclmodels.report.runs import batch_size
from flows import terminal

MB = 1e6
TITLES = {
    "end of task": "in the exchanges at the end of a task",
    "rounds": "in the rounds of a task",
    "kept": "kept by a client after a task",
}


def show_run(result: dict[str, Any]) -> None:
    """A run's metrics by reading, and what a reader must know."""
    shown = ("acc", "learning_acc", "ft", "avg", "worst_acc")
    rows = [
        {"reading": reading.replace("_", "-")}
        | {name.replace("_", " "): terminal.percent(values[name]) for name in shown}
        for reading, values in result["metrics"].items()
    ]
    terminal.show(rows, as_json=False)
    for note in words.notes(result):
        terminal.tell(note)


def show_comparison(runs: Sequence[Path]) -> None:
    """Methods by reading, with the paper's rows below where the runs are of a preset, and what a reader must know."""
    groups = report.grouped(report.read_runs(runs))
    table, papers = report.compare(groups).to_dicts(), report.published(groups)
    by_fgt = any("fgt" in figure.values for figures in papers.values() for figure in figures)
    shown = {"acc": "accuracy", "learning_acc": "right after"}
    shown |= {"fgt": "forgetting (FGT)"} if by_fgt else {"ft": "forgetting"}
    shown |= {"worst_drop": "worst drop"}
    readings = dict.fromkeys(row["reading"] for row in table)
    for reading in readings:
        rows = [
            {"method": row["method"], "seeds": row["seeds"]}
            | {title: terminal.percent(row[name], row[f"{name}_std"]) for name, title in shown.items()}
            for row in table
            if row["reading"] == reading
        ]
        rows += [_paper_row(figure, shown) for figure in papers.get(reading, ())]
        terminal.show(rows, as_json=False, title=f"{reading.replace('_', '-')}, in %")
    costs = {row["method"]: _costs(row) for row in table}
    terminal.show(list(costs.values()), as_json=False, title="a run")
    for note in filter(None, (words.by_batch(readings, batch_size(groups)), *report.shrunk(groups))):
        terminal.tell(note)


def show_traffic(table: pl.DataFrame) -> None:
    """MB of what one client sends, receives or keeps at a time, a column a task; `times`: how often in a task.

    A part that shows as 0.000 throughout is left out.
    """
    tasks, names = table["task"].unique().sort().to_list(), _names(table["run"].unique())
    largest = pl.col("bytes_each").max().over("when", "direction", "kind")
    seen = table.filter(largest / MB >= 0.0005)
    for when, part in groupby(seen.to_dicts(), key=itemgetter("when")):
        rows = []
        for (direction, kind, run), of_run in groupby(part, key=itemgetter("direction", "kind", "run")):
            of_task = {row["task"]: row for row in of_run}
            times = fmean(row["times"] for row in of_task.values())
            sizes = {str(t): f"{of_task[t]['bytes_each'] / MB:.3f}" if t in of_task else None for t in tasks}
            rows.append({"": direction, "kind": kind, "run": names[run], "times": f"{times:.3g}", **sizes})
        terminal.show(rows, as_json=False, title=f"{TITLES[when]}: MB each time, by task")
    if len(seen) < len(table):
        terminal.tell("Parts that would show as 0.000 are left out; --json has them.")


def _costs(row: dict[str, Any]) -> dict[str, Any]:
    """A method's costs; rounds to best are known where monitors.accuracy was on."""
    return {
        "method": row["method"],
        "sent up": terminal.size(row["bytes_up"]),
        "seconds": f"{row['seconds']:.1f}",
        "a round": terminal.number(row["seconds_per_round"]),
        "rounds to best": terminal.number(row["rounds_to_best"]),
    }


def _names(runs: Iterable[str]) -> dict[str, str]:
    """Of each run's folder, what is below the folder that they all lie in."""
    folders = {run: os.path.abspath(run) for run in runs}
    shared = os.path.commonpath([os.path.dirname(folder) for folder in folders.values()])
    return {run: os.path.relpath(folder, shared) for run, folder in folders.items()}


def _paper_row(figure: Figure, shown: dict[str, str]) -> dict[str, Any]:
    """A row of the comparison; a paper that gives another forgetting than the column's has none in it."""
    figures = {column: figure.text(name) for name, column in shown.items()}
    return {"method": f"paper: {figure.title}", "seeds": None, **figures}
