"""What determines a network's architecture, and where a label stands among its logits.

Labels are numbered by first appearance: after some tasks the labels seen are 0..seen-1, and the logits
over all seen classes have them as columns. A task's logits have the task's classes in the task's order.
"""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, Literal

import torch
from torch import Tensor

FORMAT = 1


@dataclass(frozen=True)
class ModelSpec:
    """A network over the tasks so far: the backbone's settings (values of JSON), and what its heads cover.

    adapter: what a method attaches to the backbone, which then stays frozen (adapters.py; values of JSON).
    """

    settings: Mapping[str, Any]
    shape: tuple[int, ...]
    head: Literal["growing", "per-task"]
    tasks: tuple[tuple[int, ...], ...]
    adapter: Mapping[str, Any] | None = None

    def __post_init__(self) -> None:
        if self.head not in ("growing", "per-task"):
            raise ValueError(f"{self.head} is not a kind of head: growing or per-task")
        if not all(self.tasks) or any(len(set(task)) < len(task) for task in self.tasks):
            raise ValueError("each task has classes, each of them once")
        labels = {label for task in self.tasks for label in task}
        if not self.tasks or labels != set(range(len(labels))):  # range(seen) may be more than there is memory for
            raise ValueError("the tasks' labels are not numbered by first appearance, 0, 1, 2, ...")

    @property
    def seen(self) -> int:
        """Number of labels in the tasks so far."""
        return 1 + max(label for task in self.tasks for label in task)

    @property
    def head_labels(self) -> tuple[tuple[int, ...], ...]:
        """The label of each row of each head: one growing head over all labels, or one head a task."""
        return (tuple(range(self.seen)),) if self.head == "growing" else self.tasks

    def to_json(self) -> dict[str, Any]:
        return {"format": FORMAT, **asdict(self)}

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> "ModelSpec":
        if value["format"] != FORMAT:
            raise ValueError(f"a model spec of format {value['format']!a}; this version reads {FORMAT}")
        tasks = tuple(tuple(task) for task in value["tasks"])
        return cls(dict(value["settings"]), tuple(value["shape"]), value["head"], tasks, value.get("adapter"))


def task_columns(spec: ModelSpec, task: int, device: torch.device | None = None) -> Tensor:
    """Columns of a task's classes among the logits over all seen classes, in the task's order: int64 [classes]."""
    return torch.tensor(spec.tasks[task], device=device)


def local_labels(spec: ModelSpec, task: int, labels: Tensor) -> Tensor:
    """Columns of labels among the task's own logits; -1 where a label is not of the task. Same shape as labels."""
    columns = task_columns(spec, task, labels.device)
    # One place more than there are labels seen stands for every label that is not seen yet.
    lookup = torch.full((spec.seen + 1,), -1, device=labels.device)
    lookup[columns] = torch.arange(len(columns), device=labels.device)
    return lookup[labels.clamp(max=spec.seen)]
