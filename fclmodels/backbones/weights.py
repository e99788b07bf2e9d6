"""Backbone weights from a file: safetensors, or a state dict as torch saves it, read without unpickling objects."""

from collections.abc import Mapping, Sequence
from pathlib import Path

import safetensors.torch
import torch
from torch import Tensor
from torch.nn.modules.batchnorm import _BatchNorm

from fclmodels.backbones.base import FeatureNet
from fclmodels.backbones.norms import BUFFERS, counter_names
from fclmodels.errors import UserError

PASSED_OVER = ("fc.", "head.", "heads.", "prompts.")


def load_weights(backbone: FeatureNet, path: Path, fresh: Sequence[str] = ()) -> None:
    """Fill the backbone, but for the blocks `fresh`, from a state dict of its own names (torchvision's, or a run's)."""
    passed_over = (*PASSED_OVER, *(f"{block}." for block in fresh))
    read = backbone.own_names({_below(name): tensor for name, tensor in read_tensors(path).items()})
    given = {name: tensor for name, tensor in read.items() if not name.startswith(passed_over)}
    for name in _unused_statistics(backbone):
        given.pop(name, None)
    wanted = {name: tensor for name, tensor in backbone.state_dict().items() if not name.startswith(passed_over)}
    if misfit := _misfit(backbone, wanted, given):
        raise UserError(f"model.weights: {path} does not fit this backbone: {misfit}")
    backbone.load_state_dict(given, strict=False)


def _below(name: str) -> str:
    """A tensor's name within the backbone, where a run's model has it as its network's or as a frozen one's."""
    return name.removeprefix("/").removeprefix("backbone.").removeprefix("frozen.")


def read_tensors(path: Path) -> dict[str, Tensor]:
    """The tensors of a .safetensors, .pth or .pt file by name."""
    if path.suffix not in (".safetensors", ".pth", ".pt"):
        raise UserError(f"model.weights: {path} is no state dict. Give a .safetensors, .pth or .pt file.")
    if not path.is_file():
        raise UserError(f"model.weights: there is no file {path}. Give the path of a state dict, or leave it out.")
    try:
        if path.suffix == ".safetensors":
            return safetensors.torch.load_file(path)
        read = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # a damaged file can raise nearly anything
        raise UserError(f"model.weights: {path} cannot be read ({type(error).__name__}). Is it damaged?") from error
    if not isinstance(read, Mapping) or not all(isinstance(value, Tensor) for value in read.values()):
        raise UserError(f"model.weights: {path} holds something else than a state dict (names with tensors).")
    return dict(read)


def _unused_statistics(backbone: FeatureNet) -> set[str]:
    """Running statistics that a file may have for batch norms which keep none."""
    stateless = [name for name, m in backbone.named_modules() if isinstance(m, _BatchNorm) and m.running_mean is None]
    return {f"{name}.{part}" for name in stateless for part in BUFFERS}


def _misfit(backbone: FeatureNet, wanted: Mapping[str, Tensor], given: Mapping[str, Tensor]) -> str | None:
    """What keeps the given tensors from being the backbone's wanted ones, each kind with its first example."""
    # Files from before torch 0.4.1 have no counters; nothing depends on them.
    missing = [name for name in wanted if name not in given and name not in counter_names(backbone)]
    unexpected = [name for name in given if name not in wanted]
    other = [name for name in wanted if name in given and given[name].shape != wanted[name].shape]
    parts = []
    if missing:
        parts.append(f"{missing[0]} is missing{_more(missing)}")
    if unexpected:
        parts.append(f"{unexpected[0]} is unknown{_more(unexpected)}")
    if other:
        here, there = (_shape(tensors[other[0]]) for tensors in (wanted, given))
        parts.append(f"{other[0]} is {there} in the file and {here} here{_more(other)}")
    hints = [hint for name, hint in backbone.hints.items() if name in missing + other]
    return " ".join(["; ".join(parts) + ".", *hints]) if parts else None


def _more(names: list[str]) -> str:
    return f" (and {len(names) - 1} more)" if len(names) > 1 else ""


def _shape(tensor: Tensor) -> str:
    return "x".join(map(str, tensor.shape)) or "a single number"
