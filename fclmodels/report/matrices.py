"""The page's matrices: accuracy on each task after each, and which task was taken for which. Means over seeds."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from fclmodels.metrics import confusion_matrix, in_order, shares_of_rows, tip_acc
from fclmodels.report import words
from fclmodels.report.paired import pairs_by_task
from fclmodels.report.runs import Group, batch_size
from fclmodels.report.tables import spread

NONE = {"mean": None, "std": None}


def accuracy_matrix(group: Group, reading: str) -> dict[str, Any]:
    """Mean accuracy and spread over seeds in each cell; rows (tasks learned) that were not measured are left out."""
    stack = np.stack([run.matrices[reading] for run in group.runs if reading in run.matrices])
    rows = [(t, cells) for t, cells in enumerate(cells(stack)) if not np.isnan(stack[:, t]).all()]
    title = words.title(reading, batch_size([group]))
    folders = [run.folder for run in group.runs if reading in run.matrices]
    return {"title": title, "seeds": len(stack), "tasks": stack.shape[2], "rows": rows, "runs": folders}


def by_task(groups: Sequence[Group], reading: str) -> dict[str, Any]:
    """Method against method: final accuracy on each task, and its differences from the first, seed by seed."""
    known = [(index, accuracy_matrix(group, reading)) for index, group in enumerate(groups) if _has(group, reading)]
    tasks = max(matrix["tasks"] for _, matrix in known)
    pairs = pairs_by_task(groups, reading)
    paired = sorted({pair.group for of_task in pairs for pair in of_task})
    return {
        "title": words.title(reading, batch_size(groups)),
        "tasks": tasks,
        "rows": [(index, matrix["rows"][-1][1] + [NONE] * (tasks - matrix["tasks"])) for index, matrix in known],
        "pairs": [(g, [next((p for p in of_task if p.group == g), None) for of_task in pairs]) for g in paired],
        "runs": [folder for _, matrix in known for folder in matrix["runs"]],
    }


def _has(group: Group, reading: str) -> bool:
    return any(reading in run.matrices for run in group.runs)


def confusions(groups: Sequence[Group]) -> list[tuple[int, list[dict[str, Any]]]]:
    """Of each group whose method predicts tasks: its place among the groups, and a matrix for each reading."""
    found = [
        (index, [_confusion(group, reading) for reading in _readings(group)]) for index, group in enumerate(groups)
    ]
    return [(index, matrices) for index, matrices in found if matrices]


def _confusion(group: Group, reading: str) -> dict[str, Any]:
    """After the last task: shares of each task's samples by predicted task, and the mean share predicted right."""
    runs = [run for run in group.runs if reading in run.confusion["reading"]]
    counts = [confusion_matrix(run.confusion, reading, run.tasks) for run in runs]
    right, std = spread([tip_acc(of_run) for of_run in counts])
    rows = list(enumerate(cells(np.stack([shares_of_rows(of_run) for of_run in counts])), start=1))
    title = words.title(reading, batch_size([group]))
    folders = [run.folder for run in runs]
    return {"title": title, "seeds": len(runs), "right": right, "std": std, "rows": rows, "runs": folders}


def _readings(group: Group) -> list[str]:
    return in_order(reading for run in group.runs for reading in run.confusion["reading"])


def cells(stack: np.ndarray) -> list[list[dict[str, float | None]]]:
    """Mean and spread over seeds of each entry of matrices [seeds, rows, columns]."""
    return [[_cell(stack[:, row, column]) for column in range(stack.shape[2])] for row in range(stack.shape[1])]


def _cell(shares: np.ndarray) -> dict[str, float | None]:
    mean, std = spread([None if np.isnan(value) else float(value) for value in shares])
    return {"mean": mean, "std": std}
