"""ResNet-50 (He et al. 2016), its tensors named as torchvision names them so that real weights load."""

from typing import Literal

from pydantic import Field
from torch import nn

from fclmodels.backbones.base import Backbone, FeatureNet
from fclmodels.backbones.layers.residual import EXPANSION, BottleneckBlock, ResNet, ResNetSettings, refuse_fine_grid


class ResNet50(Backbone):
    """Sixteen bottleneck blocks in four layers, 23.5 million parameters, 2048 features; real weights load."""

    name = "resnet50"

    class Settings(ResNetSettings):
        stride_in: Literal["3x3", "1x1"] = Field(
            "3x3", description="a block's convolution with the stride: 3x3 torchvision's, 1x1 He et al.'s and Keras'"
        )

    settings: Settings

    def build(self, shape: tuple[int, ...]) -> FeatureNet:
        refuse_fine_grid(shape, self.settings)
        return ResNet(shape[0], self.settings, (3, 4, 6, 3), self._make_block, EXPANSION)

    def _make_block(self, inputs: int, filters: int, stride: int) -> nn.Module:
        strides = (stride, 1) if self.settings.stride_in == "1x1" else (1, stride)
        return BottleneckBlock(inputs, filters, strides, self.settings.norm)
