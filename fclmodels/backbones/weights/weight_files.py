"""Backbone weights from a safetensors file. Other formats become one first (weights_import.py): no run reads them."""

import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import safetensors.torch
from torch import Tensor
from torch.nn.modules.batchnorm import _BatchNorm

from fclmodels.backbones.base import FeatureNet
from fclmodels.backbones.layers.norms import BUFFERS, list_counters
from fclmodels.errors import UserError
from fclmodels.storage.digests import digest_file

CARD = "fclflow"  # in the file's metadata
PICKLED = (".pth", ".pt")
HASH_IN_NAME = re.compile(r"-([0-9a-f]{8})\.safetensors$")
SKIPPED = ("fc.", "head.", "heads.", "pre_logits.", "prompts.")


def load_weights(backbone: FeatureNet, path: Path, fresh: Sequence[str] = ()) -> None:
    """Fill the backbone, except the blocks `fresh`, from a file (in torchvision's, timm's, or a run's names)."""
    fill(backbone, read_tensors(path), path, fresh)


def fill(backbone: FeatureNet, tensors: Mapping[str, Tensor], path: Path, fresh: Sequence[str] = ()) -> None:
    """Fill the backbone from tensors that came from this file; UserError where they do not fit."""
    skipped = (*SKIPPED, *(f"{block}." for block in fresh))
    tensors = backbone.rename_tensors({_strip_prefix(name): tensor for name, tensor in tensors.items()})
    tensors = {name: tensor for name, tensor in tensors.items() if not name.startswith(skipped)}
    for name in _list_unused_statistics(backbone):
        tensors.pop(name, None)
    own = {name: tensor for name, tensor in backbone.state_dict().items() if not name.startswith(skipped)}
    if misfit := _describe_misfit(backbone, own, tensors):
        raise UserError(f"model.weights: {path} does not fit this backbone: {misfit}")
    backbone.load_state_dict(tensors, strict=False)


def refuse_other_settings(path: Path, settings: Mapping[str, Any]) -> None:
    """Raise UserError where a file's card says that its weights are for other settings of the model."""
    for name, value in read_card(path).get("model", {}).items():
        if settings.get(name) != value:
            raise UserError(
                f"model.{name}: {settings.get(name)}, but {path} has weights for {value}. Set model.{name}: {value}."
            )


def read_card(path: Path) -> dict[str, Any]:
    """Return what `fcl weights import` wrote about weights into their file; nothing of other files."""
    try:
        with safetensors.safe_open(path, "pt") as file:
            text = (file.metadata() or {}).get(CARD, "{}")
        card = json.loads(text)
    except (OSError, ValueError, safetensors.SafetensorError) as error:
        raise UserError(f"model.weights: {path} cannot be read ({type(error).__name__}). Is it damaged?") from error
    if not isinstance(card, dict) or not isinstance(card.get("model", {}), dict):
        raise UserError(f"model.weights: {path} has a card that is none. Import its weights anew.")
    return card


def _strip_prefix(name: str) -> str:
    """Return a tensor's name within the backbone, from its name in a run's model or an adapter."""
    return name.removeprefix("/").removeprefix("backbone.").removeprefix("frozen.")


def refuse_missing(path: Path) -> None:
    """Raise UserError, with what gives the file, where it is not there."""
    if not path.is_file():
        raise UserError(f"model.weights: there is no file {path}. {_suggest_remedy(path)}")


def _suggest_remedy(path: Path) -> str:
    """Return what gives a file that is missing; `fcl pretrain` names its own weights.safetensors."""
    other = "give the path of a .safetensors file, or leave it out."
    if path.name == "weights.safetensors":
        return f"`fcl pretrain --out {path.parent}` trains small ones; or {other}"
    return other.capitalize()


def read_tensors(path: Path) -> dict[str, Tensor]:
    """Read the tensors of a .safetensors file by name; a hash in its name must be that of its content."""
    refuse_missing(path)
    if path.suffix in PICKLED:
        raise UserError(f"model.weights: no run reads {path}. Import it once: fcl weights import {path}")
    if path.suffix != ".safetensors":
        raise UserError(f"model.weights: {path} is no file of weights. Give a .safetensors file.")
    try:
        tensors = safetensors.torch.load_file(path)
    except Exception as error:  # a damaged file may raise nearly anything
        raise UserError(f"model.weights: {path} cannot be read ({type(error).__name__}). Is it damaged?") from error
    if (named := HASH_IN_NAME.search(path.name)) and not digest_file(path).startswith(named[1]):
        raise UserError(
            f"model.weights: {path} has another SHA-256 than its name says. It was changed: import it anew."
        )
    return tensors


def _list_unused_statistics(backbone: FeatureNet) -> set[str]:
    """Return running statistics that a file may have for batch norms without statistics."""
    stateless = [name for name, m in backbone.named_modules() if isinstance(m, _BatchNorm) and m.running_mean is None]
    return {f"{name}.{part}" for name in stateless for part in BUFFERS}


def _describe_misfit(backbone: FeatureNet, own: Mapping[str, Tensor], tensors: Mapping[str, Tensor]) -> str | None:
    """Describe how tensors differ from the backbone's own in names and shapes, with examples; None where they fit."""
    # Files from before torch 0.4.1 have no counters; nothing depends on them.
    missing = [name for name in own if name not in tensors and name not in list_counters(backbone)]
    unexpected = [name for name in tensors if name not in own]
    reshaped = [name for name in own if name in tensors and tensors[name].shape != own[name].shape]
    parts = []
    if missing:
        parts.append(f"{missing[0]} is missing{_count_more(missing)}")
    if unexpected:
        parts.append(f"{unexpected[0]} is unknown{_count_more(unexpected)}")
    if name := next(iter(reshaped), None):
        shapes = f"{_format_shape(tensors[name])} in the file and {_format_shape(own[name])} here"
        parts.append(f"{name} is {shapes}{_count_more(reshaped)}")
    hints = [hint for name, hint in backbone.hints.items() if name in missing + reshaped]
    return " ".join(["; ".join(parts) + ".", *hints]) if parts else None


def _count_more(names: list[str]) -> str:
    return f" (and {len(names) - 1} more)" if len(names) > 1 else ""


def _format_shape(tensor: Tensor) -> str:
    return "x".join(map(str, tensor.shape)) or "a single number"
