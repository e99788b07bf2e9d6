"""Class share: each client receives a share eta of a task's classes at random (PIP sec. 5, there 60 %).

PIP's release gives each client all images of its classes, so clients share them; `samples: split` (the default)
divides them evenly among the clients that have the class. The release draws the classes anew each round, this once.
"""

from typing import Literal

import numpy as np
from pydantic import Field

from fclmodels.data.partitions.base import Partition, Portion, largest_remainder
from fclmodels.errors import UserError
from fclmodels.settings import PartitionSettings


class ClassShare(Partition):
    """each client has some of a task's classes, its samples its own or shared"""

    name = "class-share"

    class Settings(PartitionSettings):
        eta: float = Field(0.6, gt=0, le=1, description="share of a task's classes that a client has")
        samples: Literal["split", "shared"] = Field(
            "split", description="samples of a class: split among the clients that have it, or all for each of them"
        )

    settings: Settings

    @property
    def shares_images(self) -> bool:
        return self.settings.samples == "shared"

    def allot(self, portion: Portion, generator: np.random.Generator) -> np.ndarray:
        held = self._held(portion, generator)
        if self.shares_images:
            return np.asarray(held * portion.counts)
        self._refuse_scarce(portion, held.sum(axis=0))
        return largest_remainder(held / np.maximum(held.sum(axis=0), 1), portion.counts * held.any(axis=0), generator)

    def _held(self, portion: Portion, generator: np.random.Generator) -> np.ndarray:
        """Who has which class [clients, k]; every class that someone may have, someone has (PIP sec. 3.1)."""
        eta, reach = self.settings.eta, portion.may.sum(axis=1)
        sizes = np.floor(eta * reach + 0.5 + 1e-9).astype(int)
        if (sizes < np.minimum(reach, 1)).any():
            classes = int(reach[(sizes == 0) & (reach > 0)].min())
            raise UserError(
                f"partition.eta: {eta} of the {classes} classes of {portion.name} leaves a client none. "
                f"Use {np.ceil(50 / classes) / 100} or more."
            )
        wanted = int(portion.may.any(axis=0).sum())
        if sizes.sum() < wanted:
            raise UserError(
                f"partition.eta: {(reach > 0).sum()} clients with {eta} of the classes of {portion.name} hold "
                f"{sizes.sum()} of {wanted}. Use a larger eta, or more clients."
            )
        rank = np.where(portion.may, generator.random(portion.may.shape), 2).argsort(axis=1).argsort(axis=1)
        return covering(rank < sizes[:, None], portion.may, generator)

    def _refuse_scarce(self, portion: Portion, holders: np.ndarray) -> None:
        scarce = np.flatnonzero(portion.counts < holders)
        if len(scarce):
            c = scarce[0]
            raise UserError(
                f"partition: {holders[c]} clients cannot share {portion.classes[c]} of {portion.name}: it has "
                f"{portion.counts[c]} training samples. Use fewer clients, a smaller eta, or partition.samples: shared."
            )


def covering(held: np.ndarray, may: np.ndarray, generator: np.random.Generator) -> np.ndarray:
    """held [clients, k] with each class that nobody has swapped in for one that several have."""
    held = held.copy()
    for c in np.flatnonzero(may.any(axis=0) & ~held.any(axis=0)):
        spare = held & (held.sum(axis=0) > 1) & may[:, [c]]
        client, given_up = generator.choice(np.argwhere(spare))
        held[client, [given_up, c]] = (False, True)
    return held
