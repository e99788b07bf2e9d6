"""Distances between two networks' block outputs: PODNet's pooled ones (eq. 4) and AFC's by the importance of channels.

A block's output is [B, C, H, W]; tokens [B, N, D] are D channels of N positions; a vector [B, F] is one channel of F
positions (ours).
"""

import torch
from torch import Tensor
from torch.nn.functional import cosine_similarity, normalize


def to_maps(output: Tensor) -> Tensor:
    """Return a block's output as maps [B, C, H, W]."""
    if output.ndim == 4:
        return output
    return output.mT[..., None] if output.ndim == 3 else output[:, None, :, None]


def measure_pooled_distance(output: Tensor, target: Tensor) -> Tensor:
    """Return ||p - p*||, mean over samples; p: squares summed over width and over height, side by side, of length 1."""
    return (_pool(output) - _pool(target)).norm(dim=1).mean()


def measure_angle(features: Tensor, targets: Tensor) -> Tensor:
    """Return 1 - cos(h, h*), mean over samples: POD-flat."""
    return (1 - cosine_similarity(features, targets)).mean()


def measure_channel_distance(output: Tensor, target: Tensor, importance: Tensor | None) -> Tensor:
    """Return the mean over samples and channels of I_c ||u_c - u*_c||, by importance I [C]; None: 1.

    u_c is channel c's map of squares, of length 1 over positions.
    """
    own, other = (normalize(to_maps(maps).square().flatten(2), dim=2) for maps in (output, target))
    distances = (own - other).norm(dim=2)
    return (distances if importance is None else importance * distances).mean()


def sum_importance(gradient: Tensor) -> Tensor:
    """Return the sum over positions and samples of squared gradients by a block's output, of each channel [C]."""
    return to_maps(gradient).square().sum((0, 2, 3), dtype=torch.float64)


def _pool(output: Tensor) -> Tensor:
    squares = to_maps(output).square()
    return normalize(torch.cat([squares.sum(3).flatten(1), squares.sum(2).flatten(1)], dim=1))
