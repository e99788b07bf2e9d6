"""Gradient compensation: weights that let each group of a batch's samples pull alike (GLFC, LGA).

g_i = 1 - s(z_y) is the length of the gradient of a sample's binary cross entropy in its own logit (Dong et al. 2022,
eq. 3, with the release's sigmoid), so that samples which the model has mostly learned pull least.
"""

import torch
from torch import Tensor
from torch.nn.functional import binary_cross_entropy_with_logits


def measure_gaps(logits: Tensor, labels: Tensor) -> Tensor:
    """Return g = 1 - s(z_y) [B], without gradients, from logits [B, C] and labels [B]."""
    return 1 - logits.detach().float().gather(1, labels[:, None])[:, 0].sigmoid()


def compensate(gaps: Tensor, groups: Tensor) -> Tensor:
    """Return w_i = g_i / mean of g over the samples of i's group, from g [B] and each sample's group [B]."""
    _, members = groups.unique(return_inverse=True)
    sums = gaps.new_zeros(int(members.max()) + 1).index_add(0, members, gaps)
    means = sums / members.bincount()
    return gaps / means[members].clamp(min=torch.finfo(gaps.dtype).tiny)


def weigh_cross_entropy(logits: Tensor, targets: Tensor, weights: Tensor | None = None) -> Tensor:
    """Return the mean over samples and columns of w_i times the binary cross entropy with targets [B, C]."""
    weight = None if weights is None else weights[:, None]
    return binary_cross_entropy_with_logits(logits.float(), targets, weight)
