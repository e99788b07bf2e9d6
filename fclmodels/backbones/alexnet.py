"""The AlexNet-like network of FOT, appendix F.3 (after GPM): three convolutions and two wide layers, no bias."""

from pydantic import Field
from torch import Tensor, nn

from fclmodels.backbones.base import Backbone, FeatureNet, Share
from fclmodels.backbones.layers.fast_dropout import Dropout
from fclmodels.backbones.layers.onednn_linear import Linear
from fclmodels.errors import UserError
from fclmodels.settings.schema import BackboneSettings

LEAST_SIDE = 19


class AlexNet(Backbone):
    """Three convolutions and two layers of 2048 with dropout, no norm, no bias (FOT F.3); for 32 pixels."""

    name = "alexnet"

    class Settings(BackboneSettings):
        dropout: tuple[Share, Share] = Field((0.2, 0.5), description="dropout in the first two layers, in the others")

    settings: Settings

    def build(self, shape: tuple[int, ...]) -> FeatureNet:
        channels, height, width = shape
        if min(height, width) < LEAST_SIDE:
            raise UserError(
                f"model.backbone: alexnet needs images of at least {LEAST_SIDE}x{LEAST_SIDE} pixels, "
                f"these are {height}x{width}. Set data.size: 32, or take another backbone."
            )
        return AlexNetNet(channels, _find_map_side(height) * _find_map_side(width), self.settings.dropout)


def _find_map_side(side: int) -> int:
    """Return the side of the last feature map: after each convolution (4, 3, 2 wide, no padding) a pooling by 2."""
    for kernel in (4, 3, 2):
        side = (side - kernel + 1) // 2
    return side


class AlexNetNet(FeatureNet):
    """Images [B, C, H, W] to features [B, 2048]."""

    features = 2048
    blocks = ("conv1", "conv2", "conv3", "fc1", "fc2")

    def __init__(self, channels: int, positions: int, dropout: tuple[float, float]) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(channels, 64, 4, bias=False)
        self.conv2 = nn.Conv2d(64, 128, 3, bias=False)
        self.conv3 = nn.Conv2d(128, 256, 2, bias=False)
        self.fc1 = Linear(256 * positions, 2048, bias=False)
        self.fc2 = Linear(2048, 2048, bias=False)
        self.pool = nn.MaxPool2d(2)
        self.relu = nn.ReLU(inplace=True)
        self.drop1 = Dropout(dropout[0])
        self.drop2 = Dropout(dropout[1])

    def forward(self, x: Tensor) -> Tensor:
        x = self.pool(self.drop1(self.relu(self.conv1(x))))
        x = self.pool(self.drop1(self.relu(self.conv2(x))))
        x = self.pool(self.drop2(self.relu(self.conv3(x))))
        x = self.drop2(self.relu(self.fc1(x.flatten(1))))
        return self.drop2(self.relu(self.fc2(x)))
