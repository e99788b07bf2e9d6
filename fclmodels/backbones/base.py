"""What every network below the heads offers: features, and the names of the blocks that may be frozen."""

from collections.abc import Mapping
from typing import Annotated, ClassVar

from pydantic import Field
from torch import Tensor, nn

from fclmodels.backbones.published import file_of
from fclmodels.fingerprint import digest_of_file
from fclmodels.kinds import IMAGES, Kind
from fclmodels.settings import BackboneSettings

Share = Annotated[float, Field(ge=0, lt=1)]


class FeatureNet(nn.Module):
    """Maps a batch of inputs to features [B, F]; images come as floats [B, C, H, W], texts as ids [B, 2, L]."""

    features: int
    """F, the width of what it returns."""
    blocks: tuple[str, ...]
    """Names of its children from input to output, or of theirs, each of which `model.freeze` may name."""
    divisible: ClassVar[bool] = False
    """Whether it has `up_to` and `onwards`."""
    hints: ClassVar[Mapping[str, str]] = {}
    """By tensor name: which settings its shape follows, told where a weights file does not fit."""

    def forward(self, x: Tensor) -> Tensor:
        raise NotImplementedError

    def up_to(self, x: Tensor, blocks: int) -> Tensor:
        """What the first `blocks` of its blocks, one or more, give of inputs."""
        raise NotImplementedError

    def onwards(self, h: Tensor, blocks: int) -> Tensor:
        """Features of what the first `blocks` of its blocks gave."""
        raise NotImplementedError

    def own_names(self, read: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        """Tensors of a weights file by the names that they have here."""
        return read


class Backbone:
    """A kind of network: settings, and how to build it for inputs of one shape."""

    Settings: type[BackboneSettings] = BackboneSettings
    reads: ClassVar[Kind] = IMAGES

    def __init__(self, settings: BackboneSettings) -> None:
        self.settings = settings

    def build(self, shape: tuple[int, ...]) -> FeatureNet:
        """A new network for inputs of this shape (without the batch), drawn from torch's global generator."""
        raise NotImplementedError

    def depends_on(self) -> dict[str, str]:
        """What its results depend on besides settings and code: digests of files, versions of packages."""
        weights = self.settings.weights
        return {"weights": digest_of_file("model.weights", file_of(weights, self.settings.backbone))} if weights else {}
