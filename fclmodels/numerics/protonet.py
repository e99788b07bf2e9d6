"""The prototypical network (Snell et al. 2017; STAMP eq. 7, with the sign that makes it a likelihood)."""

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy


def average_classes(features: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """Return the mean features [L, F] of the classes among labels [B], in rising order, and their labels [L]."""
    present, places, counts = labels.unique(return_inverse=True, return_counts=True)
    sums = features.new_zeros(len(present), features.shape[1]).index_add(0, places, features)
    return sums / counts[:, None], present


def prototype_loss(features: Tensor, labels: Tensor, other: Tensor, other_labels: Tensor) -> Tensor:
    """Return the mean over samples z of -log softmax_l(-||z - p_l||^2) at z's class, over classes with a prototype.

    features [B, F], labels [B]. p_l of a class in the batch is the mean of its features there, for a sample of that
    class without the sample itself; a sample that is alone in its class does not count. other [K, F], other_labels [K]:
    fixed prototypes of other classes; those of classes in the batch are ignored.
    """
    present, places, counts = labels.unique(return_inverse=True, return_counts=True)
    sums = features.new_zeros(len(present), features.shape[1]).index_add(0, places, features)
    is_absent = ~torch.isin(other_labels, present)
    prototypes = torch.cat([sums / counts[:, None], other[is_absent].to(features)])
    distances = features.square().sum(1, keepdim=True) + prototypes.square().sum(1) - 2 * features @ prototypes.T
    own = (sums[places] - features) / (counts[places] - 1).clamp(min=1)[:, None]
    distances = distances.scatter(1, places[:, None], (features - own).square().sum(1, keepdim=True))
    counted = counts[places] > 1
    if not counted.any():
        return features.sum() * 0
    return cross_entropy(-distances[counted], places[counted])
