"""A stream turns samples into tasks that arrive one after another.

It says which classes and samples each task has and in which task a client meets a class; the partition divides a
class's samples among its clients.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal

import numpy as np

from fclmodels.errors import UserError, suggest_name
from fclmodels.randomness import derive_seed
from fclmodels.settings.schema import StreamSettings


@dataclass(frozen=True)
class SampleTable:
    """The prepared table of N samples, with the test rows marked."""

    labels: np.ndarray  # [N], index into classes
    domains: np.ndarray  # [N], index into domain_names
    test: np.ndarray  # bool [N], rows that only the evaluation reads
    classes: tuple[str, ...]
    domain_names: tuple[str, ...]
    own_label_spaces: bool = False

    def find_rows(self, classes: Sequence[int]) -> np.ndarray:
        """Return the positions of the samples of these classes."""
        is_member = np.zeros(len(self.classes), bool)
        is_member[list(classes)] = True
        return np.flatnonzero(is_member[self.labels])


@dataclass(frozen=True)
class PlannedTask:
    """A task; its classes are the source's, in the order in which they get their labels."""

    name: str
    classes: tuple[int, ...]
    permutation: int | None = None  # seed of the pixel permutation
    classes_by_client: dict[int, tuple[int, ...]] | None = None  # where clients differ in it


@dataclass(frozen=True)
class Pool:
    """Samples that are divided among the clients together."""

    name: str
    rows: np.ndarray  # positions among all samples
    classes: tuple[int, ...]
    task_of: np.ndarray  # [clients, classes of the pool], the task in which a client meets a class, -1 for never
    key: int  # pools with the same key are divided by the same random numbers
    promised: bool = False  # a client must get samples of every class that it meets
    owners: np.ndarray | None = None  # [N], the client that each of all samples belongs to already


@dataclass(frozen=True)
class Layout:
    """The tasks of a stream and the pools of their samples."""

    tasks: tuple[PlannedTask, ...]
    pools: tuple[Pool, ...]


class Stream:
    """A way to turn samples into tasks."""

    name: ClassVar[str]
    Settings: ClassVar[type[StreamSettings]] = StreamSettings
    head: ClassVar[Literal["growing", "per-task"]] = "growing"  # the meaning of the model setting `head: auto`

    def __init__(self, settings: StreamSettings) -> None:
        self.settings = settings

    def lay_out(self, samples: SampleTable, clients: int) -> Layout:
        raise NotImplementedError

    def make_generator(self, *purpose: int | str) -> np.random.Generator:
        return np.random.default_rng(derive_seed("stream", self.settings.seed or 0, *purpose))


def lay_out_for_all(tasks: Sequence[PlannedTask], rows: Sequence[np.ndarray], clients: int) -> Layout:
    """Return a layout with one pool a task, in which every client meets all classes of the task."""
    pools = (
        Pool(f"task {t} ({task.name})", part, task.classes, np.full((clients, len(task.classes)), t), key=t)
        for t, (task, part) in enumerate(zip(tasks, rows, strict=True))
    )
    return Layout(tuple(tasks), tuple(pools))


def name_task(names: Sequence[str]) -> str:
    """Return the name of a task from those of its classes."""
    if len(names) <= 3:
        return ", ".join(names)
    return f"{names[0]} to {names[-1]}, {len(names)} classes"


def find_positions(selection: Sequence[int | str], names: Sequence[str], setting: str) -> tuple[int, ...]:
    """Return where the selected names are among the source's; UserError for an unknown or repeated one."""
    texts = [str(name) for name in selection]
    for name in texts:
        if name not in names:
            raise UserError(f"{setting}: the source has no {name}. {suggest_name(name, names)}")
        if texts.count(name) > 1:
            raise UserError(f"{setting}: {name} is named twice. Name it once.")
    return tuple(names.index(name) for name in texts)
