"""Backbone weights from a file: safetensors, or a state dict as torch saves it, read without unpickling objects."""

from collections.abc import Mapping, Sequence
from pathlib import Path

import safetensors.torch
import torch
from torch import Tensor
from torch.nn.modules.batchnorm import _BatchNorm

from fclmodels.backbones.base import FeatureNet
from fclmodels.backbones.layers.norms import BUFFERS, list_counters
from fclmodels.errors import UserError

SKIPPED = ("fc.", "head.", "heads.", "pre_logits.", "prompts.")


def load_weights(backbone: FeatureNet, path: Path, fresh: Sequence[str] = ()) -> None:
    """Fill the backbone, except the blocks `fresh`, from a state dict (torchvision's, timm's for a vit, or a run's)."""
    skipped = (*SKIPPED, *(f"{block}." for block in fresh))
    tensors = backbone.rename_tensors({_strip_prefix(name): tensor for name, tensor in read_tensors(path).items()})
    tensors = {name: tensor for name, tensor in tensors.items() if not name.startswith(skipped)}
    for name in _list_unused_statistics(backbone):
        tensors.pop(name, None)
    own = {name: tensor for name, tensor in backbone.state_dict().items() if not name.startswith(skipped)}
    if misfit := _describe_misfit(backbone, own, tensors):
        raise UserError(f"model.weights: {path} does not fit this backbone: {misfit}")
    backbone.load_state_dict(tensors, strict=False)


def _strip_prefix(name: str) -> str:
    """Return a tensor's name within the backbone, from its name in a run's model or an adapter."""
    return name.removeprefix("/").removeprefix("backbone.").removeprefix("frozen.")


def _suggest_remedy(path: Path) -> str:
    """Return what gives a file that is missing; `fcl pretrain` names its own weights.safetensors."""
    other = "give the path of a state dict, or leave it out."
    if path.name == "weights.safetensors":
        return f"`fcl pretrain --out {path.parent}` trains small ones; or {other}"
    return other.capitalize()


def read_tensors(path: Path) -> dict[str, Tensor]:
    """Read the tensors of a .safetensors, .pth or .pt file by name."""
    if path.suffix not in (".safetensors", ".pth", ".pt"):
        raise UserError(f"model.weights: {path} is no state dict. Give a .safetensors, .pth or .pt file.")
    if not path.is_file():
        raise UserError(f"model.weights: there is no file {path}. {_suggest_remedy(path)}")
    try:
        if path.suffix == ".safetensors":
            return safetensors.torch.load_file(path)
        content = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # a damaged file may raise nearly anything
        raise UserError(f"model.weights: {path} cannot be read ({type(error).__name__}). Is it damaged?") from error
    if not isinstance(content, Mapping) or not all(isinstance(value, Tensor) for value in content.values()):
        raise UserError(f"model.weights: {path} holds something else than a state dict (names with tensors).")
    return dict(content)


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
