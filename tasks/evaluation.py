"""Accuracy on every task, learned or not."""

from collections.abc import Sequence

import polars as pl

from fclmodels.experiment.run_folder import gather_tables
from fclmodels.metrics import compute_metrics, select_shown
from fclmodels.storage.object_store import Store
from tasks.caching import Outcome, step_task

evaluate = step_task("evaluate", "Count correct answers on the test rows of each task, in each reading.")
judge = step_task("judge", "Count correct answers on the val rows of each task, for the gate.")


def summarise_tasks(store: Store, outcomes: Sequence[Outcome], learned: int) -> dict[str, dict[str, float | None]]:
    """Return the metrics by reading as if the stream ended after `learned` tasks."""
    tables = gather_tables(store, outcomes, ("accuracy", "confusion"))
    is_learned = (pl.col("after") <= learned) & (pl.col("task") < learned)
    return select_shown(compute_metrics(*(table.filter(is_learned) for table in tables.values())))
