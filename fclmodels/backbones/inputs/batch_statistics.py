"""Mean and variance of what enters each batch normalisation, beside its running ones: they say what a network has seen.

Images that a network's own statistics fit resemble what it was trained on (TARGET, LANDER, MFCL, SRe2L).
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from fclmodels.numerics.data_free import Statistics


class Captured(NamedTuple):
    """Statistics of a network's batch normalisations: of the batch that passed last, and the running ones."""

    batch: Statistics
    running: Statistics


@contextmanager
def capture_statistics(network: nn.Module) -> Iterator[Captured]:
    """Note, while open, mean and variance [channels] of what enters each layer that has running statistics."""
    layers = [layer for layer in network.modules() if isinstance(layer, _BatchNorm) and layer.running_mean is not None]
    captured = Captured([], [(layer.get_buffer("running_mean"), layer.get_buffer("running_var")) for layer in layers])

    def note(layer: nn.Module, args: tuple[Tensor, ...]) -> None:
        others = [axis for axis in range(args[0].dim()) if axis != 1]
        variance, mean = torch.var_mean(args[0], others, correction=0)
        captured.batch.append((mean, variance))

    hooks = [layer.register_forward_pre_hook(note) for layer in layers]
    try:
        yield captured
    finally:
        for hook in hooks:
            hook.remove()
