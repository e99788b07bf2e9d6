"""A backbone and its heads as one network, built from a spec and a seed."""

from collections.abc import Callable, Mapping
from pathlib import Path

import torch
from torch import Tensor, nn

from fclmodels.backbones.adapters import Adapted, adapt
from fclmodels.backbones.base import FeatureNet
from fclmodels.backbones.heads import HEADS, Heads
from fclmodels.backbones.published import file_of
from fclmodels.backbones.spec import ModelSpec
from fclmodels.backbones.weights import load_weights
from fclmodels.errors import UserError, did_you_mean
from fclmodels.kinds import kind_of
from fclmodels.plugins import find
from fclmodels.randomness import ambient

# Tensors of a backbone that a method has attached something to: they never change and never travel.
FROZEN = "backbone.frozen."


class Network(nn.Module):
    """Inputs to features [B, F] to logits; tensors are named `backbone.*` and `heads.<i>.weight|bias`.

    Where a method attaches an adapter, those of the backbone itself are `backbone.frozen.*`, its own
    `backbone.prompts.*`.
    """

    def __init__(self, spec: ModelSpec, backbone: FeatureNet, heads: Heads) -> None:
        super().__init__()
        self.spec = spec
        self.backbone = backbone
        self.heads = heads

    def logits(self, features: Tensor, task: int | None = None) -> Tensor:
        """[B, classes of the task] in the task's order; without a task [B, labels seen] in label order."""
        logits: Tensor = self.heads(features, task)
        return logits

    def forward(self, x: Tensor, task: int | None = None) -> Tensor:
        return self.logits(self.backbone(x), task)


def build(spec: ModelSpec, generator: torch.Generator) -> Network:
    """The network that learning starts from: drawn, or its backbone read from `model.weights`.

    Only the generator's seed is used: it is neither read further nor moved, and neither is torch's own.
    """
    network = _assemble(spec, generator.initial_seed())
    frozen_names(spec, network)
    fresh = blocks(spec, network, "fresh")
    if weights := spec.settings.get("weights"):
        backbone = network.backbone.frozen if isinstance(network.backbone, Adapted) else network.backbone
        load_weights(backbone, file_of(Path(weights), spec.settings["backbone"]), fresh)
    return network


def skeleton(spec: ModelSpec) -> Network:
    """A network of this architecture whose own weights mean nothing: for those that are loaded into it."""
    return _assemble(spec, seed=0)


def frozen_names(spec: ModelSpec, network: Network) -> set[str]:
    """Names of the parameters and buffers in the blocks that `model.freeze` names."""
    prefixes = tuple(f"backbone.{block}." for block in blocks(spec, network, "freeze"))
    return {name for name in network.state_dict() if name.startswith(prefixes)}


def blocks(spec: ModelSpec, network: Network, setting: str) -> tuple[str, ...]:
    """The blocks of the backbone that a setting of `model` names."""
    there = network.backbone.blocks
    for block in spec.settings.get(setting, ()):
        if block not in there:
            name = spec.settings["backbone"]
            raise UserError(f"model.{setting}: {block} is not a block of {name}. {did_you_mean(block, there)}")
    return tuple(spec.settings.get(setting, ()))


def misfit(spec: ModelSpec, weights: Mapping[str, Tensor], may_lack: Callable[[str], bool]) -> str | None:
    """The first tensor that keeps these weights from being a network's of this spec, if there is one.

    None is made for that: a spec may ask for more than there is memory for.
    """
    wanted, found = _shapes(spec), {name: tuple(tensor.shape) for name, tensor in weights.items()}
    right = {name: shape for name, shape in wanted.items() if name in found or not may_lack(name)}
    return next((name for name in (*found, *right) if found.get(name) != right.get(name)), None)


def _shapes(spec: ModelSpec) -> dict[str, tuple[int, ...]]:
    """The shape of each tensor of a network."""
    with torch.device("meta"):
        backbone = _backbone(spec, seed=0)
    wanted = {f"backbone.{name}": tuple(tensor.shape) for name, tensor in backbone.state_dict().items()}
    for head, labels in enumerate(spec.head_labels):
        wanted |= {f"heads.{head}.weight": (len(labels), backbone.features), f"heads.{head}.bias": (len(labels),)}
    return wanted


def _assemble(spec: ModelSpec, seed: int) -> Network:
    backbone = _backbone(spec, seed)
    return Network(spec, backbone, HEADS[spec.head](spec, backbone.features, seed))


def _backbone(spec: ModelSpec, seed: int) -> FeatureNet:
    plugin = find("backbone", spec.settings["backbone"])
    kind = plugin(plugin.Settings(**spec.settings))
    if kind_of(spec.shape) is not kind.reads:
        samples = kind_of(spec.shape).plural
        raise UserError(f"model.backbone: {plugin.name} reads {kind.reads.plural}, these samples are {samples}.")
    # Layers draw from torch's global generator when they are made.
    with ambient(seed, "backbone", device=torch.device("cpu")):
        backbone = kind.build(spec.shape)
        if spec.adapter is not None:
            backbone = adapt(backbone, spec.adapter, len(spec.tasks))
    return backbone
