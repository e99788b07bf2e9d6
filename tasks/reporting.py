"""What is left for people: run folders, the comparison, the report page, and the tables behind DVC's plots."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import polars as pl
from prefect import task
from prefect.artifacts import create_table_artifact
from prefect.cache_policies import NO_CACHE

from fclmodels import report
from fclmodels.errors import UserError
from fclmodels.experiment import Experiment
from fclmodels.state import replacing, write_json
from tasks.caching import Outcome
from tasks.pages import PAGES

READING = "task_agnostic"
METRICS = ("acc", "learning_acc", "ft", "avg", "worst_acc")  # few enough for the table of `dvc metrics show`
PARTS = {"index.html", "metrics", "plots", ".gitignore"}
COSTS = ("bytes_up", "bytes_down", "bytes_kept", "seconds")


@task(name="publish", task_run_name="{label}: publish", cache_policy=NO_CACHE)
def publish(experiment: Experiment, label: str, outcomes: list[Outcome], folder: Path) -> dict[str, Any]:
    """The run folder from what the steps left in the store; never cached, for DVC deletes it before each run."""
    return experiment.publish(folder, outcomes)


@task(name="show matrix", task_run_name="{label}: show matrix", cache_policy=NO_CACHE)
def show_matrix(label: str, folder: Path) -> None:
    """The accuracy matrix as a table in Prefect's pages."""
    (run,) = report.read_runs([folder])
    rows = [
        {"tasks learned": learned, **{f"task {task}": f"{100 * a:.1f} %" for task, a in enumerate(row, start=1)}}
        for learned, row in enumerate(run.matrices[READING].tolist())
    ]
    description = f"{label}: accuracy, {READING.replace('_', '-')}"
    PAGES.show(create_table_artifact, rows, key=f"accuracy-{label}", description=description)


@task(name="write report", cache_policy=NO_CACHE)
def write_report(runs: Sequence[Path], folder: Path) -> Path:
    """index.html, and beside it metrics and plots as files that DVC reads; those of an older report go."""
    foreign = {path.name for path in folder.iterdir()} - PARTS if folder.is_dir() else set()
    if foreign:
        raise UserError(f"{folder} holds something else than a report ({min(foreign)}). Name another folder.")
    for old in (folder / "metrics").glob("*.json"):
        old.unlink()
    for run in report.read_runs(runs):
        numbers = {
            reading: {name: values[name] for name in METRICS if values[name] is not None}
            for reading, values in run.result.metrics.items()
        }
        costs = {name: getattr(run.result, name) for name in COSTS}
        write_json(folder / "metrics" / f"{run.folder.name}.json", {**numbers, **costs})
    curves = report.accuracy_curves(runs).filter(pl.col("reading") == READING)
    plots = {
        "accuracy": _by_method(curves, "learned", "accuracy"),
        "matrix": report.accuracy_cells(runs).filter(pl.col("reading") == READING),
        "bytes": _by_method(report.bytes_by_task(runs), "task", "bytes_up"),
    }
    for name, table in plots.items():
        with replacing(folder / "plots" / f"{name}.csv") as temporary:
            table.write_csv(temporary)
    report.write_page(runs, folder / "index.html")
    return folder / "index.html"


def _by_method(table: pl.DataFrame, x: str, y: str) -> pl.DataFrame:
    """Mean over seeds: a row for each x, a column for each method."""
    return table.group_by(x, "method", maintain_order=True).agg(pl.col(y).mean()).pivot("method", index=x, values=y)
