"""A partition gives each task's samples to clients.

A kind is a law for numbers: how many samples of each class each client gets. Which samples these are is then drawn
evenly, so that every kind is a small matrix [clients, classes] that can be looked at and tested by itself.
"""

from dataclasses import dataclass, replace
from typing import ClassVar

import numpy as np

from fclmodels.errors import UserError
from fclmodels.randomness import seed_of
from fclmodels.settings import PartitionSettings


@dataclass(frozen=True)
class Portion:
    """What is divided at once: a task's train samples, or all of a task pool's."""

    name: str  # for errors
    classes: tuple[str, ...]  # k names
    counts: np.ndarray  # [k] samples of each class
    may: np.ndarray  # bool [clients, k]: who meets which class


class Partition:
    name: ClassVar[str]
    Settings: ClassVar[type[PartitionSettings]] = PartitionSettings

    def __init__(self, settings: PartitionSettings) -> None:
        self.settings = settings

    @property
    def shares_images(self) -> bool:
        """Whether each client that has a class has all of its samples."""
        return False

    def generator(self, *purpose: int | str) -> np.random.Generator:
        return np.random.default_rng(seed_of("partition", self.settings.seed, *purpose))

    def allot(self, portion: Portion, generator: np.random.Generator) -> np.ndarray:
        """Samples [clients, k] of each class for each client; classes that the same clients may have go together."""
        allotted = np.zeros(portion.may.shape, np.int64)
        sets_of_clients, kind = np.unique(portion.may, axis=1, return_inverse=True)
        for i, who in enumerate(sets_of_clients.T):
            here = np.flatnonzero(kind.ravel() == i)
            if not who.any():
                continue
            part = replace(
                portion,
                classes=tuple(portion.classes[c] for c in here),
                counts=portion.counts[here],
                may=np.ones((who.sum(), len(here)), bool),
            )
            self.check(part)
            allotted[np.ix_(who, here)] = self.law(part.counts, len(part.may), generator)
        return allotted

    def check(self, portion: Portion) -> None:
        """Refuse what cannot be divided."""
        clients, samples = len(portion.may), int(portion.counts.sum())
        if clients > samples:
            raise UserError(
                f"partition: {clients} clients cannot share {portion.name}: it has {samples} training samples. "
                "Use fewer clients, or fewer tasks."
            )

    def law(self, counts: np.ndarray, clients: int, generator: np.random.Generator) -> np.ndarray:
        """Samples [clients, k] of each class for each client; the columns add up to counts [k]."""
        raise NotImplementedError


def participants(clients: int, tasks: int, share: float, generator: np.random.Generator) -> np.ndarray:
    """Who has data of which task [clients, tasks]: in each task the same number of clients, drawn anew (FOT G.1)."""
    present = max(1, round(share * clients))
    rank = generator.random((clients, tasks)).argsort(axis=0).argsort(axis=0)
    return rank < present


def largest_remainder(shares: np.ndarray, totals: np.ndarray, generator: np.random.Generator) -> np.ndarray:
    """Whole numbers [n, k] near shares * totals whose columns add up to totals [k]; ties fall by lot.

    The columns of shares [n, k] add up to 1.
    """
    exact = shares * totals
    whole = np.floor(exact + 1e-9)
    left = totals - whole.sum(axis=0)
    rank = np.lexsort((generator.random(exact.shape), whole - exact), axis=0).argsort(axis=0)
    return (whole + (rank < left)).astype(np.int64)
