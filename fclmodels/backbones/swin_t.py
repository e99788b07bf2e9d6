"""Swin-T (Liu et al. 2021) as torchvision has it, for images of 32 pixels and more; its weights load by their names."""

from collections.abc import Mapping

from torch import Tensor

from fclmodels.backbones.base import Backbone, FeatureNet
from fclmodels.errors import UserError
from fclmodels.optional.torchvision import import_torchvision

LEAST = 32  # patches of 4 pixels, merged three times


class SwinT(Backbone):
    """The smallest Swin transformer: 28 million parameters, 768 features."""

    name = "swin-t"

    def build(self, shape: tuple[int, ...]) -> FeatureNet:
        channels, *sides = shape
        if channels != 3 or min(sides) < LEAST:
            raise UserError(
                f"model.backbone: swin-t reads 3 channels of {LEAST} pixels or more, these samples are "
                f"{'x'.join(map(str, shape))}. Set data.channels: 3 and data.size."
            )
        return SwinTNet()


class SwinTNet(FeatureNet):
    """Images [B, 3, H, W] to features [B, 768]."""

    features = 768
    blocks = ("stages", "norm")
    channels_last = True

    def __init__(self) -> None:
        super().__init__()
        network = import_torchvision().models.swin_t()
        self.stages, self.norm = network.features, network.norm

    def rename_tensors(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return torchvision's tensors by the names here: it calls the stages features."""
        return {name.replace("features.", "stages.", 1): tensor for name, tensor in tensors.items()}

    def forward(self, x: Tensor) -> Tensor:
        features: Tensor = self.norm(self.stages(x)).mean((1, 2))
        return features
