"""The base of backbones: networks below the heads that return features, built of blocks that may be frozen."""

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, ClassVar

from pydantic import Field
from torch import Tensor, nn

from fclmodels.data.sample_kind import IMAGES, SampleKind
from fclmodels.errors import UserError
from fclmodels.settings.schema import BackboneSettings
from fclmodels.storage.digests import digest_file

Share = Annotated[float, Field(ge=0, lt=1)]


class FeatureNet(nn.Module):
    """Maps a batch of inputs to features [B, F]; images come as floats [B, C, H, W], texts as ids [B, 2, L]."""

    features: int
    """F, the width of its output."""
    blocks: tuple[str, ...]
    """Names of its children, or of their children, from input to output; `model.freeze` may name each."""
    divisible: ClassVar[bool] = False
    """True where it has `run_first` and `run_rest`."""
    channels_last: ClassVar[bool] = False
    """True where the maps that its blocks return are [B, H, W, C]."""
    hints: ClassVar[Mapping[str, str]] = {}
    """By tensor name, the settings that its shape follows: for errors about weights that do not fit."""

    @property
    def stage_names(self) -> tuple[str, ...]:
        """The blocks at whose ends methods compare networks: all, but for a stem where there are stages."""
        return self.blocks

    def forward(self, x: Tensor) -> Tensor:
        raise NotImplementedError

    def run_first(self, x: Tensor, blocks: int) -> Tensor:
        """Return the output of its first `blocks` blocks, one or more."""
        raise NotImplementedError

    def run_rest(self, h: Tensor, blocks: int) -> Tensor:
        """Return the features [B, F] from the output of its first `blocks` blocks."""
        raise NotImplementedError

    def rename_tensors(self, tensors: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        """Return the tensors of a weights file by their names here."""
        return tensors


class Backbone:
    """A kind of network: settings, and how to build it for inputs of one shape."""

    name: ClassVar[str]
    Settings: type[BackboneSettings] = BackboneSettings
    reads: ClassVar[SampleKind] = IMAGES

    def __init__(self, settings: BackboneSettings) -> None:
        self.settings = settings

    def build(self, shape: tuple[int, ...]) -> FeatureNet:
        """Build a network for inputs of this shape (without the batch), drawn from torch's global generator."""
        raise NotImplementedError

    def list_dependencies(self) -> dict[str, str]:
        """Return what its results depend on besides settings and code: digests of files, versions of packages."""
        if not self.settings.weights:
            return {}
        from fclmodels.backbones.weights.published_weights import find_weights_file
        from fclmodels.backbones.weights.weight_files import refuse_missing

        file = find_weights_file(self.settings.weights, self.settings.backbone)
        refuse_missing(file)
        return {"weights": digest_named_file("model.weights", file)}


def digest_named_file(setting: str, path: Path) -> str:
    """Return the digest of a file that a setting names; UserError where it cannot be read."""
    try:
        return digest_file(path)
    except OSError as problem:
        raise UserError(f"{setting}: {path} cannot be read: {problem.strerror}.") from problem
