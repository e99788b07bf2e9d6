"""MobileNetV2 and ResNet-50: torchvision's names and outputs, ours for small images, and blocks that may be frozen."""

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from fclmodels.backbones.base import Backbone, FeatureNet
from fclmodels.backbones.mobilenet_v2 import MobileNetV2, round_filters
from fclmodels.backbones.resnet50 import ResNet50
from fclmodels.backbones.weights.weight_files import load_weights
from fclmodels.errors import UserError
from fclmodels.optional.torchvision import import_torchvision
from fclmodels.testing.backbone_checks import check_backbone

KINDS: dict[str, tuple[type[Backbone], str]] = {
    "mobilenet_v2": (MobileNetV2, "classifier"),
    "resnet50": (ResNet50, "fc"),
}


def build(kind: type[Backbone], side: int = 32, **settings: Any) -> FeatureNet:
    return kind(kind.Settings(**settings)).build((3, side, side))


def draw(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


@pytest.fixture(scope="module", params=KINDS)
def reference(request: pytest.FixtureRequest) -> tuple[str, nn.Module]:
    """Torchvision's network, with running statistics and affine parameters that are not 0 and 1."""
    with torch.random.fork_rng():
        torch.manual_seed(1)
        network = getattr(import_torchvision().models, request.param)()
    random = torch.Generator().manual_seed(2)
    for module in network.modules():
        if isinstance(module, nn.BatchNorm2d):
            for tensor in (module.weight, module.bias, module.running_mean, module.running_var):
                tensor.data.uniform_(0.5, 1.0, generator=random)
    return request.param, network.eval()


@pytest.mark.parametrize("side", [32, 57, 96])
def test_torchvisions_file_gives_torchvisions_features(
    reference: tuple[str, nn.Module], side: int, tmp_path: Path
) -> None:
    name, theirs = reference
    kind, head = KINDS[name]
    save_file(theirs.state_dict(), tmp_path / "theirs.safetensors")
    ours = build(kind, side).eval()
    load_weights(ours, tmp_path / "theirs.safetensors")
    layer = theirs.get_submodule(head)
    seen: list[Tensor] = []
    hook = layer.register_forward_pre_hook(lambda _, args: seen.append(args[0]))
    x = draw(2, 3, side, side)
    with torch.no_grad():
        theirs(x)
        torch.testing.assert_close(ours(x), seen[0], rtol=1e-5, atol=1e-5)
    hook.remove()


@pytest.mark.parametrize("width", [0.35, 0.5, 0.75, 1.4])
def test_narrow_and_wide_ones_have_torchvisions_shapes(width: float) -> None:
    theirs = import_torchvision().models.mobilenet_v2(width_mult=width).features.state_dict()
    ours = build(MobileNetV2, width=width)
    assert {n: t.shape for n, t in ours.get_submodule("stages").state_dict().items()} == {
        n: t.shape for n, t in theirs.items()
    }
    assert ours.features == theirs["18.0.weight"].shape[0]


def test_filters_are_multiples_of_eight() -> None:
    assert [round_filters(filters) for filters in (3, 16 * 0.35, 24 * 0.75, 32, 96 * 1.4)] == [8, 8, 24, 32, 136]


@pytest.mark.parametrize(("stride", "map_side"), [(32, 1), (16, 2), (8, 4)])
def test_small_images_may_end_in_a_larger_map(stride: int, map_side: int) -> None:
    network = build(MobileNetV2, width=0.1, stride=stride)
    assert network.run_first(draw(2, 3, 32, 32), 18).shape[2:] == (map_side, map_side)
    assert {n: t.shape for n, t in network.state_dict().items()} == {
        n: t.shape for n, t in build(MobileNetV2, width=0.1).state_dict().items()
    }


def test_a_bottleneck_has_its_stride_where_it_is_said() -> None:
    sides = []
    for stride_in in ("3x3", "1x1"):
        first = build(ResNet50, width=2, stride_in=stride_in).get_submodule("layer2.0.conv1")
        sides.append(first(draw(1, 8, 8, 8)).shape[-1])
    assert sides == [8, 4]
    assert build(ResNet50, width=2, stride_in="1x1")(draw(2, 3, 32, 32)).shape == (2, 64)


@pytest.mark.parametrize("settings", [("mobilenet-v2", "model.width=0.1"), ("resnet50", "model.width=2")])
@pytest.mark.parametrize("shape", [(3, 32, 32), (1, 28, 28)])
def test_keeps_what_a_backbone_keeps(settings: tuple[str, str], shape: tuple[int, ...]) -> None:
    kind = {"mobilenet-v2": MobileNetV2, "resnet50": ResNet50}[settings[0]]
    check_backbone(kind, settings[1], shape=shape)


def test_a_grid_finer_than_the_last_map_is_refused() -> None:
    with pytest.raises(UserError, match=r"model.grid: 32x32 pixels end in a map of 1x1.*Use model.grid: 1"):
        build(ResNet50, grid=2)
