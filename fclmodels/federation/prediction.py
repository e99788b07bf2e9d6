"""What a model says of a batch: logits by column, and which class and task each column stands for."""

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from fclmodels.backbones.spec import ModelSpec


@dataclass(frozen=True)
class Columns:
    """labels [C]: the class of each logit. owners [C]: the task whose own head it belongs to, -1 in a shared head."""

    labels: Tensor
    owners: Tensor

    def of_task(self, task: int, classes: tuple[int, ...]) -> Tensor:
        """Mask [C] of the columns that may answer when the task is known."""
        in_task = torch.isin(self.labels, torch.tensor(classes, dtype=torch.long, device=self.labels.device))
        return in_task & ((self.owners == task) | (self.owners == -1))

    def of_tasks(self, tasks: Iterable[tuple[int, ...]]) -> Tensor:
        """Masks [tasks, C] of the columns that answer when a task is predicted, from the classes of the first tasks."""
        return torch.stack([self.of_task(task, classes) for task, classes in enumerate(tasks)])

    @classmethod
    def of(cls, spec: ModelSpec, device: torch.device) -> "Columns":
        rows = [(label, head) for head, labels in enumerate(spec.head_labels) for label in labels]
        labels, heads = torch.tensor(rows, device=device).unbind(1)
        return cls(labels, torch.full_like(heads, -1) if spec.head == "growing" else heads)

    @classmethod
    def by_task(cls, spec: ModelSpec, device: torch.device) -> "Columns":
        """Of logits that stand task by task, whether or not tasks share a head."""
        rows = [(label, task) for task, classes in enumerate(spec.tasks) for label in classes]
        labels, owners = torch.tensor(rows, device=device).unbind(1)
        return cls(labels, owners)


@dataclass(frozen=True)
class Prediction:
    """logits [B, C]; where the method predicts tasks itself, task_scores [B, tasks learned] of each sample.

    batch_scores [tasks learned]: of the batch as a whole, where the method can predict one task for all its samples.
    """

    logits: Tensor
    task_scores: Tensor | None = None
    batch_scores: Tensor | None = None
