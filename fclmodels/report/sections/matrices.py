"""Matrices of the page: accuracy on each task after each, and predicted tasks against true ones. Means over seeds."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from fclmodels.metrics import confusion_matrix, normalise_rows, sort_readings, tip_acc
from fclmodels.report import labels
from fclmodels.report.comparison import compute_mean_and_std
from fclmodels.report.paired_differences import pair_groups_by_task
from fclmodels.report.read_runs import Group, describe_batch_size

NONE = {"mean": None, "std": None}


def build_accuracy_matrix(group: Group, reading: str) -> dict[str, Any]:
    """Return mean accuracy and spread over seeds in each cell; rows (tasks learned) not measured are left out."""
    runs = [run for run in group.runs if reading in run.matrices]
    stack = np.stack([run.matrices[reading] for run in runs])
    rows = [(t, cells) for t, cells in enumerate(build_cells(stack)) if not np.isnan(stack[:, t]).all()]
    title = labels.title_reading(reading, describe_batch_size([group]))
    folders = [run.folder for run in runs]
    return {"title": title, "seeds": len(stack), "tasks": stack.shape[2], "rows": rows, "runs": folders}


def build_task_table(groups: Sequence[Group], reading: str) -> dict[str, Any]:
    """Return final accuracy on each task, method by method, and its differences from the first, seed by seed."""
    matrices = [
        (index, build_accuracy_matrix(group, reading))
        for index, group in enumerate(groups)
        if any(reading in run.matrices for run in group.runs)
    ]
    tasks = max(matrix["tasks"] for _, matrix in matrices)
    pairs = pair_groups_by_task(groups, reading)
    paired = sorted({pair.group for of_task in pairs for pair in of_task})
    return {
        "title": labels.title_reading(reading, describe_batch_size(groups)),
        "tasks": tasks,
        "rows": [(index, matrix["rows"][-1][1] + [NONE] * (tasks - matrix["tasks"])) for index, matrix in matrices],
        "pairs": [(g, [next((p for p in of_task if p.group == g), None) for of_task in pairs]) for g in paired],
        "runs": [folder for _, matrix in matrices for folder in matrix["runs"]],
    }


def build_confusion_matrices(groups: Sequence[Group]) -> list[tuple[int, list[dict[str, Any]]]]:
    """Return the index of each group whose method predicts tasks, and its matrix in each reading."""
    of_groups = [
        (index, [_build_confusion_matrix(group, reading) for reading in _list_predicted_readings(group)])
        for index, group in enumerate(groups)
    ]
    return [(index, matrices) for index, matrices in of_groups if matrices]


def _build_confusion_matrix(group: Group, reading: str) -> dict[str, Any]:
    """Return shares of each task's samples by predicted task after the last task, and the mean share that is right."""
    runs = [run for run in group.runs if reading in run.confusion["reading"]]
    counts = [confusion_matrix(run.confusion, reading, run.tasks) for run in runs]
    right, std = compute_mean_and_std([tip_acc(of_run) for of_run in counts])
    rows = list(enumerate(build_cells(np.stack([normalise_rows(of_run) for of_run in counts])), start=1))
    title = labels.title_reading(reading, describe_batch_size([group]))
    folders = [run.folder for run in runs]
    return {"title": title, "seeds": len(runs), "right": right, "std": std, "rows": rows, "runs": folders}


def _list_predicted_readings(group: Group) -> list[str]:
    return sort_readings(reading for run in group.runs for reading in run.confusion["reading"])


def build_cells(stack: np.ndarray) -> list[list[dict[str, float | None]]]:
    """Return mean and spread over seeds of each entry of matrices [seeds, rows, columns]."""
    return [[_build_cell(stack[:, row, column]) for column in range(stack.shape[2])] for row in range(stack.shape[1])]


def _build_cell(shares: np.ndarray) -> dict[str, float | None]:
    mean, std = compute_mean_and_std([None if np.isnan(value) else float(value) for value in shares])
    return {"mean": mean, "std": std}
