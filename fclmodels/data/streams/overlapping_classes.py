"""Overlapping classes: neighbouring tasks share some classes (FedProTIP D.6).

Task t takes `classes_per_task` classes from position t * (classes_per_task - overlap) on, so T tasks use
classes_per_task + (T - 1) * (classes_per_task - overlap): CIFAR-100 makes 11 tasks of 10 that overlap by one,
14 tasks of 9 that overlap by two.
"""

from typing import Literal

import numpy as np
from pydantic import Field, NonNegativeInt, PositiveInt

from fclmodels.data.streams.base import Layout, PlannedTask, SampleTable, Stream, lay_out_for_all, name_task
from fclmodels.data.streams.class_incremental import ORDERS, Order, order_classes
from fclmodels.errors import UserError
from fclmodels.settings.schema import StreamSettings


class OverlappingClasses(Stream):
    """tasks are groups of classes, neighbours share some"""

    name = "overlapping-classes"

    class Settings(StreamSettings):
        tasks: PositiveInt | None = Field(None, description="number of tasks; null: as many as use every class")
        classes_per_task: PositiveInt = Field(4, description="classes a task")
        overlap: NonNegativeInt = Field(1, description="classes that a task shares with the one before")
        class_order: Order = Field("given", description=ORDERS)
        samples: Literal["split", "repeated"] = Field(
            "split", description="samples of a class in several tasks: split evenly among them, or all in each"
        )

    settings: Settings

    def lay_out(self, samples: SampleTable, clients: int) -> Layout:
        s = self.settings
        groups = self._group_classes(samples.classes)
        rows = [samples.find_rows(group) for group in groups]
        if s.samples == "split":
            task_of = self._draw_task_of_each(samples, groups)
            rows = [part[task_of[part] == t] for t, part in enumerate(rows)]
        tasks = [PlannedTask(name_task([samples.classes[c] for c in group]), group) for group in groups]
        return lay_out_for_all(tasks, rows, clients)

    def _group_classes(self, names: tuple[str, ...]) -> list[tuple[int, ...]]:
        s = self.settings
        order = order_classes(names, s.class_order, self.make_generator("class order"))
        count = count_tasks(len(names), s.classes_per_task, s.overlap, s.tasks)
        starts = range(0, count * (s.classes_per_task - s.overlap), s.classes_per_task - s.overlap)
        return [tuple(order[start : start + s.classes_per_task]) for start in starts]

    def _draw_task_of_each(self, samples: SampleTable, groups: list[tuple[int, ...]]) -> np.ndarray:
        """Draw the task of each sample [N]: a class's train samples, and its test samples, go evenly to its tasks."""
        task_of = np.full(len(samples.labels), -1)
        for c in {c for group in groups for c in group}:
            tasks = [t for t, group in enumerate(groups) if c in group]
            for test in (False, True):
                rows = np.flatnonzero((samples.labels == c) & (samples.test == test))
                task_of[self.make_generator("tasks of", c, int(test)).permutation(rows)] = np.resize(tasks, len(rows))
        return task_of


def count_tasks(classes: int, per_task: int, overlap: int, tasks: int | None) -> int:
    """Return T with per_task + (T - 1) * (per_task - overlap) = classes, or `tasks` where so many fit."""
    if overlap >= per_task:
        raise UserError(
            f"stream.overlap: {per_task} classes a task cannot overlap by {overlap}. Use {per_task - 1} or less."
        )
    fitting, remainder = divmod(classes - overlap, per_task - overlap)
    if fitting < 1 or (tasks or 1) > fitting:
        need = per_task + ((tasks or 1) - 1) * (per_task - overlap)
        right = f"stream.tasks: {fitting}" if fitting else f"stream.classes_per_task: {classes}"
        raise UserError(
            f"stream: {tasks or 1} tasks of {per_task} classes that overlap by {overlap} need {need} classes, "
            f"the source has {classes}. Use {right} or less."
        )
    if tasks is None and remainder:
        raise UserError(
            f"stream: tasks of {per_task} classes that overlap by {overlap} leave {remainder} of {classes} classes "
            f"over. Set stream.tasks: {fitting} to do without them, or change classes_per_task or overlap."
        )
    return tasks or fitting
