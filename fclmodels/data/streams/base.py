"""A stream turns samples into tasks that arrive one after another.

It says which classes and samples each task has and which client meets which class when; how a class's
samples are divided among its clients is the partition's work.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal

import numpy as np

from fclmodels.errors import UserError, did_you_mean
from fclmodels.randomness import seed_of
from fclmodels.settings import StreamSettings


@dataclass(frozen=True)
class Samples:
    """The prepared table, a position for each of N samples, with the test rows marked."""

    labels: np.ndarray  # [N], index into classes
    domains: np.ndarray  # [N], index into domain_names
    test: np.ndarray  # bool [N], rows that only the evaluation reads
    classes: tuple[str, ...]
    domain_names: tuple[str, ...]
    own_label_spaces: bool = False

    def of_classes(self, classes: Sequence[int]) -> np.ndarray:
        """Positions of the samples of these classes."""
        wanted = np.zeros(len(self.classes), bool)
        wanted[list(classes)] = True
        return np.flatnonzero(wanted[self.labels])


@dataclass(frozen=True)
class Task:
    """A task; its classes are the source's, in the order in which they get their labels."""

    name: str
    classes: tuple[int, ...]
    permutation: int | None = None  # seed of the pixel permutation
    classes_by_client: dict[int, tuple[int, ...]] | None = None  # where clients differ in it


@dataclass(frozen=True)
class Pool:
    """Samples that are divided among the clients in one go.

    task_of [clients, classes of the pool] is the task in which a client meets a class, -1 for never.
    Pools with the same key are divided by the same random numbers. Where it is promised, a client must get samples of
    every class that it meets. Where samples belong to clients already, owners [N] says to whom, by position among all.
    """

    name: str
    rows: np.ndarray
    classes: tuple[int, ...]
    task_of: np.ndarray
    key: int
    promised: bool = False
    owners: np.ndarray | None = None


@dataclass(frozen=True)
class Layout:
    tasks: tuple[Task, ...]
    pools: tuple[Pool, ...]


class Stream:
    name: ClassVar[str]
    Settings: ClassVar[type[StreamSettings]] = StreamSettings
    head: ClassVar[Literal["growing", "per-task"]] = "growing"  # what the model setting `head: auto` takes

    def __init__(self, settings: StreamSettings) -> None:
        self.settings = settings

    def layout(self, samples: Samples, clients: int) -> Layout:
        raise NotImplementedError

    def generator(self, *purpose: int | str) -> np.random.Generator:
        return np.random.default_rng(seed_of("stream", self.settings.seed, *purpose))


def same_for_all(tasks: Sequence[Task], rows: Sequence[np.ndarray], clients: int) -> Layout:
    """Every client meets all classes of a task in that task: one pool a task."""
    pools = (
        Pool(f"task {t} ({task.name})", part, task.classes, np.full((clients, len(task.classes)), t), key=t)
        for t, (task, part) in enumerate(zip(tasks, rows, strict=True))
    )
    return Layout(tuple(tasks), tuple(pools))


def title(names: Sequence[str]) -> str:
    """The name of a task that is some classes."""
    if len(names) <= 3:
        return ", ".join(names)
    return f"{names[0]} to {names[-1]}, {len(names)} classes"


def positions(wanted: Sequence[int | str], names: Sequence[str], setting: str) -> tuple[int, ...]:
    """Where the wanted names are among the source's; an unknown or repeated one is refused."""
    texts = [str(name) for name in wanted]
    for name in texts:
        if name not in names:
            raise UserError(f"{setting}: the source has no {name}. {did_you_mean(name, names)}")
        if texts.count(name) > 1:
            raise UserError(f"{setting}: {name} is named twice. Name it once.")
    return tuple(names.index(name) for name in texts)
