"""A few numbers in a network with all that makes training hard to repeat: dropout and running statistics."""

from torch import Tensor, nn

from fclmodels.backbones.base import Backbone, FeatureNet
from fclmodels.settings.schema import BackboneSettings


class Noisy(Backbone):
    """A convolution, batch normalisation, dropout."""

    name = "noisy"
    Settings = BackboneSettings

    def build(self, shape: tuple[int, ...]) -> FeatureNet:
        return NoisyNet(shape[0])


class NoisyNet(FeatureNet):
    features = 16
    blocks = ("conv", "bn")

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.conv = nn.Conv2d(channels, 4, 3, stride=2)
        self.bn = nn.BatchNorm2d(4)
        self.drop = nn.Dropout(0.3)

    def forward(self, x: Tensor) -> Tensor:
        return self.drop(self.bn(self.conv(x)).relu()).flatten(1)[:, :16]
