"""Normalisation layers by name, and policies for batch normalisation's running statistics: never an accident.

average: averaged over clients like weights. local: they stay with the client. batch: there are none, each batch is
normalised by itself, in evaluation too. frozen: averaged in the first task, then fixed. blend: averaged, then blended
with the previous task's by a server that blends weights in the same way.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from math import gcd
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

Norm = Literal["batch", "batch-no-stats", "group", "none"]
Policy = Literal["average", "local", "batch", "frozen"]
Blended = Literal["blend", "average", "local", "batch", "frozen"]
# For methods that need a model, with its statistics, that all clients share.
SharedPolicy = Literal["average", "batch", "frozen"]
# For methods that begin anew with each task, so that there are no earlier statistics to keep or to freeze.
FromScratch = Literal["average", "batch"]
STATISTICS = ("running_mean", "running_var")
BUFFERS = (*STATISTICS, "num_batches_tracked")


class BatchNorm(nn.BatchNorm2d):
    """Batch normalisation that also takes a batch with one value a channel (one sample, 1x1 map).

    Such a batch has no variance and torch refuses it. Here the running statistics stand in and stay as
    they are; where there are none, (x - mean) / std is 0 and only the bias remains.
    """

    def forward(self, x: Tensor) -> Tensor:
        is_single = x.numel() == x.shape[1]
        if not is_single or not (self.training or self.running_mean is None):
            return super().forward(x)
        of_batch = self.running_mean is None
        return torch.batch_norm(
            x, self.weight, self.bias, self.running_mean, self.running_var, of_batch, 0.0, self.eps, False
        )


def make_norm(norm: Norm, channels: int) -> nn.Module:
    """Return the layer of that name over [B, channels, H, W]."""
    if norm == "batch":
        return BatchNorm(channels)
    if norm == "batch-no-stats":
        return BatchNorm(channels, track_running_stats=False)
    if norm == "group":
        # Wu & He (2018) with a fixed number of channels a group: their 32 groups would leave a narrow network's
        # groups with a single channel.
        return nn.GroupNorm(channels // gcd(16, channels), channels)
    return nn.Identity()


def depends_on_batch(network: nn.Module) -> bool:
    """Return whether a sample's logits depend on the rest of its batch, in evaluation too."""
    return any(
        (isinstance(m, _BatchNorm) and m.running_mean is None) or getattr(m, "depends_on_batch", False)
        for m in network.modules()
    )


def list_statistics(network: nn.Module) -> set[str]:
    """Return the names of the buffers that hold running means and variances."""
    return _list_buffers(network, STATISTICS)


def list_counters(network: nn.Module) -> set[str]:
    """Return the names of the integer buffers that count batches: never to be averaged."""
    return _list_buffers(network, ("num_batches_tracked",))


def drop_statistics(network: nn.Module) -> None:
    """Normalise by the batch's own statistics, in training and in evaluation."""
    for layer in _find_norms(network):
        layer.track_running_stats = False
        layer.running_mean = layer.running_var = layer.num_batches_tracked = None


def fix_statistics(network: nn.Module) -> None:
    """Normalise by the running statistics and leave them as they are; the affine part still learns."""
    for layer in _find_norms(network):
        layer.eval()


@contextmanager
def leave_statistics(network: nn.Module) -> Iterator[None]:
    """Let layers in training mode normalise by the batch and leave running statistics as they are, while open."""
    layers = [layer for layer in _find_norms(network) if layer.training and layer.track_running_stats]
    for layer in layers:
        layer.track_running_stats = False
    try:
        yield
    finally:
        for layer in layers:
            layer.track_running_stats = True


@contextmanager
def use_statistics_of(network: nn.Module, inputs: Tensor) -> Iterator[None]:
    """Let layers without statistics normalise by those of these inputs while open, as constants.

    A sample's loss then does not depend on the others of its batch. The network is in evaluation mode.
    """
    stateless = [layer for layer in _find_norms(network) if layer.running_mean is None]

    def set_statistics(layer: nn.Module, args: tuple[Any, ...]) -> None:
        layer.running_var, layer.running_mean = torch.var_mean(args[0], (0, 2, 3), correction=0)

    hooks = [layer.register_forward_pre_hook(set_statistics) for layer in stateless]
    try:
        if stateless:
            with torch.no_grad():
                network(inputs)
        for hook in hooks:
            hook.remove()
        yield
    finally:
        for hook in hooks:
            hook.remove()
        for layer in stateless:
            layer.running_mean = layer.running_var = None


def _list_buffers(network: nn.Module, last_names: tuple[str, ...]) -> set[str]:
    return {name for name, _ in network.named_buffers() if name.rpartition(".")[2] in last_names}


def _find_norms(network: nn.Module) -> list[_BatchNorm]:
    return [module for module in network.modules() if isinstance(module, _BatchNorm)]
