"""The specification of a network's architecture, and the columns of labels among its logits.

Labels are numbered by first appearance: after some tasks there are 0..label_count-1, which are the columns of the
logits over all classes so far. A task's logits have the task's classes in the task's order.
"""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, Literal

import torch
from torch import Tensor

FORMAT = 1


@dataclass(frozen=True)
class ModelSpec:
    """The architecture of a network over the tasks so far."""

    settings: Mapping[str, Any]  # of the backbone, JSON values
    shape: tuple[int, ...]  # of a sample
    head: Literal["growing", "per-task"]
    tasks: tuple[tuple[int, ...], ...]  # labels of each task
    adapter: Mapping[str, Any] | None = None  # attached to a frozen backbone (prompt_adapters.py), JSON values

    def __post_init__(self) -> None:
        if self.head not in ("growing", "per-task"):
            raise ValueError(f"{self.head} is not a kind of head: growing or per-task")
        if not all(self.tasks) or any(len(set(task)) < len(task) for task in self.tasks):
            raise ValueError("each task has classes, each of them once")
        labels = {label for task in self.tasks for label in task}
        if not self.tasks or labels != set(range(len(labels))):  # all labels may be too many to list
            raise ValueError("the tasks' labels are not numbered by first appearance, 0, 1, 2, ...")

    @property
    def label_count(self) -> int:
        """Number of labels in the tasks so far."""
        return 1 + max(label for task in self.tasks for label in task)

    @property
    def head_labels(self) -> tuple[tuple[int, ...], ...]:
        """Labels of each head's rows: one growing head over all labels, or one head a task."""
        return (tuple(range(self.label_count)),) if self.head == "growing" else self.tasks

    def to_json(self) -> dict[str, Any]:
        return {"format": FORMAT, **asdict(self)}

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> "ModelSpec":
        if value["format"] != FORMAT:
            raise ValueError(f"a model spec of format {value['format']!a}; this version reads {FORMAT}")
        tasks = tuple(tuple(task) for task in value["tasks"])
        return cls(dict(value["settings"]), tuple(value["shape"]), value["head"], tasks, value.get("adapter"))


def get_task_columns(spec: ModelSpec, task: int, device: torch.device | None = None) -> Tensor:
    """Return the columns of a task's classes among all classes' logits, in the task's order: int64 [classes]."""
    return torch.tensor(spec.tasks[task], device=device)


def to_local_labels(spec: ModelSpec, task: int, labels: Tensor) -> Tensor:
    """Return the columns of labels among the task's own logits, -1 for labels of other tasks; of labels' shape."""
    columns = get_task_columns(spec, task, labels.device)
    # The last place stands for every label of later tasks.
    lookup = torch.full((spec.label_count + 1,), -1, device=labels.device)
    lookup[columns] = torch.arange(len(columns), device=labels.device)
    return lookup[labels.clamp(max=spec.label_count)]
