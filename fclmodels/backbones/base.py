"""What every network below the heads offers: features, and the names of the blocks that may be frozen."""

from collections.abc import Mapping
from typing import Annotated, ClassVar

from pydantic import Field
from torch import Tensor, nn

from fclmodels.settings import BackboneSettings

Dropout = Annotated[float, Field(ge=0, lt=1)]


class FeatureNet(nn.Module):
    """Maps a batch of inputs to features [B, F]; images come as floats [B, C, H, W]."""

    features: int
    """F, the width of what it returns."""
    blocks: tuple[str, ...]
    """Its top-level children from input to output, each of which `model.freeze` may name."""
    hints: ClassVar[Mapping[str, str]] = {}
    """By tensor name: which settings its shape follows, told where a weights file does not fit."""

    def forward(self, x: Tensor) -> Tensor:
        raise NotImplementedError


class Backbone:
    """A kind of network: settings, and how to build it for inputs of one shape."""

    Settings: type[BackboneSettings] = BackboneSettings

    def __init__(self, settings: BackboneSettings) -> None:
        self.settings = settings

    def build(self, shape: tuple[int, ...]) -> FeatureNet:
        """A new network for inputs of this shape (without the batch), drawn from torch's global generator."""
        raise NotImplementedError
