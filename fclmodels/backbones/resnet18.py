"""ResNet-18 (He et al. 2016), its tensors named as torchvision names them so that real weights load.

FOT F.3's reduced networks: `stem: cifar, width: 20, norm: none, grid: 2` (5-Datasets) and
`stem: cifar, stem_stride: 2, width: 32, norm: batch-no-stats, grid: 3` (mini-ImageNet, 84 pixels).
"""

from functools import partial

from fclmodels.backbones.base import Backbone, FeatureNet
from fclmodels.backbones.layers.residual import BasicBlock, ResNet, ResNetSettings, refuse_fine_grid


class ResNet18(Backbone):
    """Eight residual blocks in four layers; torchvision's weights load, the reduced ones of FOT are settings."""

    name = "resnet18"
    Settings = ResNetSettings
    settings: ResNetSettings

    def build(self, shape: tuple[int, ...]) -> FeatureNet:
        refuse_fine_grid(shape, self.settings)
        return ResNet(shape[0], self.settings, (2, 2, 2, 2), partial(BasicBlock, norm=self.settings.norm))
