"""Weights as a shared base under a mask, plus what a task adds, plus what others' tasks have added (FedWeIT).

theta = B * sigmoid(m) + A + sum_k alpha_k K_k for each convolution and linear layer of a backbone: B shared, m a logit
for each output channel, A the task's own, K_k the sparse A of other clients' earlier tasks, alpha_k a number for each.
"""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

from fclmodels.backbones.model.network import Network

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


class Others:
    """The K of other clients, sparse as they came."""

    def __init__(self, parts: Sequence[Sparse]) -> None:
        self.parts = parts

    def add_up(self, name: str, alpha: Tensor, like: Tensor) -> Tensor:
        """Return sum_k alpha_k K_k of a weight, of the shape of `like`."""
        total = torch.zeros(like.numel(), dtype=like.dtype, device=like.device)
        for share, part in zip(alpha, self.parts, strict=True):
            total = total.index_add(0, part.places[name], share * part.values[name])
        return total.view_as(like)


def list_decomposed(network: Network) -> list[str]:
    """Return the names of the weights of the backbone's convolutions and linear layers."""
    layers = network.backbone.named_modules(prefix="backbone")
    return [f"{name}.weight" for name, layer in layers if isinstance(layer, nn.Conv2d | nn.Linear)]


def apply_mask(base: Tensor, mask: Tensor) -> Tensor:
    """Return B * sigmoid(m), a number of m for each output channel, the first dimension of B."""
    return base * mask.sigmoid().view(-1, *[1] * (base.ndim - 1))


def choose_channels(mask: Tensor, share: float) -> Tensor:
    """Return the channels, int32, whose |m| is above its quantile of this share."""
    sizes = mask.detach().abs()
    return (sizes > torch.quantile(sizes, share)).nonzero().flatten().int()


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
