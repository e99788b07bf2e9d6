"""IID: shuffle, then equal parts whatever the class (FedProTIP E.4)."""

import numpy as np

from fclmodels.data.partitions.base import Partition


class Iid(Partition):
    """equal random parts, whatever the class"""

    name = "iid"

    def draw_counts(self, counts: np.ndarray, clients: int, generator: np.random.Generator) -> np.ndarray:
        classes = generator.permutation(np.repeat(np.arange(len(counts)), counts))
        owners = np.arange(len(classes)) * clients // len(classes)
        return np.bincount(owners * len(counts) + classes, minlength=clients * len(counts)).reshape(clients, -1)
