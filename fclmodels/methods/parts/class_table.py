"""Rows of classes in networks beside the model: a one-hot class times a matrix is a row of it."""

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from fclmodels.methods.fedavg import join_new_rows

State = dict[str, Tensor]


class ClassTable(nn.Module):
    """A row for each class: the product of its one-hot vector with a matrix, drawn as a linear layer's."""

    def __init__(self, classes: int, width: int, bound: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(classes, width).uniform_(-bound, bound))

    def forward(self, classes: Tensor) -> Tensor:
        return self.weight[classes]


def grow_tables(state: Mapping[str, Tensor], fresh: Mapping[str, Tensor]) -> State:
    """Return a state with fresh rows for classes that a stream has got since."""
    return {name: join_new_rows(tensor, fresh[name]) for name, tensor in state.items()}
