"""Published weights of other formats and names: what comes out computes the same, and nothing of theirs is run."""

import hashlib
import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.nn import functional as F

from fclmodels.backbones.mobilenet_v2 import MobileNetV2
from fclmodels.backbones.model.network import build_network, build_skeleton
from fclmodels.backbones.model.spec import ModelSpec
from fclmodels.backbones.weights import weights_import
from fclmodels.backbones.weights.keras_names import MEANS
from fclmodels.backbones.weights.norm_statistics import estimate_statistics
from fclmodels.backbones.weights.weight_files import read_card, read_tensors
from fclmodels.backbones.weights.weights_import import import_weights, read_source, translate
from fclmodels.errors import UserError

NARROW = {"backbone": "mobilenet-v2", "width": 0.1}


def spec_of(**settings: Any) -> ModelSpec:
    return ModelSpec(NARROW | settings, (3, 32, 32), "growing", ((0, 1),))


def draw_state(seed: int = 1, **settings: Any) -> dict[str, Tensor]:
    """A narrow backbone's tensors by its own names, none of them 0 or 1."""
    backbone, random = build_skeleton(spec_of(**settings)).backbone, torch.Generator().manual_seed(seed)
    return {
        name: tensor if not tensor.is_floating_point() else torch.rand(tensor.shape, generator=random) + 0.5
        for name, tensor in backbone.state_dict().items()
    }


def to_torchvision(state: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name.replace("stages.", "features."): tensor for name, tensor in state.items()}


@pytest.mark.parametrize("suffix", [".pth", ".pt", ".safetensors"])
def test_a_file_becomes_safetensors_with_a_hash_and_a_card(tmp_path: Path, suffix: str) -> None:
    state = to_torchvision(draw_state())
    half = {name: tensor.half() if tensor.is_floating_point() else tensor for name, tensor in state.items()}
    source = tmp_path / f"w{suffix}"
    save_file(half, source) if suffix == ".safetensors" else torch.save(half, source)
    path = import_weights(source, build_skeleton(spec_of()).backbone, "mobilenet-v2", tmp_path / "out")
    sha256 = hashlib.sha256(path.read_bytes()).hexdigest()
    assert path == tmp_path / "out" / f"mobilenet-v2-{sha256[:8]}.safetensors"
    card = read_card(path)
    assert card["sources"] == {source.name: hashlib.sha256(source.read_bytes()).hexdigest()}
    assert card["model"] == {"backbone": "mobilenet-v2"}
    tensors = read_tensors(path)
    assert all(torch.equal(tensors[name], tensor.to(tensors[name])) for name, tensor in half.items())
    loaded = build_network(spec_of(weights=str(path)), torch.Generator()).backbone.state_dict()
    assert all(torch.equal(loaded[name.replace("features.", "stages.")], tensors[name]) for name in tensors)


def test_a_file_that_was_changed_is_refused(tmp_path: Path) -> None:
    save_file(to_torchvision(draw_state()), tmp_path / "w.safetensors")
    path = import_weights(tmp_path / "w.safetensors", build_skeleton(spec_of()).backbone, "mobilenet-v2", tmp_path)
    content = bytearray(path.read_bytes())
    content[-3] ^= 1
    path.write_bytes(content)
    with pytest.raises(UserError, match="has another SHA-256 than its name says"):
        build_network(spec_of(weights=str(path)), torch.Generator())
    published = tmp_path / "mobilenet_v2-00000000.pth"
    torch.save(draw_state(), published)
    with pytest.raises(UserError, match=r"00000000\.pth has another SHA-256 .* Fetch it anew"):
        read_source(published)


class Bomb:
    def __init__(self, folder: str) -> None:
        self.folder = folder

    def __reduce__(self) -> Any:
        return os.mkdir, (self.folder,)


def test_a_file_with_code_in_it_is_refused_and_the_code_not_run(tmp_path: Path) -> None:
    torch.save({"conv1.weight": Bomb(str(tmp_path / "ran"))}, tmp_path / "w.pth")
    with pytest.raises(UserError, match="cannot be read"):
        read_source(tmp_path / "w.pth")
    assert not (tmp_path / "ran").exists()


UNREADABLE: dict[str, tuple[str, Any, str]] = {
    "absent": ("w.pth", None, "there is no"),
    "other kind": ("w.zip", b"PK", "is no file of weights. Read are"),
    "damaged pth": ("w.pth", b"\x80\x02garbage", "cannot be read"),
    "empty pth": ("w.pth", b"", "cannot be read"),
    "a list": ("w.pth", [1, 2], "holds something else"),
    "a training's state": ("w.pth", {"state_dict": {"x": torch.zeros(1)}, "epoch": 3}, "holds something else"),
    "not finite": ("w.pth", {"x": torch.tensor([1.0, torch.nan])}, "numbers in x that are not finite"),
    "of another network": ("w.pth", {"x": torch.ones(1)}, "does not fit this backbone: .* x is unknown"),
}


@pytest.mark.parametrize("case", UNREADABLE)
def test_what_cannot_be_imported_is_refused_in_one_line(tmp_path: Path, case: str) -> None:
    name, content, message = UNREADABLE[case]
    if isinstance(content, bytes):
        (tmp_path / name).write_bytes(content)
    elif content is not None:
        torch.save(content, tmp_path / name)
    with pytest.raises(UserError, match=message) as refused:
        import_weights(tmp_path / name, build_skeleton(spec_of()).backbone, "mobilenet-v2", tmp_path / "out")
    assert "\n" not in str(refused.value)
    assert not (tmp_path / "out").exists()


# timm's names.


def test_timms_mobilenet_is_torchvisions_by_other_names() -> None:
    """timm's listed by hand from its definition: stages of 1, 2, 3, 4, 3, 3, 1 blocks, the first without widening."""
    theirs = {"conv_stem": "0.0", "bn1": "0.1", "conv_head": "18.0", "bn2": "18.1"}
    of_torchvision = ["conv.0.0", "conv.0.1", "conv.1.0", "conv.1.1", "conv.2", "conv.3"]
    of_timm = ["conv_pw", "bn1", "conv_dw", "bn2", "conv_pwl", "bn3"]
    place = 1
    for stage, blocks in enumerate((1, 2, 3, 4, 3, 3, 1)):
        for block in range(blocks):
            pairs = list(zip(of_timm, of_torchvision, strict=True))
            if stage == 0:
                pairs = [("conv_dw", "conv.0.0"), ("bn1", "conv.0.1"), ("conv_pw", "conv.1"), ("bn2", "conv.2")]
            theirs |= {f"blocks.{stage}.{block}.{timm}": f"{place}.{own}" for timm, own in pairs}
            place += 1
    state = draw_state()
    by_layer = {own: timm for timm, own in theirs.items()}
    renamed = {}
    for name, tensor in state.items():
        layer, _, part = name.removeprefix("stages.").rpartition(".")
        renamed[f"{by_layer[layer]}.{part}"] = tensor
    head = {"classifier.weight": torch.ones(3, 1280), "classifier.bias": torch.ones(3)}
    imported = translate(renamed | head, "mobilenet-v2")
    assert imported.names == "timm"
    backbone = build_skeleton(spec_of()).backbone
    own = backbone.rename_tensors(imported.tensors)
    assert own.keys() == state.keys()
    assert all(torch.equal(own[name], state[name]) for name in state)
    assert imported.tensors["classifier.1.weight"].shape == (3, 1280)


# Keras' names.

KERAS = {"backbone": "resnet50", "width": 2, "stride_in": "1x1"}
LETTERS = "abcdef"


def name_keras(stage: int, block: int, place: int, new: bool, norm: bool) -> str:
    if new:
        return f"conv{stage}_block{block + 1}_{place}_{'bn' if norm else 'conv'}"
    branch = f"2{LETTERS[place - 1]}" if place else "1"
    return f"{'bn' if norm else 'res'}{stage}{LETTERS[block]}_branch{branch}"


def draw_keras(new: bool) -> dict[str, Tensor]:
    """Weights of a narrow ResNet-50 as Keras has it: filters last, biases of convolutions, channels blue first."""
    random, tensors = torch.Generator().manual_seed(0), {}

    def draw(layer: str, kernel: int, inputs: int, outputs: int) -> None:
        tensors[f"{layer}/kernel"] = (
            torch.randn(kernel, kernel, inputs, outputs, generator=random) * inputs**-0.5 / kernel
        )
        tensors[f"{layer}/bias"] = torch.randn(outputs, generator=random)

    def draw_norm(layer: str, outputs: int) -> None:
        for part in ("gamma", "moving_variance"):
            tensors[f"{layer}/{part}"] = torch.rand(outputs, generator=random) * 0.01 + 0.5
        for part in ("beta", "moving_mean"):
            tensors[f"{layer}/{part}"] = torch.randn(outputs, generator=random)

    draw("conv1_conv" if new else "conv1", 7, 3, 2)
    draw_norm("conv1_bn" if new else "bn_conv1", 2)
    inputs = 2
    for stage, blocks in zip(range(2, 6), (3, 4, 6, 3), strict=True):
        width = 2 ** (stage - 1)
        for block in range(blocks):
            sizes = [(1, inputs, width), (3, width, width), (1, width, 4 * width)]
            layers = list(enumerate(sizes, start=1)) + ([(0, (1, inputs, 4 * width))] if block == 0 else [])
            for place, size in layers:
                draw(name_keras(stage, block, place, new, norm=False), *size)
                draw_norm(name_keras(stage, block, place, new, norm=True), size[2])
            inputs = 4 * width
    head = "predictions" if new else "fc1000"
    return {**tensors, f"{head}/kernel": torch.ones(inputs, 5), f"{head}/bias": torch.ones(5)}


def run_keras(tensors: dict[str, Tensor], pixels: Tensor, new: bool, epsilon: float) -> Tensor:
    """What Keras computes from pixels 0..255 [B, 3, H, W], red first, up to the mean over the last map."""

    def convolve(layer: str, x: Tensor, stride: int = 1, padding: int = 0) -> Tensor:
        kernel = tensors[f"{layer}/kernel"].permute(3, 2, 0, 1)
        return F.conv2d(x, kernel, tensors[f"{layer}/bias"], stride, padding)

    def normalise(layer: str, x: Tensor) -> Tensor:
        gamma, beta, mean, variance = (
            tensors[f"{layer}/{part}"].view(-1, 1, 1) for part in ("gamma", "beta", "moving_mean", "moving_variance")
        )
        return gamma * (x - mean) / (variance + epsilon).sqrt() + beta

    x = pixels.flip(1) - torch.tensor(MEANS).view(3, 1, 1)
    x = normalise("conv1_bn" if new else "bn_conv1", convolve("conv1_conv" if new else "conv1", x, 2, 3))
    x = F.max_pool2d(x.relu(), 3, 2, 1)
    for stage, blocks in zip(range(2, 6), (3, 4, 6, 3), strict=True):
        for block in range(blocks):
            first = 2 if stage > 2 and block == 0 else 1
            out = x
            for place, (stride, padding) in enumerate([(first, 0), (1, 1), (1, 0)], start=1):
                convolved = convolve(name_keras(stage, block, place, new, False), out, stride, padding)
                out = normalise(name_keras(stage, block, place, new, True), convolved)
                out = out.relu() if place < 3 else out
            if block == 0:
                x = convolve(name_keras(stage, block, 0, new, False), x, first)
                x = normalise(name_keras(stage, block, 0, new, True), x)
            x = (x + out).relu()
    return x.mean((2, 3))


@pytest.mark.parametrize(("new", "epsilon"), [(False, 1e-3), (True, 1.001e-5)])
def test_keras_resnet_has_the_same_features(
    new: bool, epsilon: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At a mean that is Keras' own, to rounding; ImageNet's usual one shifts a picture's padding by 0.5 of 255."""
    tensors = draw_keras(new)
    pixels = torch.randint(256, (2, 3, 64, 64), generator=torch.Generator().manual_seed(1)).float()
    right = run_keras(tensors, pixels, new, epsilon)
    std = [0.229, 0.224, 0.225]
    for mean, deviation in (([m / 255 for m in reversed(MEANS)], 1e-4), ([0.485, 0.456, 0.406], 0.05)):
        monkeypatch.setitem(weights_import.IMAGENET, "mean", mean)
        imported = translate(tensors, "resnet50")
        assert (imported.names, imported.model) == ("keras", {"stride_in": "1x1"})
        spec = ModelSpec(KERAS, (3, 64, 64), "growing", ((0,),))
        ours = build_skeleton(spec).backbone.eval()
        weights_import.fill(ours, imported.tensors, tmp_path)
        x = (pixels / 255 - torch.tensor(mean).view(3, 1, 1)) / torch.tensor(std).view(3, 1, 1)
        with torch.no_grad():
            assert float((ours(x) - right).abs().max() / right.abs().max()) < deviation


def write_layers_model(folder: Path, tensors: dict[str, Tensor], **changes: Any) -> None:
    """As TensorFlow.js writes it, in two shards that cut a tensor."""
    folder.mkdir()
    numbers = b"".join(np.asarray(tensor, "<f4").tobytes() for tensor in tensors.values())
    (folder / "a.bin").write_bytes(numbers[:101])
    (folder / "b.bin").write_bytes(numbers[101:] + changes.get("more", b""))
    weights = [
        {"name": name, "shape": list(tensor.shape), "dtype": "float32", **changes.get("entry", {})}
        for name, tensor in tensors.items()
    ]
    manifest = [{"paths": changes.get("paths", ["a.bin", "b.bin"]), "weights": weights}]
    topology = {"layers": [{"epsilon": epsilon} for epsilon in changes.get("epsilons", [0.001])]}
    (folder / "model.json").write_text(json.dumps({"modelTopology": topology, "weightsManifest": manifest}))


def test_a_folder_of_tensorflow_js_is_imported_with_its_epsilon(tmp_path: Path) -> None:
    tensors = draw_keras(new=False)
    for name, epsilons, added in (("a", [0.002], 0.002), ("b", [0.002, 0.003], 1e-3)):
        write_layers_model(tmp_path / name, tensors, epsilons=epsilons)
        spec = ModelSpec(KERAS, (3, 64, 64), "growing", ((0,),))
        path = import_weights(tmp_path / name, build_skeleton(spec).backbone, "resnet50", tmp_path)
        variance = tensors["bn_conv1/moving_variance"] + added - 1e-5
        torch.testing.assert_close(load_file(path)["bn1.running_var"], variance)
        assert set(read_card(path)["sources"]) == {"a.bin", "b.bin", "model.json"}
    with pytest.raises(UserError, match=r"model.stride_in: 3x3, but .* has weights for 1x1. Set model.stride_in: 1x1"):
        build_network(
            ModelSpec(KERAS | {"stride_in": "3x3", "weights": str(path)}, (3, 64, 64), "growing", ((0,),)),
            torch.Generator(),
        )


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"paths": ["a.bin", "../b.bin"]}, "names a shard that is not in its folder"),
        ({"entry": {"dtype": "uint8"}}, "is not in float32"),
        ({"entry": {"quantization": {"scale": 1}}}, "is not in float32"),
        ({"more": b"1234"}, "its weights 24"),
        ({"paths": ["a.bin"]}, "cannot be read"),
    ],
)
def test_a_folder_that_is_wrong_is_refused(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    write_layers_model(tmp_path / "model", {"x": torch.ones(2, 30)}, **changes)
    with pytest.raises(UserError, match=message):
        read_source(tmp_path / "model")


# Statistics estimated anew.


def test_statistics_are_the_means_over_batches() -> None:
    """Of the first layer by NumPy; of the second behind a first one that is normalised by each batch."""
    network = MobileNetV2(MobileNetV2.Settings(width=0.1)).build((3, 32, 32))
    x = torch.randn(24, 3, 32, 32, generator=torch.Generator().manual_seed(0)) + 1
    before = {name: tensor.clone() for name, tensor in network.named_parameters()}
    assert estimate_statistics(network, x.split(8)) == 24
    stem, norm = network.get_submodule("stages.0.0"), network.get_submodule("stages.0.1")
    maps = [stem(part).detach().numpy() for part in x.split(8)]
    np.testing.assert_allclose(norm.running_mean, np.mean([m.mean((0, 2, 3)) for m in maps], 0), atol=1e-5)
    np.testing.assert_allclose(norm.running_var, np.mean([m.var((0, 2, 3), ddof=1) for m in maps], 0), rtol=1e-4)
    assert all(torch.equal(tensor, before[name]) for name, tensor in network.named_parameters())
    assert norm.momentum == 0.1
    assert not any(module.training for module in network.modules())
    deeper, after = network.get_submodule("stages.1.conv.0.0"), network.get_submodule("stages.1.conv.0.1")
    ahead = [F.relu6(F.batch_norm(stem(part), None, None, norm.weight, norm.bias, True)) for part in x.split(8)]
    means = [deeper(part).mean((0, 2, 3)).detach() for part in ahead]
    torch.testing.assert_close(after.running_mean, torch.stack(means).mean(0), rtol=1e-4, atol=1e-5)


def test_without_statistics_nothing_is_estimated() -> None:
    network = MobileNetV2(MobileNetV2.Settings(width=0.1, norm="group")).build((3, 32, 32))
    with pytest.raises(UserError, match="has no running statistics"):
        estimate_statistics(network, [torch.zeros(1, 3, 32, 32)])
