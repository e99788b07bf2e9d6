"""Normalisation layers by name, and what a network's normalisation means for its logits and its state."""

from math import gcd
from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

Norm = Literal["batch", "batch-no-stats", "group", "none"]
STATISTICS = ("running_mean", "running_var")
BUFFERS = (*STATISTICS, "num_batches_tracked")


class BatchNorm(nn.BatchNorm2d):
    """Batch normalisation that also takes a batch with one value a channel (one sample, 1x1 map).

    Such a batch has no variance and torch refuses it. Here the running statistics stand in and stay as
    they are; where none are kept, (x - mean) / std is 0 and the bias alone is left.
    """

    def forward(self, x: Tensor) -> Tensor:
        alone = x.numel() == x.shape[1]
        if not alone or not (self.training or self.running_mean is None):
            return super().forward(x)
        of_batch = self.running_mean is None
        return torch.batch_norm(
            x, self.weight, self.bias, self.running_mean, self.running_var, of_batch, 0.0, self.eps, False
        )


def norm_layer(norm: Norm, channels: int) -> nn.Module:
    """The layer of that name over [B, channels, H, W]."""
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
    """Whether a sample's logits depend on the rest of its batch, in evaluation too."""
    return any(
        (isinstance(m, _BatchNorm) and m.running_mean is None) or getattr(m, "depends_on_batch", False)
        for m in network.modules()
    )


def statistics_names(network: nn.Module) -> set[str]:
    """Names of the buffers that hold running means and variances."""
    return _buffers_called(network, STATISTICS)


def counter_names(network: nn.Module) -> set[str]:
    """Names of the integer buffers that count batches: never to be averaged."""
    return _buffers_called(network, ("num_batches_tracked",))


def _buffers_called(network: nn.Module, last_names: tuple[str, ...]) -> set[str]:
    return {name for name, _ in network.named_buffers() if name.rpartition(".")[2] in last_names}
