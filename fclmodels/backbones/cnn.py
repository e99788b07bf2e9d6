"""A small convolutional network for images of 8 to 32 pixels: quick on a CPU, without batch statistics."""

from pydantic import Field, PositiveInt
from torch import Tensor, nn

from fclmodels.backbones.base import Backbone, FeatureNet
from fclmodels.errors import UserError
from fclmodels.settings import BackboneSettings


class Cnn(Backbone):
    """Two 3x3 convolutions, each pooled by 2, and one fully connected layer; small and without norm."""

    name = "cnn"

    class Settings(BackboneSettings):
        width: PositiveInt = Field(32, description="filters of the first convolution; the second has twice as many")
        features: PositiveInt = Field(128, description="units of the fully connected layer")

    settings: Settings

    def build(self, shape: tuple[int, ...]) -> FeatureNet:
        channels, height, width = shape
        if min(height, width) < 4:
            raise UserError(f"model.backbone: cnn needs images of at least 4x4 pixels, these are {height}x{width}.")
        return CnnNet(channels, (height // 4) * (width // 4), self.settings.width, self.settings.features)


class CnnNet(FeatureNet):
    blocks = ("conv1", "conv2", "fc1")

    def __init__(self, channels: int, positions: int, width: int, features: int) -> None:
        super().__init__()
        self.features = features
        self.conv1 = nn.Conv2d(channels, width, 3, padding=1)
        self.conv2 = nn.Conv2d(width, 2 * width, 3, padding=1)
        self.fc1 = nn.Linear(2 * width * positions, features)
        self.pool = nn.MaxPool2d(2)
        self.relu = nn.ReLU(inplace=True)
        # He's scale keeps the signal through the ReLUs, so that the few steps of a federated round already tell.
        for layer in (self.conv1, self.conv2, self.fc1):
            nn.init.kaiming_normal_(layer.weight, nonlinearity="relu")

    def forward(self, x: Tensor) -> Tensor:
        x = self.relu(self.pool(self.conv1(x)))
        x = self.relu(self.pool(self.conv2(x)))
        return self.relu(self.fc1(x.flatten(1)))
