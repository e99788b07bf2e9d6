"""The multi-layer perceptron of FOT, appendix F.3 (after Kirkpatrick et al. 2017): three hidden layers of 400."""

from math import prod

from pydantic import Field, PositiveInt
from torch import Tensor, nn

from fclmodels.backbones.base import Backbone, FeatureNet, Share
from fclmodels.backbones.layers.fast_dropout import Dropout
from fclmodels.backbones.layers.onednn_linear import Linear
from fclmodels.settings.schema import BackboneSettings


class Mlp(Backbone):
    """Three fully connected layers with dropout (FOT F.3); the head is the fourth."""

    name = "mlp"

    class Settings(BackboneSettings):
        hidden: PositiveInt = Field(400, description="units of each of the three layers")
        dropout: tuple[Share, Share] = Field((0.2, 0.5), description="dropout after the first layer, after the others")

    settings: Settings

    def build(self, shape: tuple[int, ...]) -> FeatureNet:
        return MlpNet(prod(shape), self.settings.hidden, self.settings.dropout)


class MlpNet(FeatureNet):
    """Inputs [B, ...] to features [B, hidden]."""

    blocks = ("fc1", "fc2", "fc3")

    def __init__(self, inputs: int, hidden: int, dropout: tuple[float, float]) -> None:
        super().__init__()
        self.features = hidden
        self.fc1 = Linear(inputs, hidden)
        self.fc2 = Linear(hidden, hidden)
        self.fc3 = Linear(hidden, hidden)
        self.relu = nn.ReLU(inplace=True)
        self.drop1 = Dropout(dropout[0])
        self.drop2 = Dropout(dropout[1])

    def forward(self, x: Tensor) -> Tensor:
        x = self.drop1(self.relu(self.fc1(x.flatten(1))))
        x = self.drop2(self.relu(self.fc2(x)))
        return self.drop2(self.relu(self.fc3(x)))
