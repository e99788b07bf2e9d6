"""What becomes of batch normalisation's running statistics: never an accident, always a policy.

average: averaged over clients like weights. local: they stay with the client. batch: there are none, each batch is
normalised by itself, in evaluation too. frozen: averaged in the first task, then fixed. blend: averaged, then blended
with the previous task's by a server that blends weights so.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

Policy = Literal["average", "local", "batch", "frozen"]
Blended = Literal["blend", "average", "local", "batch", "frozen"]
# For what needs a model that all clients share, with its statistics.
SharedPolicy = Literal["average", "batch", "frozen"]
# Where each task begins anew there is nothing from earlier tasks to keep or to freeze.
FromScratch = Literal["average", "batch"]


def drop_statistics(network: nn.Module) -> None:
    """Normalise by the batch's own statistics, in training and in evaluation."""
    for layer in _layers(network):
        layer.track_running_stats = False
        layer.running_mean = layer.running_var = layer.num_batches_tracked = None


def fix_statistics(network: nn.Module) -> None:
    """Normalise by the running statistics and leave them as they are; the affine part still learns."""
    for layer in _layers(network):
        layer.eval()


@contextmanager
def statistics_of(network: nn.Module, inputs: Tensor) -> Iterator[None]:
    """While open, layers that keep no statistics normalise by those of these inputs, as constants.

    So a sample's loss no longer depends on which others stand in its batch. The network is in evaluation mode.
    """
    without = [layer for layer in _layers(network) if layer.running_mean is None]

    def keep(layer: nn.Module, args: tuple[Any, ...]) -> None:
        layer.running_var, layer.running_mean = torch.var_mean(args[0], (0, 2, 3), correction=0)

    hooks = [layer.register_forward_pre_hook(keep) for layer in without]
    try:
        if without:
            with torch.no_grad():
                network(inputs)
        for hook in hooks:
            hook.remove()
        yield
    finally:
        for hook in hooks:
            hook.remove()
        for layer in without:
            layer.running_mean = layer.running_var = None


def _layers(network: nn.Module) -> list[_BatchNorm]:
    return [module for module in network.modules() if isinstance(module, _BatchNorm)]
