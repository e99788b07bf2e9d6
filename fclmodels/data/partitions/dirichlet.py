"""Dirichlet: each class goes to the clients in shares drawn from Dir(alpha) (FedProTIP E.4, SPECIAL, STAMP E.5).

FedProTIP gives every client at least one sample of each class (`min_per_class: 1`). Without that a client still gets
at least one sample of the task.
"""

import numpy as np
from pydantic import Field, NonNegativeInt, PositiveFloat

from fclmodels.data.partitions.base import Partition, Portion, round_by_largest_remainder
from fclmodels.errors import UserError
from fclmodels.settings.schema import PartitionSettings


class Dirichlet(Partition):
    """each class in random shares: the smaller alpha, the more uneven"""

    name = "dirichlet"

    class Settings(PartitionSettings):
        alpha: PositiveFloat = Field(0.5, le=1e9, description="concentration: small is uneven, large is near iid")
        min_per_class: NonNegativeInt = Field(0, description="samples of each class that every client has at least")

    settings: Settings

    def check(self, portion: Portion) -> None:
        super().check(portion)
        clients, least, scarce = len(portion.may), self.settings.min_per_class, int(portion.counts.argmin())
        if portion.counts[scarce] < clients * least:
            raise UserError(
                f"partition.min_per_class: {clients} clients in {portion.name} need {clients * least} training samples "
                f"of {portion.classes[scarce]}, there are {portion.counts[scarce]}. "
                f"Use {portion.counts[scarce] // clients}, or fewer clients."
            )

    def draw_counts(self, counts: np.ndarray, clients: int, generator: np.random.Generator) -> np.ndarray:
        least = self.settings.min_per_class
        shares = generator.dirichlet(np.full(clients, self.settings.alpha), len(counts)).T
        return fill_empty_clients(least + round_by_largest_remainder(shares, counts - clients * least, generator))


def fill_empty_clients(allotted: np.ndarray) -> np.ndarray:
    """Give a client without samples one from the client with the most, of that client's largest class."""
    allotted = allotted.copy()
    sizes = allotted.sum(axis=1)
    for client in np.flatnonzero(sizes == 0):
        richest = sizes.argmax()
        column = allotted[richest].argmax()
        allotted[[richest, client], column] += (-1, 1)
        sizes[[richest, client]] += (-1, 1)
    return allotted
