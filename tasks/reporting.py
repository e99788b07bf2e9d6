"""Prefect tasks that publish results: run folders, the accuracy matrix, the report and the tables of DVC's plots."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import polars as pl
from prefect import task
from prefect.artifacts import create_table_artifact
from prefect.cache_policies import NO_CACHE

from fclmodels.errors import UserError
from fclmodels.experiment.experiment import Experiment
from fclmodels.report.comparison import list_accuracy_cells, list_accuracy_curves, sum_bytes_by_task
from fclmodels.report.page import write_page
from fclmodels.report.read_runs import read_runs
from fclmodels.storage.files import replace_file
from fclmodels.storage.sealed_json import write_json
from tasks.caching import Outcome
from tasks.prefect_artifacts import ARTIFACTS

READING = "task_agnostic"
METRICS = ("acc", "learning_acc", "ft", "avg", "worst_acc")  # few enough for the table of `dvc metrics show`
PARTS = {"index.html", "metrics", "plots", ".gitignore"}
COSTS = ("bytes_up", "bytes_down", "bytes_kept", "seconds")


@task(name="publish", task_run_name="{label}: publish", cache_policy=NO_CACHE)
def publish(experiment: Experiment, label: str, outcomes: list[Outcome], folder: Path) -> dict[str, Any]:
    """Write the run folder from the store; never cached, for DVC deletes the folder before each run."""
    return experiment.publish(folder, outcomes)


@task(name="show matrix", task_run_name="{label}: show matrix", cache_policy=NO_CACHE)
def show_matrix(label: str, folder: Path) -> None:
    """Publish the accuracy matrix as a table on Prefect's pages."""
    (run,) = read_runs([folder])
    rows = [
        {"tasks learned": learned, **{f"task {task}": f"{100 * a:.1f} %" for task, a in enumerate(row, start=1)}}
        for learned, row in enumerate(run.matrices[READING].tolist())
    ]
    description = f"{label}: accuracy, {READING.replace('_', '-')}"
    ARTIFACTS.publish(create_table_artifact, rows, key=f"accuracy-{label}", description=description)


@task(name="write report", cache_policy=NO_CACHE)
def write_report(runs: Sequence[Path], folder: Path) -> Path:
    """Write index.html, and beside it metrics and plots for DVC, in place of an older report; return the page."""
    foreign = {path.name for path in folder.iterdir()} - PARTS if folder.is_dir() else set()
    if foreign:
        raise UserError(f"{folder} holds {min(foreign)}, which is not part of a report. Name another folder.")
    for old in (folder / "metrics").glob("*.json"):
        old.unlink()
    for run in read_runs(runs):
        numbers = {
            reading: {name: values[name] for name in METRICS if values[name] is not None}
            for reading, values in run.metrics.items()
        }
        costs = {name: getattr(run.result, name) for name in COSTS}
        write_json(folder / "metrics" / f"{run.folder.name}.json", {**numbers, **costs})
    curves = list_accuracy_curves(runs).filter(pl.col("reading") == READING)
    plots = {
        "accuracy": _average_by_method(curves, "learned", "accuracy"),
        "matrix": list_accuracy_cells(runs).filter(pl.col("reading") == READING),
        "bytes": _average_by_method(sum_bytes_by_task(runs), "task", "bytes_up"),
    }
    for name, table in plots.items():
        with replace_file(folder / "plots" / f"{name}.csv") as temporary:
            table.write_csv(temporary)
    write_page(runs, folder / "index.html")
    return folder / "index.html"


def _average_by_method(table: pl.DataFrame, x: str, y: str) -> pl.DataFrame:
    """Return the mean of y over seeds: a row for each x, a column for each method."""
    return table.group_by(x, "method", maintain_order=True).agg(pl.col(y).mean()).pivot("method", index=x, values=y)
