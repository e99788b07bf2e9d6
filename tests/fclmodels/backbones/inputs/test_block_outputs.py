"""Outputs of named blocks: of every backbone, with gradients, and without an effect on the network."""

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from fclmodels.backbones.inputs.block_outputs import capture_block_outputs
from fclmodels.backbones.model.network import Network, build_network
from fclmodels.backbones.model.spec import ModelSpec
from fclmodels.plugins import load_all

SETTINGS = {
    "mlp": {"hidden": 7, "dropout": [0, 0]},
    "cnn": {"width": 3, "features": 5},
    "mobilenet_v2": {"width": 0.1},
    "resnet18": {"width": 2, "stem": "cifar"},
    "resnet50": {"width": 2, "stem": "cifar"},
    "alexnet": {},
    "vit": {"patch": 8, "width": 8, "depth": 2, "attention_heads": 2, "mlp_width": 9},
    "convit": {"patch": 8, "width": 8, "depth": 2, "attention_heads": 2},
    "swin_t": {},
    "transformer": {},
}


def build(name: str, encoder: Path) -> tuple[Network, Tensor]:
    """A small network of this kind, in evaluation mode, and three samples."""
    settings, shape = {"backbone": name, **SETTINGS[name.replace("-", "_")]}, (3, 32, 32)
    if name == "transformer":
        settings, shape = settings | {"folder": str(encoder), "weights": None}, (2, 8)
    network = build_network(ModelSpec(settings, shape, "growing", ((0, 1),)), torch.Generator().manual_seed(0)).eval()
    if name == "transformer":
        texts = torch.randint(1, 20, (3, *shape), generator=torch.Generator().manual_seed(1))
        texts[:, 1] = 1
        return network, texts
    return network, torch.randn(3, *shape, generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("name", sorted(set(load_all("backbone")) - {"noisy"}))
def test_every_backbone_gives_all_of_its_blocks_and_its_features_stay_the_same(name: str, encoder: Path) -> None:
    network, x = build(name, encoder)
    backbone = network.backbone
    before = backbone(x)
    with capture_block_outputs(backbone, backbone.blocks) as outputs:
        features = backbone(x)
    assert outputs.keys() == set(backbone.blocks)
    assert all(len(output) == len(x) and output.isfinite().all() for output in outputs.values())
    assert torch.equal(features, before)
    parameters = [p for p in backbone.parameters() if p.requires_grad]
    through = torch.autograd.grad(
        sum(output.square().sum() for output in outputs.values()), parameters, allow_unused=True
    )
    assert any(gradient is not None and gradient.any() for gradient in through)
    with capture_block_outputs(backbone, []) as nothing:
        backbone(x)
    assert not nothing


def test_an_output_is_what_the_block_returns_though_a_relu_works_in_place() -> None:
    network, x = build("mlp", Path())
    backbone = network.backbone
    with capture_block_outputs(backbone, ["fc1", "fc2"]) as outputs:
        backbone(x)
    first = nn.functional.linear(x.flatten(1), backbone.fc1.weight, backbone.fc1.bias)
    torch.testing.assert_close(outputs["fc1"], first)
    assert (outputs["fc1"] < 0).any()
    torch.testing.assert_close(
        outputs["fc2"], nn.functional.linear(first.relu(), backbone.fc2.weight, backbone.fc2.bias)
    )


def test_maps_come_with_channels_first() -> None:
    network, x = build("swin-t", Path())
    with capture_block_outputs(network.backbone, ["norm"]) as outputs:
        features = network.backbone(x)
    assert outputs["norm"].shape == (3, 768, 1, 1)
    torch.testing.assert_close(outputs["norm"].mean((2, 3)), features)


def test_the_gradient_of_a_distance_between_two_networks_is_that_of_autograd() -> None:
    network, x = build("cnn", Path())
    backbone = network.backbone
    with capture_block_outputs(backbone, ["conv2"]) as outputs:
        backbone(x)
        distance = (outputs["conv2"] - 1).square().mean()
    (mine,) = torch.autograd.grad(distance, [backbone.conv1.weight])
    by_hand = backbone.conv2(backbone.relu(backbone.pool(backbone.conv1(x))))
    (expected,) = torch.autograd.grad((by_hand - 1).square().mean(), [backbone.conv1.weight])
    torch.testing.assert_close(mine, expected)


def test_of_an_adapted_backbone_they_are_those_of_the_pass_with_prompts() -> None:
    settings = {"backbone": "vit", **SETTINGS["vit"]}
    adapter = {"kind": "l2p", "length": 2}
    spec = ModelSpec(settings, (3, 32, 32), "growing", ((0, 1),), adapter)
    network = build_network(spec, torch.Generator().manual_seed(0)).eval()
    x = torch.randn(3, 3, 32, 32, generator=torch.Generator().manual_seed(1))
    with capture_block_outputs(network.backbone, ["layers.0"]) as outputs:
        network.backbone(x)
    assert outputs["layers.0"].requires_grad  # the query, a pass before it, has no gradient


def test_what_is_no_block_is_refused_by_name() -> None:
    network, _ = build("cnn", Path())
    with (
        pytest.raises(ValueError, match=r"conv3 is not a block of CnnNet. Did you mean conv2\?"),
        capture_block_outputs(network.backbone, ["conv3"]),
    ):
        pass


def test_after_it_nothing_is_noted_even_if_the_pass_failed() -> None:
    network, x = build("cnn", Path())
    with pytest.raises(RuntimeError), capture_block_outputs(network.backbone, ["conv1"]):
        network.backbone(x[:, :1])
    with capture_block_outputs(network.backbone, ["conv2"]) as outputs:
        network.backbone(x)
    assert outputs.keys() == {"conv2"}
