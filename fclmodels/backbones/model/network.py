"""A backbone and its heads as one network, built from a spec and a seed."""

from collections.abc import Callable, Mapping
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from fclmodels.backbones.base import FeatureNet
from fclmodels.backbones.model.heads import HEADS, Heads
from fclmodels.backbones.model.spec import ModelSpec, to_local_labels
from fclmodels.data.sample_kind import find_kind
from fclmodels.errors import UserError, suggest_name
from fclmodels.randomness import seed_torch

# Tensors of a backbone with an adapter: they never change and never travel.
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

    def compute_logits(self, features: Tensor, task: int | None = None) -> Tensor:
        """Return logits [B, classes of the task] in the task's order; without a task [B, labels] in label order."""
        logits: Tensor = self.heads(features, task)
        return logits

    def forward(self, x: Tensor, task: int | None = None) -> Tensor:
        return self.compute_logits(self.backbone(x), task)


def compute_task_cross_entropy(network: Network, features: Tensor, labels: Tensor, task: int) -> Tensor:
    """Return the mean cross entropy of features [B, F] over the classes of their task alone."""
    return cross_entropy(network.compute_logits(features, task), to_local_labels(network.spec, task, labels))


def build_network(spec: ModelSpec, generator: torch.Generator) -> Network:
    """Build the network that learning starts from: drawn, or with the backbone of `model.weights`.

    Only the generator's seed is used; its state and that of torch's own do not change.
    """
    network = _assemble(spec, generator.initial_seed())
    list_frozen(spec, network)
    fresh = list_blocks(spec, network, "fresh")
    if weights := spec.settings.get("weights"):
        from fclmodels.backbones.weights.published_weights import find_weights_file
        from fclmodels.backbones.weights.weight_files import load_weights, refuse_other_settings

        backbone = network.backbone if spec.adapter is None else network.backbone.get_submodule("frozen")
        assert isinstance(backbone, FeatureNet)
        file = find_weights_file(Path(weights), spec.settings["backbone"])
        load_weights(backbone, file, fresh)
        refuse_other_settings(file, spec.settings)
    return network


def build_skeleton(spec: ModelSpec) -> Network:
    """Build a network of this architecture with arbitrary weights, into which others are loaded."""
    return _assemble(spec, seed=0)


def list_frozen(spec: ModelSpec, network: Network) -> set[str]:
    """Return the names of the parameters and buffers in the blocks that `model.freeze` names."""
    prefixes = tuple(f"backbone.{block}." for block in list_blocks(spec, network, "freeze"))
    return {name for name in network.state_dict() if name.startswith(prefixes)}


def list_blocks(spec: ModelSpec, network: Network, setting: str) -> tuple[str, ...]:
    """Return the blocks of the backbone that a setting of `model` names; UserError where there is no such block."""
    names = network.backbone.blocks
    for block in spec.settings.get(setting, ()):
        if block not in names:
            backbone = spec.settings["backbone"]
            raise UserError(f"model.{setting}: {block} is not a block of {backbone}. {suggest_name(block, names)}")
    return tuple(spec.settings.get(setting, ()))


def find_misfit(spec: ModelSpec, weights: Mapping[str, Tensor], may_lack: Callable[[str], bool]) -> str | None:
    """Return the name of the first tensor with a shape that a network of this spec does not have; None if all fit.

    No network is made for that: a spec may need more than the memory.
    """
    shapes = {name: tuple(tensor.shape) for name, tensor in weights.items()}
    right = {name: shape for name, shape in _find_shapes(spec).items() if name in shapes or not may_lack(name)}
    return next((name for name in (*shapes, *right) if shapes.get(name) != right.get(name)), None)


def _find_shapes(spec: ModelSpec) -> dict[str, tuple[int, ...]]:
    """Return the shape of each tensor of a network."""
    with torch.device("meta"):
        backbone = _build_backbone(spec, seed=0)
    shapes = {f"backbone.{name}": tuple(tensor.shape) for name, tensor in backbone.state_dict().items()}
    for head, labels in enumerate(spec.head_labels):
        shapes |= {f"heads.{head}.weight": (len(labels), backbone.features), f"heads.{head}.bias": (len(labels),)}
    return shapes


def _assemble(spec: ModelSpec, seed: int) -> Network:
    backbone = _build_backbone(spec, seed)
    return Network(spec, backbone, HEADS[spec.head](spec, backbone.features, seed))


def _build_backbone(spec: ModelSpec, seed: int) -> FeatureNet:
    from fclmodels.plugins import find  # not among the code of results: the plugin that it finds is

    plugin = find("backbone", spec.settings["backbone"])
    kind = plugin(plugin.Settings(**spec.settings))
    if find_kind(spec.shape) is not kind.reads:
        samples = find_kind(spec.shape).plural
        raise UserError(f"model.backbone: {plugin.name} reads {kind.reads.plural}, these samples are {samples}.")
    # Layers draw from torch's global generator when they are made.
    with seed_torch(seed, "backbone", device=torch.device("cpu")):
        backbone = kind.build(spec.shape)
        if spec.adapter is not None:
            from fclmodels.backbones.model.prompt_adapters import adapt

            backbone = adapt(backbone, spec.adapter, len(spec.tasks))
    return backbone


class NetworkCache:
    """One network a process: built once for each shape of the head, then only filled with other weights."""

    def __init__(self, device: torch.device, prepare: Callable[[nn.Module], None]) -> None:
        self.device = device
        self.prepare = prepare
        self._spec: ModelSpec | None = None
        self._network: Network | None = None
        self._state: dict[str, Tensor] = {}

    def load(self, spec: ModelSpec, weights: Mapping[str, Tensor]) -> Network:
        """Return the network with these weights; the next call changes it. `prepare` fills a frozen backbone."""
        network = self.build(spec)
        with torch.no_grad():
            torch._foreach_copy_(list(self._state.values()), [weights[name] for name in self._state])
        return network

    def build(self, spec: ModelSpec) -> Network:
        """Return the network with arbitrary weights, for its names and shapes."""
        if self._network is None or self._spec != spec:
            with torch.inference_mode(False):  # so that it can be trained, even if a predictor is the first to need it
                self._network = build_skeleton(spec)
                self.prepare(self._network)
                self._network.to(self.device)
            tensors = self._network.state_dict().items()
            self._spec, self._state = spec, {name: t for name, t in tensors if not name.startswith(FROZEN)}
        return self._network
