"""A small convolutional network for small images and thumbnails: quick on a CPU, without batch statistics."""

from pydantic import Field, PositiveInt
from torch import Tensor, nn
from torch.nn import functional as F

from fclmodels.backbones.base import Backbone, FeatureNet
from fclmodels.errors import UserError
from fclmodels.settings.schema import BackboneSettings


class Cnn(Backbone):
    """Two 3x3 convolutions, each pooled by 2, and one fully connected layer; small and without norm."""

    name = "cnn"

    class Settings(BackboneSettings):
        width: PositiveInt = Field(32, description="filters of the first convolution; the second has twice as many")
        features: PositiveInt = Field(128, description="units of the fully connected layer")
        grid: PositiveInt = Field(4, description="the second map is averaged over at most grid x grid fields")

    settings: Settings

    def build(self, shape: tuple[int, ...]) -> FeatureNet:
        channels, height, width = shape
        if min(height, width) < 4:
            raise UserError(f"model.backbone: cnn needs images of at least 4x4 pixels, these are {height}x{width}.")
        # Without a limit the fully connected layer of 64-pixel images would have 16 times the inputs of 16-pixel ones.
        grid = (min(height // 4, self.settings.grid), min(width // 4, self.settings.grid))
        return CnnNet(channels, grid, self.settings.width, self.settings.features)


class CnnNet(FeatureNet):
    """Images [B, C, H, W] to features [B, F]."""

    blocks = ("conv1", "conv2", "fc1")

    def __init__(self, channels: int, grid: tuple[int, int], width: int, features: int) -> None:
        super().__init__()
        self.grid = grid
        self.features = features
        self.conv1 = nn.Conv2d(channels, width, 3, padding=1)
        self.conv2 = nn.Conv2d(width, 2 * width, 3, padding=1)
        self.fc1 = nn.Linear(2 * width * grid[0] * grid[1], features)
        self.pool = nn.MaxPool2d(2)
        self.relu = nn.ReLU(inplace=True)
        # He's scale keeps the signal through the ReLUs, so that the few steps of a federated round already show.
        for layer in (self.conv1, self.conv2, self.fc1):
            nn.init.kaiming_normal_(layer.weight, nonlinearity="relu")

    def forward(self, x: Tensor) -> Tensor:
        x = self.relu(self.pool(self.conv1(x)))
        x = self.relu(self.pool(self.conv2(x)))
        return self.relu(self.fc1(F.adaptive_avg_pool2d(x, self.grid).flatten(1)))
