"""Springs that hold weights near earlier values: a stiffness and a centre for each weight, in a client's memory.

A head that has grown since they were taken has new rows, which no spring holds.
"""

import torch
from torch import Tensor

from fclmodels.federation.training.local_training import LocalTraining


@torch.no_grad()
def add_spring_forces(training: LocalTraining, stiffness: str, centre: str, strength: float) -> None:
    """Add strength F (w - centre) to gradients, in place; F and centre are the client's memory of these names."""
    memory, gradients = training.client.memory, training.gradients
    for name, stiff in memory.get(stiffness, {}).items():
        if name in gradients:
            rows = slice(len(stiff))
            stretch = training.parameters[name][rows] - memory[centre][name]
            gradients[name][rows].addcmul_(stiff, stretch, value=strength)


def extend_rows(old: Tensor, count: int) -> Tensor:
    """Return the tensor with rows of zeros for the rows that a head has gained since."""
    return torch.cat([old, old.new_zeros(count - len(old), *old.shape[1:])])
