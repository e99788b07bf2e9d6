"""Our own backbones pass check_backbone; a wrong one gets a line."""

from collections.abc import Callable
from pathlib import Path

import pytest

from fclmodels.plugins import find, load_all
from fclmodels.testing import check_backbone

Write = Callable[[str, str], Path]

SETTINGS = {
    "resnet18": ("model.width=4",),
    "vit": ("model.width=12", "model.depth=2", "model.patch=8", "model.mlp_width=8"),
}
SLOW = {"alexnet": pytest.mark.slow, "swin-t": pytest.mark.slow}
NET = """
import torch
from torch import nn
from fclmodels.backbones.base import Backbone, FeatureNet
class Mine(Backbone):
    '''Mine.'''
    name = "mine"
    def build(self, shape):
        return MineNet(shape[0])
class MineNet(FeatureNet):
    blocks = ("layer",)
    def __init__(self, channels):
        super().__init__()
        self.features = 4
        self.layer = nn.Conv2d(channels, 4, 3)
    def forward(self, x):
        return self.layer(x).mean((2, 3))
"""


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=SLOW.get(name, ())) for name in load_all("backbone") if name != "transformer"]
)
def test_every_backbone_passes(name: str) -> None:
    check_backbone(find("backbone", name), *SETTINGS.get(name, ()))


def test_the_transformer_passes(encoder: Path) -> None:
    check_backbone(find("backbone", "transformer"), f"model.folder={encoder}")


@pytest.mark.parametrize(
    ("right", "wrong", "line"),
    [
        ("x).mean((2, 3))", "x).flatten(1)", r"features of 3 samples are \[3, 3600\], not \[B, features\] = \[3, 4\]"),
        ('("layer",)', '("layer", "norm")', "the blocks norm are not among its modules"),
        ('("layer",)', "()", "it names no blocks"),
        ("self.features = 4\n", "self.features = 4\n        self.w = nn.Parameter(torch.ones(1))\n", "no gradient"),
        ("self.features = 4\n", "self.features = 4\n        torch.seed()\n", "two networks of one seed differ"),
        ("return self.layer(x)", "return self.layer(x - x.mean())", "depend on the others of its batch"),
        ("return self.layer(x)", "return self.layer(x.mul_(2))", "it changes its inputs in place"),
        ("'''Mine.'''", "pass", "has no docstring"),
    ],
)
def test_a_wrong_backbone_gets_one_line(write_plugin: Write, right: str, wrong: str, line: str) -> None:
    write_plugin("backbones/mine.py", NET)
    check_backbone(find("backbone", "mine"))
    assert right in NET
    write_plugin("backbones/mine.py", NET.replace(right, wrong))
    with pytest.raises(AssertionError, match=line) as caught:
        check_backbone(find("backbone", "mine"))
    assert len(str(caught.value).splitlines()) == 1
