"""Class-incremental: the classes are cut into tasks, each with classes that no earlier task had.

FedProTIP sec. 6, PIP sec. 5 (classes in the given order), FOT sec. 5 (a random order).
"""

from collections.abc import Sequence
from itertools import accumulate, pairwise
from typing import Literal

import numpy as np
from pydantic import Field, PositiveInt

from fclmodels.data.streams.base import (
    Layout,
    PlannedTask,
    SampleTable,
    Stream,
    find_positions,
    lay_out_for_all,
    name_task,
)
from fclmodels.errors import UserError
from fclmodels.settings.schema import StreamSettings

Order = Literal["given", "sorted", "shuffled"]
ORDERS = "order of the classes: given by the source, sorted by name, or shuffled by the seed"


class ClassIncremental(Stream):
    """tasks are disjoint groups of classes, one head grows over them"""

    name = "class-incremental"

    class Settings(StreamSettings):
        tasks: PositiveInt = Field(5, description="number of tasks")
        classes_per_task: PositiveInt | tuple[PositiveInt, ...] | None = Field(
            None, description="classes a task, or a list with one number a task; null: all classes, evenly"
        )
        class_order: Order = Field("given", description=ORDERS)
        classes: tuple[tuple[int | str, ...], ...] | None = Field(
            None, description="the classes of each task by name, in place of tasks, classes_per_task and class_order"
        )

    settings: Settings

    def lay_out(self, samples: SampleTable, clients: int) -> Layout:
        groups = self._group_classes(samples.classes)
        tasks = [PlannedTask(name_task([samples.classes[c] for c in group]), group) for group in groups]
        return lay_out_for_all(tasks, [samples.find_rows(group) for group in groups], clients)

    def _group_classes(self, names: tuple[str, ...]) -> list[tuple[int, ...]]:
        s = self.settings
        if s.classes is not None:
            return find_named_groups(s.classes, names)
        order = order_classes(names, s.class_order, self.make_generator("class order"))
        ends = accumulate(find_group_sizes(len(names), s.tasks, s.classes_per_task), initial=0)
        return [tuple(order[start:end]) for start, end in pairwise(ends)]


def order_classes(names: Sequence[str], order: Order, generator: np.random.Generator) -> list[int]:
    """Return all classes in the order in which they come into tasks."""
    if order == "shuffled":
        return [int(c) for c in generator.permutation(len(names))]
    return sorted(range(len(names)), key=names.__getitem__) if order == "sorted" else list(range(len(names)))


def find_group_sizes(classes: int, tasks: int, per_task: int | tuple[int, ...] | None) -> list[int]:
    """Return the number of classes of each task; without per_task all, the first tasks one more than the last."""
    if tasks > classes:
        raise UserError(f"stream.tasks: {classes} classes cannot make {tasks} tasks. Use {classes} or fewer.")
    if per_task is None:
        return [classes // tasks + (t < classes % tasks) for t in range(tasks)]
    sizes = [per_task] * tasks if isinstance(per_task, int) else list(per_task)
    if len(sizes) != tasks:
        raise UserError(
            f"stream.classes_per_task: {len(sizes)} numbers for {tasks} tasks. "
            f"Give one a task, or set stream.tasks: {len(sizes)}."
        )
    if sum(sizes) > classes:
        raise UserError(
            f"stream.classes_per_task: {tasks} tasks need {sum(sizes)} classes, the source has {classes}. "
            "Use fewer a task, or fewer tasks."
        )
    return sizes


def find_named_groups(groups: Sequence[Sequence[int | str]], names: tuple[str, ...]) -> list[tuple[int, ...]]:
    if not groups:
        raise UserError("stream.classes: no task is named. Give each task its classes, or leave the setting out.")
    for t, group in enumerate(groups):
        if not group:
            raise UserError(f"stream.classes: task {t} has no class. Name at least one.")
    classes = find_positions([name for group in groups for name in group], names, "stream.classes")
    ends = accumulate(map(len, groups), initial=0)
    return [classes[start:end] for start, end in pairwise(ends)]
