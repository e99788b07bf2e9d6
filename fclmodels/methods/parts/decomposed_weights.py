"""Weights as a shared base under a mask, plus what a task adds, plus what others' tasks have added (FedWeIT).

theta = B * sigmoid(m) + A + sum_k alpha_k K_k for each convolution and linear layer of a backbone: B shared, m a logit
for each output channel, A the task's own, K_k the sparse A of other clients' earlier tasks, alpha_k a number for each.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from fclmodels.backbones.model.network import Network, build_skeleton
from fclmodels.backbones.model.spec import ModelSpec
from fclmodels.methods.parts.sparse_weights import Sparse
from fclmodels.methods.parts.trained_network import TrainedNetwork

Weights = dict[str, Tensor]


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
    """Return the channels, int32, whose |m| is not below its quantile of this share: of share 0 all, never none."""
    sizes = mask.detach().abs()
    return (sizes >= torch.quantile(sizes, share)).nonzero().flatten().int()


class DecomposedNetwork(TrainedNetwork):
    """The weights of layers travel; biases, norms and heads stay with each client, those of each task."""

    @property
    def is_personal(self) -> bool:
        return True

    def list_personal_names(self, network: Network) -> set[str]:
        return set(network.state_dict()) - set(list_decomposed(network))

    def list_undownloaded_names(self, spec: ModelSpec) -> set[str]:
        return self.list_personal_names(build_skeleton(spec))


class Decomposition:
    """What a client trains in a task beside biases, norms and its head."""

    def __init__(self, base: Weights, present: Mapping[str, Weights], others: Others, stiffness: Weights) -> None:
        self.base, self.mask, self.own, self.alpha = (
            {name: nn.Parameter(tensor.clone()) for name, tensor in tensors.items()}
            for tensors in (base, present["mask"], present["own"], present["alpha"])
        )
        self.start = present["start"]  # B at the task's start
        self.others = others
        self.stiffness = stiffness  # sum_i sigmoid(m_i)^2 over past tasks; none in the first

    def parameters(self) -> dict[str, nn.Parameter]:
        """Return all by name."""
        kinds = {"": self.base, "mask.": self.mask, "own.": self.own, "alpha.": self.alpha}
        return {f"{kind}{name}": p for kind, parameters in kinds.items() for name, p in parameters.items()}

    def borrow(self, name: str) -> Tensor:
        """Return sum_k alpha_k K_k."""
        like = self.own[name]
        return self.others.add_up(name, self.alpha[name], like) if self.others.parts else torch.zeros_like(like)

    def compose(self) -> Weights:
        """Return theta of each layer."""
        return {
            name: apply_mask(B, self.mask[name]) + self.own[name] + self.borrow(name) for name, B in self.base.items()
        }


def draw_present(base: Weights, count: int, random: torch.Generator) -> dict[str, Any]:
    """Return m, A and alpha at a task's start, for so many K."""
    mask = {name: torch.randn(len(B), generator=random).to(B) / len(B) ** 0.5 for name, B in base.items()}
    alpha = {name: torch.randn(count, generator=random).to(B) / count**0.5 for name, B in base.items() if count}
    return {"mask": mask, "own": {name: B / 3 for name, B in base.items()}, "alpha": alpha}
