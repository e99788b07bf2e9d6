"""Accuracy on every task, learned or not."""

from collections.abc import Sequence

import polars as pl

from fclmodels.experiment import Step
from fclmodels.metrics import summary
from fclmodels.run_folder import gathered
from fclmodels.store import Store
from tasks.caching import Outcome, stored_task


@stored_task("{label}: evaluate after {learned} tasks")
def evaluate(step: Step, label: str, learned: int) -> Outcome:
    """Counts of correct answers on the test rows of each task, in each reading."""
    return step.done() or step.run()


@stored_task("{label}: judge after {learned} tasks")
def judge(step: Step, label: str, learned: int) -> Outcome:
    """The same on val rows, for the gate."""
    return step.done() or step.run()


def so_far(store: Store, outcomes: Sequence[Outcome], learned: int) -> dict[str, dict[str, float | None]]:
    """The metrics as if the stream ended after `learned` tasks."""
    tables = gathered(store, outcomes, ("accuracy", "confusion"))
    known = (pl.col("after") <= learned) & (pl.col("task") < learned)
    return summary(*(table.filter(known) for table in tables.values()))
