"""Outputs of a backbone's named blocks during forward passes, to be compared with those of another network."""

from collections.abc import Collection, Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor

from fclmodels.backbones.base import FeatureNet
from fclmodels.errors import suggest_name


@contextmanager
def capture_block_outputs(backbone: FeatureNet, names: Collection[str]) -> Iterator[dict[str, Tensor]]:
    """Put, while open, each named block's output of the last pass through it into the mapping that this yields.

    Maps come as [B, C, H, W], others as the blocks return them, and gradients flow through them. The network goes
    on with a copy, so that a ReLU that works in place changes none of them. Of a block that returns several tensors it
    is the first.
    """
    for name in names:
        if name not in backbone.blocks:
            kind = type(backbone).__name__
            raise ValueError(f"{name} is not a block of {kind}. {suggest_name(name, backbone.blocks)}")
    outputs: dict[str, Tensor] = {}

    def note(name: str, output: Any) -> Any:
        first = output[0] if isinstance(output, tuple) else output
        outputs[name] = first.movedim(-1, 1) if owner.channels_last and first.ndim == 4 else first
        copy = first.clone()
        return (copy, *output[1:]) if isinstance(output, tuple) else copy

    owner = _find_owner_of_blocks(backbone)
    hooks = [
        owner.get_submodule(name).register_forward_hook(lambda _, args, output, name=name: note(name, output))
        for name in names
    ]
    try:
        yield outputs
    finally:
        for hook in hooks:
            hook.remove()


def _find_owner_of_blocks(backbone: FeatureNet) -> FeatureNet:
    """Return the module whose children the blocks are: an adapter has the names of the backbone that it holds."""
    frozen = dict(backbone.named_children()).get("frozen")
    return frozen if isinstance(frozen, FeatureNet) else backbone
