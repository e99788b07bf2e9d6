"""Import of published weights: files of other formats and names become a safetensors file with a hash in its name.

This is the one step that reads pickles, and of them tensors alone (`weights_only=True`). Read are torch's .pth and .pt,
.safetensors, and a folder of TensorFlow.js (model.json with its shards), in torchvision's, timm's or Keras' names. What
comes out has the names of torchvision, or where a backbone has none of these its own, in float32.
"""

import hashlib
import json
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import safetensors.torch
import torch
from torch import Tensor

from fclmodels.backbones.base import FeatureNet
from fclmodels.backbones.weights.keras_names import find_epsilon, is_keras_resnet, translate_keras_resnet
from fclmodels.backbones.weights.weight_files import CARD, PICKLED, fill
from fclmodels.errors import UserError
from fclmodels.storage.digests import digest_file
from fclmodels.storage.files import replace_file

IMAGENET = {"mean": [0.485, 0.456, 0.406], "std": [0.229, 0.224, 0.225]}  # torchvision's, for each of its weights
MODEL = "model.json"
PUBLISHED_HASH = re.compile(r"-([0-9a-f]{8})\.(?:pth|pt|safetensors)$")
Tensors = Mapping[str, Tensor]


class Imported(NamedTuple):
    """Tensors by torchvision's or a backbone's own names, and what is to be said of them."""

    tensors: dict[str, Tensor]
    names: str
    model: dict[str, Any]  # settings that they need


def import_weights(source: Path, backbone: FeatureNet, name: str, folder: Path) -> Path:
    """Write the weights of a source for a backbone of this name into folder/NAME-HASH.safetensors; return its path."""
    tensors, card = convert(source, name)
    fill(backbone, tensors, source)
    return write_weights(tensors, card, folder, name)


def convert(source: Path, name: str) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Return the tensors of a source for a backbone of this name, in float32, and their card."""
    imported = translate(read_source(source), name, find_epsilon(source / MODEL) if source.is_dir() else None)
    tensors = {n: (t.float() if t.is_floating_point() else t).contiguous() for n, t in imported.tensors.items()}
    if broken := [n for n, t in tensors.items() if not t.isfinite().all()]:
        raise UserError(f"fcl weights: {source} has numbers in {broken[0]} that are not finite. Take another file.")
    files = sorted(source.iterdir()) if source.is_dir() else [source]
    card = {
        "sources": {file.name: digest_file(file) for file in files},
        "names": imported.names,
        "model": {"backbone": name, **imported.model},
    }
    return tensors, card


def write_weights(tensors: dict[str, Tensor], card: Mapping[str, Any], folder: Path, stem: str) -> Path:
    """Write tensors and their card into a file whose name ends in the first digits of its SHA-256; return its path."""
    content = safetensors.torch.save(tensors, {CARD: json.dumps(card, sort_keys=True)})
    path = folder / f"{stem}-{hashlib.sha256(content).hexdigest()[:8]}.safetensors"
    folder.mkdir(parents=True, exist_ok=True)
    with replace_file(path) as temporary:
        temporary.write_bytes(content)
    return path


def read_source(source: Path) -> dict[str, Tensor]:
    """Return the tensors of a file or folder by name; UserError where it cannot be read."""
    if not source.exists():
        raise UserError(f"fcl weights: there is no {source}. Give a file, a folder, torchvision or timm.")
    if (published := PUBLISHED_HASH.search(source.name)) and not digest_file(source).startswith(published[1]):
        raise UserError(f"fcl weights: {source} has another SHA-256 than its name says. Fetch it anew.")
    readers: dict[str, Callable[[Path], Any]] = {
        **dict.fromkeys(PICKLED, _load_pickled),
        ".safetensors": safetensors.torch.load_file,
    }
    reader = read_layers_model if source.is_dir() else readers.get(source.suffix)
    if reader is None:
        raise UserError(
            f"fcl weights: {source} is no file of weights. Read are .safetensors, .pth, .pt, and a folder of "
            "TensorFlow.js."
        )
    try:
        content = reader(source)
    except UserError:
        raise
    except Exception as error:  # a damaged file may raise nearly anything
        raise UserError(f"fcl weights: {source} cannot be read ({type(error).__name__}). Is it damaged?") from error
    if not isinstance(content, Mapping) or not all(isinstance(value, Tensor) for value in content.values()):
        raise UserError(f"fcl weights: {source} holds something else than a state dict (names with tensors).")
    return dict(content)


def _load_pickled(source: Path) -> Any:
    return torch.load(source, map_location="cpu", weights_only=True)


def read_layers_model(folder: Path) -> dict[str, Tensor]:
    """Return the tensors of a model as TensorFlow.js has it: model.json says which, their numbers lie in shards."""
    tensors = {}
    for group in json.loads((folder / MODEL).read_text())["weightsManifest"]:
        if any(Path(shard).name != shard for shard in group["paths"]):
            raise UserError(f"fcl weights: {folder / MODEL} names a shard that is not in its folder.")
        numbers, start = b"".join((folder / shard).read_bytes() for shard in group["paths"]), 0
        for entry in group["weights"]:
            if entry["dtype"] != "float32" or "quantization" in entry:
                raise UserError(
                    f"fcl weights: {entry['name']} in {folder} is not in float32. Take unquantised weights."
                )
            count = int(np.prod(entry["shape"]))
            flat = np.frombuffer(numbers, "<f4", count, start)
            tensors[entry["name"]] = torch.from_numpy(flat.reshape(entry["shape"]).copy())
            start += 4 * count
        if start != len(numbers):
            raise UserError(f"fcl weights: the shards of {folder} have {len(numbers)} bytes, its weights {start}.")
    return tensors


def translate(tensors: Tensors, backbone: str, epsilon: float | None = None) -> Imported:
    """Return tensors by torchvision's names. epsilon: of Keras' batch normalisation, where it is on record."""
    if backbone == "resnet50" and is_keras_resnet(tensors):
        translated = translate_keras_resnet(tensors, epsilon, IMAGENET["mean"], IMAGENET["std"])
        return Imported(translated, "keras", {"stride_in": "1x1"})
    if backbone == "mobilenet-v2" and "conv_stem.weight" in tensors:
        return Imported(translate_timm_mobilenet(tensors), "timm", {})
    return Imported(dict(tensors), "as in the source", {})


TIMM_LAYERS = {  # of an inverted residual: its layers in their order, by timm's names
    True: ("conv_pw", "bn1", "conv_dw", "bn2", "conv_pwl", "bn3"),
    False: ("conv_dw", "bn1", "conv_pw", "bn2"),  # of the first one, which does not widen
}
TIMM_ENDS = {"conv_stem": "features.0.0", "bn1": "features.0.1", "conv_head": "features.18.0", "bn2": "features.18.1"}
TORCHVISION_LAYERS = {
    True: ("conv.0.0", "conv.0.1", "conv.1.0", "conv.1.1", "conv.2", "conv.3"),
    False: ("conv.0.0", "conv.0.1", "conv.1", "conv.2"),
}


def translate_timm_mobilenet(tensors: Tensors) -> dict[str, Tensor]:
    """Return the tensors of timm's mobilenetv2 by torchvision's names: it counts blocks by their stage."""
    pattern = re.compile(r"blocks\.(\d+)\.(\d+)\.(\w+)\.(\w+)")
    matched = {name: match for name in tensors if (match := pattern.fullmatch(name))}
    order = sorted({(int(match[1]), int(match[2])) for match in matched.values()})
    translated = {}
    for name, tensor in tensors.items():
        if match := matched.get(name):
            place = order.index((int(match[1]), int(match[2])))
            layer = dict(zip(TIMM_LAYERS[place > 0], TORCHVISION_LAYERS[place > 0], strict=True)).get(
                match[3], match[3]
            )
            translated[f"features.{place + 1}.{layer}.{match[4]}"] = tensor
        else:
            layer, _, part = name.rpartition(".")
            translated[f"{TIMM_ENDS.get(layer, layer)}.{part}"] = tensor
    return {name.replace("classifier.", "classifier.1.", 1): tensor for name, tensor in translated.items()}
