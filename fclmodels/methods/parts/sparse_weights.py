"""Some entries or channels of weights: how they are picked, put together as tensors of one part, and averaged."""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from fclmodels.federation.messages import Part
from fclmodels.federation.protection.reply_checks import PartError, check_places

Weights = dict[str, Tensor]


class Sparse(NamedTuple):
    """Some entries of tensors by name: their places among the flattened ones, int32 [n], and values [n]."""

    places: Weights
    values: Weights

    def to_tensors(self) -> Weights:
        """Return both as tensors of one part, `places.NAME` and `values.NAME`."""
        return {
            f"{kind}.{name}": tensor
            for kind, tensors in zip(self._fields, self, strict=True)
            for name, tensor in tensors.items()
        }

    @classmethod
    def of_tensors(cls, tensors: Mapping[str, Tensor]) -> "Sparse":
        pairs = [(*key.partition(".")[::2], tensor) for key, tensor in tensors.items()]
        return cls(*({name: t for of, name, t in pairs if of == kind} for kind in cls._fields))


def pick_entries(weights: Mapping[str, Tensor], threshold: float) -> Sparse:
    """Return the entries of absolute value above a threshold."""
    flat = {name: w.detach().flatten() for name, w in weights.items()}
    places = {name: (w.abs() > threshold).nonzero().flatten() for name, w in flat.items()}
    return Sparse({name: p.int() for name, p in places.items()}, {name: flat[name][p] for name, p in places.items()})


def add_entries(weight: Tensor, places: Tensor, values: Tensor) -> Tensor:
    """Return a weight with values added at these places of it."""
    return weight.flatten().index_add(0, places, values).view_as(weight)


def average_channels(base: Tensor, places: Sequence[Tensor], values: Sequence[Tensor]) -> Tensor:
    """Return for each channel of B the mean over those who sent it; B's own where nobody did."""
    rows, sent = torch.cat([p.long() for p in places]), torch.cat(list(values))
    counts = torch.zeros(len(base), dtype=base.dtype).index_add(0, rows, torch.ones(len(rows), dtype=base.dtype))
    total = torch.zeros_like(base).index_add(0, rows, sent.to(base))
    shape = (-1, *[1] * (base.ndim - 1))
    return torch.where(counts.view(shape) > 0, total / counts.clamp(min=1).view(shape), base)


def fits_weights(tensors: Weights, weights: Weights) -> bool:
    """Return whether entries that a client added are of the weights: others would add them to theirs."""
    try:
        check_places(tensors, weights)
    except PartError:
        return False
    return True


def fill_empty(outline: Part) -> Weights:
    """Return the tensors of an outline of nothing."""
    return {name: torch.empty_like(tensor, device="cpu") for name, tensor in outline.tensors.items()}
