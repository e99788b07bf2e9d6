"""A layer between backbone and heads, beside the network: AF-FCL's fc2."""

from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn
from torch.nn.functional import leaky_relu

from fclmodels.backbones.layers.norms import drop_statistics
from fclmodels.backbones.model.network import build_skeleton
from fclmodels.backbones.model.spec import ModelSpec
from fclmodels.methods.parts.joined_heads import join_heads


class HiddenLayer(nn.Linear):
    """A linear layer and leaky ReLU."""

    def forward(self, features: Tensor) -> Tensor:
        return leaky_relu(super().forward(features))


def build_layer(spec: Mapping[str, Any]) -> HiddenLayer:
    return HiddenLayer(spec["features"], spec["features"])


class LayeredModel(nn.Module):
    """A network with the layer between backbone and heads, from inputs to logits."""

    def __init__(self, spec: Mapping[str, Any]) -> None:
        super().__init__()
        self.network = build_skeleton(ModelSpec.from_json(spec["model"]))
        if not spec["statistics"]:
            drop_statistics(self.network)
        self.layer = build_layer(spec)

    def forward(self, inputs: Tensor) -> Tensor:
        """Return logits [B, columns] of inputs [B, C, H, W]."""
        return join_heads(self.network, self.layer(self.network.backbone(inputs)))
