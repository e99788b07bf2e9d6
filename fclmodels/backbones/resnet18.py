"""ResNet-18 (He et al. 2016), its tensors named as torchvision names them so that real weights load.

FOT F.3's reduced networks: `stem: cifar, width: 20, norm: none, grid: 2` (5-Datasets) and
`stem: cifar, stem_stride: 2, width: 32, norm: batch-no-stats, grid: 3` (mini-ImageNet, 84 pixels).
"""

from typing import ClassVar, Literal

from pydantic import Field, PositiveInt
from torch import Tensor, nn
from torch.nn import functional as F

from fclmodels.backbones.base import Backbone, FeatureNet
from fclmodels.backbones.layers.norms import Norm, make_norm
from fclmodels.errors import UserError
from fclmodels.settings.schema import BackboneSettings


class ResNet18(Backbone):
    """Eight residual blocks in four layers; torchvision's weights load, the reduced ones of FOT are settings."""

    name = "resnet18"

    class Settings(BackboneSettings):
        stem: Literal["imagenet", "cifar"] = Field(
            "imagenet", description="imagenet: 7x7 with stride 2, then max-pooling; cifar: 3x3, no pooling"
        )
        stem_stride: Literal[1, 2] = Field(1, description="stride of the cifar stem")
        width: PositiveInt = Field(64, description="filters of the first layer; 20 or 32: the reduced networks")
        norm: Norm = Field("batch", description="batch-no-stats: batch statistics in evaluation too; group; none")
        grid: PositiveInt = Field(
            1, description="the last map is averaged over grid x grid fields, each giving features"
        )

    settings: Settings

    def build(self, shape: tuple[int, ...]) -> FeatureNet:
        channels, height, width = shape
        reduction = 32 if self.settings.stem == "imagenet" else 8 * self.settings.stem_stride
        last = tuple(-(-side // reduction) for side in (height, width))
        if min(last) < self.settings.grid:
            raise UserError(
                f"model.grid: {height}x{width} pixels end in a map of {last[0]}x{last[1]}, which has no "
                f"{self.settings.grid}x{self.settings.grid} fields. Use model.grid: {min(last)}, or model.stem: cifar."
            )
        return ResNet18Net(channels, self.settings)


class ResNet18Net(FeatureNet):
    """Images [B, C, H, W] to features [B, 8 width grid^2]."""

    blocks = ("conv1", "bn1", "layer1", "layer2", "layer3", "layer4")
    divisible = True
    hints: ClassVar = {
        "conv1.weight": "conv1 follows model.stem (imagenet 7x7, cifar 3x3), model.width and data.channels."
    }

    def __init__(self, channels: int, settings: ResNet18.Settings) -> None:
        super().__init__()
        width, norm = settings.width, settings.norm
        self.grid = settings.grid
        self.features = 8 * width * self.grid**2
        if settings.stem == "imagenet":
            self.conv1: nn.Conv2d = nn.Conv2d(channels, width, 7, stride=2, padding=3, bias=False)
            self.maxpool: nn.Module = nn.MaxPool2d(3, stride=2, padding=1)
        else:
            self.conv1 = Conv3x3(channels, width, settings.stem_stride)
            self.maxpool = nn.Identity()
        self.bn1 = make_norm(norm, width)
        self.relu = nn.ReLU(inplace=True)
        self.layer1 = _make_layer(width, width, 1, norm)
        self.layer2 = _make_layer(width, 2 * width, 2, norm)
        self.layer3 = _make_layer(2 * width, 4 * width, 2, norm)
        self.layer4 = _make_layer(4 * width, 8 * width, 2, norm)
        # Without norms He's scale would double the variance in each block, which torch's smaller default does not.
        if norm != "none":
            for module in self.modules():
                if isinstance(module, nn.Conv2d):
                    nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")

    def forward(self, x: Tensor) -> Tensor:
        return self.run_rest(x, 0)

    def run_first(self, x: Tensor, blocks: int) -> Tensor:
        return self._run_blocks(self.blocks[:blocks], x)

    def run_rest(self, h: Tensor, blocks: int) -> Tensor:
        return F.adaptive_avg_pool2d(self._run_blocks(self.blocks[blocks:], h), self.grid).flatten(1)

    def _run_blocks(self, blocks: tuple[str, ...], x: Tensor) -> Tensor:
        for name in blocks:
            x = getattr(self, name)(self.maxpool(self.relu(x)) if name == "layer1" else x)
        return x


class ResidualBlock(nn.Module):
    """relu(x + F(x)) with two 3x3 convolutions in F; a 1x1 convolution matches x where the map's size changes."""

    def __init__(self, inputs: int, outputs: int, stride: int, norm: Norm) -> None:
        super().__init__()
        self.conv1 = Conv3x3(inputs, outputs, stride)
        self.bn1 = make_norm(norm, outputs)
        self.conv2 = Conv3x3(outputs, outputs)
        self.bn2 = make_norm(norm, outputs)
        self.relu = nn.ReLU(inplace=True)
        self.downsample: nn.Module | None = None
        if stride != 1 or inputs != outputs:
            fit = nn.Conv2d(inputs, outputs, 1, stride=stride, bias=False)
            self.downsample = nn.Sequential(fit, make_norm(norm, outputs))

    def forward(self, x: Tensor) -> Tensor:
        out = self.relu(self.bn1(self.conv1(x)))
        out = self.bn2(self.conv2(out))
        out += x if self.downsample is None else self.downsample(x)
        return self.relu(out)


def _make_layer(inputs: int, outputs: int, stride: int, norm: Norm) -> nn.Sequential:
    return nn.Sequential(ResidualBlock(inputs, outputs, stride, norm), ResidualBlock(outputs, outputs, 1, norm))


class Conv3x3(nn.Conv2d):
    """A 3x3 convolution padded by 1 that skips the taps which only ever meet the padding.

    On small images the last maps are 1x1 or 2x2: there 1 or 4 of the 9 taps do all the work.
    """

    def __init__(self, inputs: int, outputs: int, stride: int = 1) -> None:
        super().__init__(inputs, outputs, 3, stride=stride, padding=1, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        height, width = x.shape[-2:]
        if max(height, width) > self.stride[0]:
            return super().forward(x)
        return F.conv2d(x, self.weight[:, :, 1 : 1 + height, 1 : 1 + width], stride=self.stride)
