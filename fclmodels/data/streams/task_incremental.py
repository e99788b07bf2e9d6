"""Task-incremental: the tasks of class-incremental, a head for each (FOT sec. 5)."""

from typing import ClassVar, Literal

from fclmodels.data.streams.class_incremental import ClassIncremental


class TaskIncremental(ClassIncremental):
    """tasks are disjoint groups of classes, each with a head of its own"""

    name = "task-incremental"
    head: ClassVar[Literal["growing", "per-task"]] = "per-task"
