"""A partition divides each task's samples among clients.

A kind says how many samples of each class each client gets. Which samples these are is then drawn evenly, so that
every kind is a small matrix [clients, classes] that can be looked at and tested by itself.
"""

from dataclasses import dataclass, replace
from typing import ClassVar

import numpy as np

from fclmodels.errors import UserError
from fclmodels.randomness import derive_seed
from fclmodels.settings.schema import PartitionSettings


@dataclass(frozen=True)
class Portion:
    """The samples that are divided at once: a task's train samples, or all of a task pool's."""

    name: str  # for errors
    classes: tuple[str, ...]  # k names
    counts: np.ndarray  # [k] samples of each class
    may: np.ndarray  # bool [clients, k]: which clients may have which class


class Partition:
    """A way to divide samples among clients."""

    name: ClassVar[str]
    Settings: ClassVar[type[PartitionSettings]] = PartitionSettings

    def __init__(self, settings: PartitionSettings) -> None:
        self.settings = settings

    @property
    def shares_images(self) -> bool:
        """True where each client that has a class has all of its samples."""
        return False

    def make_generator(self, *purpose: int | str) -> np.random.Generator:
        return np.random.default_rng(derive_seed("partition", self.settings.seed or 0, *purpose))

    def allot(self, portion: Portion, generator: np.random.Generator) -> np.ndarray:
        """Return numbers of samples [clients, k]; classes that the same clients may have are divided together."""
        allotted = np.zeros(portion.may.shape, np.int64)
        sets_of_clients, set_of_class = np.unique(portion.may, axis=1, return_inverse=True)
        for i, clients in enumerate(sets_of_clients.T):
            columns = np.flatnonzero(set_of_class.ravel() == i)
            if not clients.any():
                continue
            part = replace(
                portion,
                classes=tuple(portion.classes[c] for c in columns),
                counts=portion.counts[columns],
                may=np.ones((clients.sum(), len(columns)), bool),
            )
            self.check(part)
            allotted[np.ix_(clients, columns)] = self.draw_counts(part.counts, len(part.may), generator)
        return allotted

    def check(self, portion: Portion) -> None:
        """Raise UserError where the samples cannot be divided."""
        clients, samples = len(portion.may), int(portion.counts.sum())
        if clients > samples:
            raise UserError(
                f"partition: {clients} clients cannot share {portion.name}: it has {samples} training samples. "
                "Use fewer clients, or fewer tasks."
            )

    def draw_counts(self, counts: np.ndarray, clients: int, generator: np.random.Generator) -> np.ndarray:
        """Return numbers of samples [clients, k]; the columns sum to counts [k]."""
        raise NotImplementedError


def draw_participants(clients: int, tasks: int, share: float, generator: np.random.Generator) -> np.ndarray:
    """Draw which clients have data of which task [clients, tasks]: the same number in each task (FOT G.1)."""
    present = max(1, round(share * clients))
    rank = generator.random((clients, tasks)).argsort(axis=0).argsort(axis=0)
    return rank < present


def round_by_largest_remainder(shares: np.ndarray, totals: np.ndarray, generator: np.random.Generator) -> np.ndarray:
    """Round shares * totals [n, k] to whole numbers whose columns sum to totals [k]; ties are drawn.

    The columns of shares [n, k] sum to 1.
    """
    exact = shares * totals
    floors = np.floor(exact + 1e-9)
    remaining = totals - floors.sum(axis=0)
    rank = np.lexsort((generator.random(exact.shape), floors - exact), axis=0).argsort(axis=0)
    return (floors + (rank < remaining)).astype(np.int64)
