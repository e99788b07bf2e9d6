"""DyTox's tokens: for each task a token that queries the patches, the norm below its head, and a divergence head."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from fclmodels.backbones.convit import ConvitNet
from fclmodels.backbones.model.network import Network, build_skeleton
from fclmodels.backbones.model.spec import ModelSpec

STD = 0.02


class TaskToken(nn.Module):
    """A task's token [D], the norm of its embedding, and the head that tells its classes from all earlier ones."""

    def __init__(self, width: int, classes: int) -> None:
        super().__init__()
        self.token = nn.Parameter(nn.init.trunc_normal_(torch.empty(width), std=STD))
        self.norm = nn.LayerNorm(width)
        self.divergence = nn.Sequential(nn.LayerNorm(width), nn.Linear(width, 1 + classes))


def build_task_tokens(spec: Mapping[str, Any]) -> nn.ModuleList:
    """Return the tokens of tasks with so many `classes`; those of the first tasks do not depend on how many follow."""
    return nn.ModuleList(TaskToken(spec["width"], classes) for classes in spec["classes"])


def embed_tokens(network: Network, tokens: nn.Module, inputs: Tensor) -> list[Tensor]:
    """Return e_t [B, D] for each task that the network has a head for: its token after the decoder."""
    convit = get_convit(network)
    patches, learned = convit.encode(inputs), range(len(network.heads))
    return [convit.decoder(tokens.get_parameter(f"{task}.token"), patches) for task in learned]


def get_convit(network: Network) -> ConvitNet:
    assert isinstance(network.backbone, ConvitNet)
    return network.backbone


def score_tokens(network: Network, tokens: nn.Module, embedded: list[Tensor]) -> Tensor:
    """Return the logits [B, columns] of all heads, each of its own task's token."""
    pairs = zip(network.heads, embedded, strict=True)
    return torch.cat([head(tokens.get_submodule(f"{t}.norm")(e)) for t, (head, e) in enumerate(pairs)], dim=1)


class TokenModel(nn.Module):
    """A network with its tasks' tokens, from inputs to logits."""

    def __init__(self, spec: Mapping[str, Any]) -> None:
        super().__init__()
        self.network = build_skeleton(ModelSpec.from_json(spec["model"]))
        self.tokens = build_task_tokens(spec)

    def forward(self, inputs: Tensor) -> Tensor:
        """Return logits [B, columns] of inputs [B, C, H, W]."""
        return score_tokens(self.network, self.tokens, embed_tokens(self.network, self.tokens, inputs))


@dataclass(frozen=True)
class LastTokenModel:
    """The last task's final network and tokens, in evaluation mode, in one training."""

    network: Network
    tokens: nn.Module

    @torch.no_grad()
    def answer(self, inputs: Tensor) -> Tensor:
        """Return the logits [B, n] of all old columns."""
        return score_tokens(self.network, self.tokens, embed_tokens(self.network, self.tokens, inputs))
