"""Gate between a model and its users: limits on accuracy and forgetting, measured on val rows.

Accuracy is ACC after the last task, forgetting FGT (metrics.py). Both are in the reading of a served model: the task is
not given, and where the method predicts it, only that task's classes compete.
"""

from dataclasses import dataclass

import polars as pl

from fclmodels import metrics
from fclmodels.settings.schema import GateSettings

READING = "task_predicted"


@dataclass(frozen=True)
class Verdict:
    """Accuracy and forgetting on val rows, and the reasons, if any, not to make the model champion."""

    acc: float | None
    forgetting: float | None
    reasons: tuple[str, ...]


def judge(accuracy: pl.DataFrame, limits: GateSettings) -> Verdict:
    """Judge a model by the accuracy table of val rows; after the first task nothing can be forgotten yet."""
    matrix = metrics.accuracy_matrix(accuracy, READING)
    acc, forgetting = metrics.acc(matrix), metrics.fgt(matrix)
    reasons = []
    if acc is None or acc < limits.acc:
        reasons.append(f"accuracy {_format_percent(acc)} is below arrivals.gate.acc, {_format_percent(limits.acc)}")
    if matrix.shape[1] > 1 and (forgetting is None or forgetting > limits.forgetting):
        limit = _format_percent(limits.forgetting)
        reasons.append(f"forgetting {_format_percent(forgetting)} is above arrivals.gate.forgetting, {limit}")
    return Verdict(acc, forgetting, tuple(reasons))


def _format_percent(share: float | None) -> str:
    return "(unknown)" if share is None else f"{100 * share:.1f} %"
