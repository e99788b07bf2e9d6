"""Label shards: samples sorted by label, cut into equal shards, a few for each client (McMahan et al., FOT sec. 5).

FOT says that so each client has at most two classes. That holds where no shard crosses a class boundary; here none
does: classes get shards in proportion to their size, and those of one class are equal to within one sample.
"""

import numpy as np
from pydantic import Field, PositiveInt

from fclmodels.data.partitions.base import Partition, Portion, round_by_largest_remainder
from fclmodels.errors import UserError
from fclmodels.settings.schema import PartitionSettings


class Shards(Partition):
    """a few shards of one class each for every client"""

    name = "shards"

    class Settings(PartitionSettings):
        shards: PositiveInt = Field(2, description="shards of each client, so the most classes it can have in a task")

    settings: Settings

    def check(self, portion: Portion) -> None:
        super().check(portion)
        clients, each = len(portion.may), self.settings.shards
        samples, classes = int(portion.counts.sum()), int((portion.counts > 0).sum())
        if clients * each > samples:
            raise UserError(
                f"partition.shards: {clients} clients with {each} shards each cannot share {portion.name}: "
                f"it has {samples} training samples. Use {samples // clients} or fewer, or fewer clients."
            )
        if clients * each < classes:
            raise UserError(
                f"partition.shards: {clients} clients with {each} shards each cannot hold {portion.name}: "
                f"it has {classes} classes. Use {-(-classes // clients)} or more, or more clients."
            )

    def draw_counts(self, counts: np.ndarray, clients: int, generator: np.random.Generator) -> np.ndarray:
        pieces = count_shards(counts, clients * self.settings.shards, generator)
        classes = np.repeat(np.arange(len(counts)), pieces)
        sizes = np.concatenate([counts[c] // n + (np.arange(n) < counts[c] % n) for c, n in enumerate(pieces) if n])
        shuffled = generator.permutation(len(classes))
        allotted = np.zeros((clients, len(counts)), np.int64)
        np.add.at(allotted, (np.repeat(np.arange(clients), self.settings.shards), classes[shuffled]), sizes[shuffled])
        return allotted


def count_shards(counts: np.ndarray, shards: int, generator: np.random.Generator) -> np.ndarray:
    """Return the number of shards [k] of each class, in proportion to counts [k], at least one where it has samples."""
    pieces = round_by_largest_remainder((counts / counts.sum())[:, None], np.array([shards]), generator)[:, 0]
    for c in np.flatnonzero((pieces == 0) & (counts > 0)):
        pieces[[pieces.argmax(), c]] += (-1, 1)
    return pieces
