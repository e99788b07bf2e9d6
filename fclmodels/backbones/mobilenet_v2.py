"""MobileNetV2 (Sandler et al. 2018), a network that phones run; torchvision's weights load by their names.

Its blocks are inverted residuals: a 1x1 convolution widens x by six, a depthwise 3x3 one filters each channel by
itself, and a 1x1 one narrows it again. With `width: 1, stride: 32` it is torchvision's network below its classifier,
whose dropout it lacks. `stride: 16` and `stride: 8` are ours, for small images: the stem, and then the second stage
too, have stride 1, as implementations for CIFAR have it, so that 32 pixels end in a map of 2x2 or 4x4 and not of 1x1.
Weights stay the same.
"""

from collections.abc import Mapping
from typing import Literal

from pydantic import Field, PositiveFloat
from torch import Tensor, nn
from torch.nn import functional as F

from fclmodels.backbones.base import Backbone, FeatureNet
from fclmodels.backbones.layers.norms import Norm, make_norm
from fclmodels.settings.schema import BackboneSettings

# Of each stage: expansion, filters, blocks, stride of the first block.
STAGES = ((1, 16, 1, 1), (6, 24, 2, 2), (6, 32, 3, 2), (6, 64, 4, 2), (6, 96, 3, 1), (6, 160, 3, 2), (6, 320, 1, 1))
STEM, LAST = 32, 1280


class MobileNetV2(Backbone):
    """Seventeen inverted residuals with depthwise convolutions, 2.2 million parameters, 1280 features."""

    name = "mobilenet-v2"

    class Settings(BackboneSettings):
        width: PositiveFloat = Field(
            1.0, le=4, description="factor on all numbers of filters, which stay multiples of 8"
        )
        stride: Literal[8, 16, 32] = Field(
            32, description="pixels of a side to one place of the last map; 16 and 8: ours, for small images"
        )
        norm: Norm = Field("batch", description="batch-no-stats: batch statistics in evaluation too; group; none")

    settings: Settings

    def build(self, shape: tuple[int, ...]) -> FeatureNet:
        return MobileNetV2Net(shape[0], self.settings)


class MobileNetV2Net(FeatureNet):
    """Images [B, C, H, W] to features [B, 1280], or 1280 times a width above 1."""

    divisible = True

    def __init__(self, channels: int, settings: MobileNetV2.Settings) -> None:
        super().__init__()
        norm, width = settings.norm, settings.width
        slow = {32: 0, 16: 1, 8: 2}[settings.stride]  # how many of the first strides are 1
        inputs = round_filters(STEM * width)
        stages: list[nn.Module] = [make_convolution(channels, inputs, norm, kernel=3, stride=1 if slow else 2)]
        for place, (expansion, filters, blocks, stride) in enumerate(STAGES):
            outputs = round_filters(filters * width)
            for block in range(blocks):
                first = 1 if block or (place == 1 and slow == 2) else stride
                stages.append(InvertedResidual(inputs, outputs, first, expansion, norm))
                inputs = outputs
        self.features = round_filters(LAST * max(1.0, width))
        stages.append(make_convolution(inputs, self.features, norm))
        self.stages = nn.Sequential(*stages)
        self.blocks = tuple(f"stages.{place}" for place in range(len(stages)))
        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight, mode="fan_out")

    def rename_tensors(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return torchvision's tensors by the names here: it calls the stages features."""
        return {
            name.replace("features.", "stages.", 1): tensor
            for name, tensor in tensors.items()
            if not name.startswith("classifier.")
        }

    def forward(self, x: Tensor) -> Tensor:
        return self.run_rest(x, 0)

    def run_first(self, x: Tensor, blocks: int) -> Tensor:
        first: Tensor = self.stages[:blocks](x)
        return first

    def run_rest(self, h: Tensor, blocks: int) -> Tensor:
        return F.adaptive_avg_pool2d(self.stages[blocks:](h), 1).flatten(1)


class InvertedResidual(nn.Module):
    """Widens, filters each channel, and narrows x; adds x where the shape stays."""

    def __init__(self, inputs: int, outputs: int, stride: int, expansion: int, norm: Norm) -> None:
        super().__init__()
        hidden = inputs * expansion
        widen = [make_convolution(inputs, hidden, norm)] if expansion != 1 else []
        depthwise = make_convolution(hidden, hidden, norm, kernel=3, stride=stride, groups=hidden)
        narrow = nn.Conv2d(hidden, outputs, 1, bias=False)
        self.conv = nn.Sequential(*widen, depthwise, narrow, make_norm(norm, outputs))
        self.adds = stride == 1 and inputs == outputs

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.conv(x)
        return x + out if self.adds else out


def make_convolution(
    inputs: int, outputs: int, norm: Norm, kernel: int = 1, stride: int = 1, groups: int = 1
) -> nn.Sequential:
    """Return a convolution that keeps the map's size but for its stride, its norm, and a ReLU up to 6."""
    convolution = nn.Conv2d(inputs, outputs, kernel, stride, kernel // 2, groups=groups, bias=False)
    return nn.Sequential(convolution, make_norm(norm, outputs), nn.ReLU6(inplace=True))


def round_filters(filters: float) -> int:
    """Return the multiple of 8 nearest to a number of filters, no less than nine tenths of it."""
    rounded = max(8, int(filters + 4) // 8 * 8)
    return rounded + 8 if rounded < 0.9 * filters else rounded
