"""Tables of several runs as the commands print them."""

from collections.abc import Sequence
from itertools import groupby
from operator import itemgetter
from pathlib import Path
from statistics import fmean
from typing import Any

import polars as pl

from fclmodels import report
from fclmodels.report.presets import Figure
from flows import terminal

MB = 1e6
TITLES = {
    "end of task": "in the exchanges at the end of a task",
    "rounds": "in the rounds of a task",
    "kept": "kept by a client after a task",
}


def show_comparison(runs: Sequence[Path]) -> None:
    """Methods by reading, with the paper's rows below where the runs are of a preset, and what a reader must know."""
    groups = report.grouped(report.read_runs(runs))
    table, papers = report.compare(groups).to_dicts(), report.published(groups).values()
    by_fgt = any("fgt" in figure.values for readings in papers for of in readings.values() for figure in of)
    shown = {"acc": "accuracy", "learning_acc": "right after"}
    shown |= {"fgt": "forgetting (FGT)"} if by_fgt else {"ft": "forgetting"}
    for reading in dict.fromkeys(row["reading"] for row in table):
        rows = [
            {"method": row["method"], "seeds": row["seeds"]}
            | {title: terminal.percent(row[name], row[f"{name}_std"]) for name, title in shown.items()}
            | {"sent up": terminal.size(row["bytes_up"]), "seconds": f"{row['seconds']:.1f}"}
            for row in table
            if row["reading"] == reading
        ]
        rows += [_paper_row(figure, shown) for readings in papers for figure in readings.get(reading, ())]
        terminal.show(rows, as_json=False, title=f"{reading.replace('_', '-')}, in %")
    for note in report.shrunk(groups):
        terminal.tell(note)


def show_traffic(table: pl.DataFrame) -> None:
    """MB of what one client sends, receives or keeps at a time, a column a task; `times`: how often in a task."""
    tasks = table["task"].unique().sort().to_list()
    for when, part in groupby(table.to_dicts(), key=itemgetter("when")):
        rows = []
        for (direction, kind, run), of_run in groupby(part, key=itemgetter("direction", "kind", "run")):
            of_task = {row["task"]: row for row in of_run}
            times = fmean(row["times"] for row in of_task.values())
            sizes = {str(t): f"{of_task[t]['bytes_each'] / MB:.3f}" if t in of_task else None for t in tasks}
            rows.append({"": direction, "kind": kind, "run": run, "times": f"{times:.3g}", **sizes})
        terminal.show(rows, as_json=False, title=f"{TITLES[when]}: MB each time, by task")


def _paper_row(figure: Figure, shown: dict[str, str]) -> dict[str, Any]:
    """A row of the comparison; a paper that gives another forgetting than the column's has none in it."""
    shares = {name: value / 100 for name, value in figure.values.items()}
    return {
        "method": f"paper: {figure.title}",
        "seeds": None,
        **{column: terminal.percent(shares.get(name), shares.get(f"{name}_std")) for name, column in shown.items()},
    }
