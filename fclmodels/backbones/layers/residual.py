"""Residual networks (He et al. 2016) with torchvision's names of tensors: ResNet-18's blocks and ResNet-50's."""

from collections.abc import Callable
from typing import ClassVar, Literal

from pydantic import Field, PositiveInt
from torch import Tensor, nn
from torch.nn import functional as F

from fclmodels.backbones.base import FeatureNet
from fclmodels.backbones.layers.norms import Norm, make_norm
from fclmodels.errors import UserError
from fclmodels.settings.schema import BackboneSettings

EXPANSION = 4  # filters of a bottleneck's last convolution, in times those of the others


class ResNetSettings(BackboneSettings):
    stem: Literal["imagenet", "cifar"] = Field(
        "imagenet", description="imagenet: 7x7 with stride 2, then max-pooling; cifar: 3x3, no pooling"
    )
    stem_stride: Literal[1, 2] = Field(1, description="stride of the cifar stem")
    width: PositiveInt = Field(64, description="filters of the first layer; 20 or 32: FOT's reduced networks")
    norm: Norm = Field("batch", description="batch-no-stats: batch statistics in evaluation too; group; none")
    grid: PositiveInt = Field(1, description="the last map is averaged over grid x grid fields, each giving features")


def refuse_fine_grid(shape: tuple[int, ...], settings: ResNetSettings) -> None:
    """Raise UserError where the last map of images of this shape has fewer fields than the grid."""
    height, width = shape[1:]
    reduction = 32 if settings.stem == "imagenet" else 8 * settings.stem_stride
    last = tuple(-(-side // reduction) for side in (height, width))
    if min(last) < settings.grid:
        raise UserError(
            f"model.grid: {height}x{width} pixels end in a map of {last[0]}x{last[1]}, which has no "
            f"{settings.grid}x{settings.grid} fields. Use model.grid: {min(last)}, or model.stem: cifar."
        )


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


class BasicBlock(nn.Module):
    """relu(x + F(x)) with two 3x3 convolutions in F; a 1x1 convolution matches x where the map's size changes."""

    def __init__(self, inputs: int, outputs: int, stride: int, norm: Norm) -> None:
        super().__init__()
        self.conv1 = Conv3x3(inputs, outputs, stride)
        self.bn1 = make_norm(norm, outputs)
        self.conv2 = Conv3x3(outputs, outputs)
        self.bn2 = make_norm(norm, outputs)
        self.relu = nn.ReLU(inplace=True)
        self.downsample = make_shortcut(inputs, outputs, stride, norm)

    def forward(self, x: Tensor) -> Tensor:
        out = self.relu(self.bn1(self.conv1(x)))
        out = self.bn2(self.conv2(out))
        out += x if self.downsample is None else self.downsample(x)
        return self.relu(out)


class BottleneckBlock(nn.Module):
    """relu(x + F(x)) with convolutions of 1x1, 3x3 and 1x1 in F; the last has four times as many filters.

    strides: of the first two convolutions.
    """

    def __init__(self, inputs: int, width: int, strides: tuple[int, int], norm: Norm) -> None:
        super().__init__()
        outputs, stride = EXPANSION * width, max(strides)
        self.conv1 = nn.Conv2d(inputs, width, 1, stride=strides[0], bias=False)
        self.bn1 = make_norm(norm, width)
        self.conv2 = Conv3x3(width, width, strides[1])
        self.bn2 = make_norm(norm, width)
        self.conv3 = nn.Conv2d(width, outputs, 1, bias=False)
        self.bn3 = make_norm(norm, outputs)
        self.relu = nn.ReLU(inplace=True)
        self.downsample = make_shortcut(inputs, outputs, stride, norm)

    def forward(self, x: Tensor) -> Tensor:
        out = self.relu(self.bn1(self.conv1(x)))
        out = self.relu(self.bn2(self.conv2(out)))
        out = self.bn3(self.conv3(out))
        out += x if self.downsample is None else self.downsample(x)
        return self.relu(out)


def make_shortcut(inputs: int, outputs: int, stride: int, norm: Norm) -> nn.Sequential | None:
    """Return the 1x1 convolution and norm that give x the shape of F(x); None where it has that."""
    if stride == 1 and inputs == outputs:
        return None
    return nn.Sequential(nn.Conv2d(inputs, outputs, 1, stride=stride, bias=False), make_norm(norm, outputs))


class ResNet(FeatureNet):
    """Images [B, C, H, W] to features [B, 8 width expansion grid^2], by so many blocks in each of four layers.

    make_block: from the numbers of inputs and of filters and the stride to a block with expansion times the filters.
    """

    blocks = ("conv1", "bn1", "layer1", "layer2", "layer3", "layer4")
    stage_names = blocks[2:]
    divisible = True
    hints: ClassVar = {
        "conv1.weight": "conv1 follows model.stem (imagenet 7x7, cifar 3x3), model.width and data.channels."
    }

    def __init__(
        self,
        channels: int,
        settings: ResNetSettings,
        depths: tuple[int, int, int, int],
        make_block: Callable[[int, int, int], nn.Module],
        expansion: int = 1,
    ) -> None:
        super().__init__()
        width, norm = settings.width, settings.norm
        self.grid = settings.grid
        self.features = 8 * width * expansion * self.grid**2
        if settings.stem == "imagenet":
            self.conv1: nn.Conv2d = nn.Conv2d(channels, width, 7, stride=2, padding=3, bias=False)
            self.maxpool: nn.Module = nn.MaxPool2d(3, stride=2, padding=1)
        else:
            self.conv1 = Conv3x3(channels, width, settings.stem_stride)
            self.maxpool = nn.Identity()
        self.bn1 = make_norm(norm, width)
        self.relu = nn.ReLU(inplace=True)
        inputs = width
        for place, depth in enumerate(depths):
            filters, stride = width * 2**place, min(place, 1) + 1
            outputs = filters * expansion
            first = make_block(inputs, filters, stride)
            others = [make_block(outputs, filters, 1) for _ in range(depth - 1)]
            self.add_module(f"layer{place + 1}", nn.Sequential(first, *others))
            inputs = outputs
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
            x = self.get_submodule(name)(self.maxpool(self.relu(x)) if name == "layer1" else x)
        return x
