"""Class share: each client receives a share eta of a task's classes at random (PIP sec. 5, there 60 %).

PIP's release gives each client all images of its classes, so clients share them; `samples: split` (the default)
divides them evenly among the clients that have the class. The release draws the classes anew each round, this once:
`federation.redraw_classes` does that too.
"""

from typing import Literal

import numpy as np
from pydantic import Field

from fclmodels.data.partitions.base import Partition, Portion, round_by_largest_remainder
from fclmodels.errors import UserError
from fclmodels.settings.schema import PartitionSettings


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
        has_class = self._draw_classes(portion, generator)
        if self.shares_images:
            return np.asarray(has_class * portion.counts)
        self._refuse_scarce(portion, has_class.sum(axis=0))
        return round_by_largest_remainder(
            has_class / np.maximum(has_class.sum(axis=0), 1), portion.counts * has_class.any(axis=0), generator
        )

    def _draw_classes(self, portion: Portion, generator: np.random.Generator) -> np.ndarray:
        """Draw which clients have which class [clients, k]; every class that some may have, one has (PIP sec. 3.1)."""
        eta, reach = self.settings.eta, portion.may.sum(axis=1)
        sizes = np.floor(eta * reach + 0.5 + 1e-9).astype(int)
        if (sizes < np.minimum(reach, 1)).any():
            classes = int(reach[(sizes == 0) & (reach > 0)].min())
            raise UserError(
                f"partition.eta: {eta} of the {classes} classes of {portion.name} leaves a client none. "
                f"Use {np.ceil(50 / classes) / 100} or more."
            )
        needed = int(portion.may.any(axis=0).sum())
        if sizes.sum() < needed:
            raise UserError(
                f"partition.eta: {(reach > 0).sum()} clients with {eta} of the classes of {portion.name} hold "
                f"{sizes.sum()} of {needed}. Use a larger eta, or more clients."
            )
        rank = np.where(portion.may, generator.random(portion.may.shape), 2).argsort(axis=1).argsort(axis=1)
        return cover_classes(rank < sizes[:, None], portion.may, generator)

    def _refuse_scarce(self, portion: Portion, holders: np.ndarray) -> None:
        scarce = np.flatnonzero(portion.counts < holders)
        if len(scarce):
            c = scarce[0]
            raise UserError(
                f"partition: {holders[c]} clients cannot share {portion.classes[c]} of {portion.name}: it has "
                f"{portion.counts[c]} training samples. Use fewer clients, a smaller eta, or partition.samples: shared."
            )


def cover_classes(has_class: np.ndarray, may: np.ndarray, generator: np.random.Generator) -> np.ndarray:
    """Swap each class that no client has for one that several have: has_class [clients, k]."""
    has_class = has_class.copy()
    for c in np.flatnonzero(may.any(axis=0) & ~has_class.any(axis=0)):
        spare = has_class & (has_class.sum(axis=0) > 1) & may[:, [c]]
        client, surplus = generator.choice(np.argwhere(spare))
        has_class[client, [surplus, c]] = (False, True)
    return has_class
