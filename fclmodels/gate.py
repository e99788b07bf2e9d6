"""The gate between a model and those who use it: accuracy and forgetting on val rows, within set limits or not.

Accuracy is ACC after the last task, forgetting FGT (metrics.py). Both are of the reading that a served model gives:
the task is not told, and where the method predicts it, only that task's classes answer.
"""

from dataclasses import dataclass

import polars as pl

from fclmodels import metrics
from fclmodels.settings import GateSettings

READING = "task_predicted"


@dataclass(frozen=True)
class Verdict:
    """What was measured on val rows, and the reasons that hold a model back, if there are any."""

    acc: float | None
    forgetting: float | None
    reasons: tuple[str, ...]

    @property
    def champion(self) -> bool:
        return not self.reasons


def judge(accuracy: pl.DataFrame, limits: GateSettings) -> Verdict:
    """By the accuracy table of val rows after each task; after the first one nothing can be forgotten yet."""
    table = metrics.matrix(accuracy, READING)
    acc, forgetting = metrics.acc(table), metrics.fgt(table)
    reasons = []
    if acc is None or acc < limits.acc:
        reasons.append(f"accuracy {_percent(acc)} is below arrivals.gate.acc, {_percent(limits.acc)}")
    if table.shape[1] > 1 and (forgetting is None or forgetting > limits.forgetting):
        reasons.append(
            f"forgetting {_percent(forgetting)} is above arrivals.gate.forgetting, {_percent(limits.forgetting)}"
        )
    return Verdict(acc, forgetting, tuple(reasons))


def _percent(share: float | None) -> str:
    return "(unknown)" if share is None else f"{100 * share:.1f} %"
