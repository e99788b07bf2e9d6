"""The prototypical network (Snell et al. 2017; STAMP eq. 7, with the sign that makes it a likelihood)."""

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy


def prototype_loss(features: Tensor, labels: Tensor, known: Tensor, known_labels: Tensor) -> Tensor:
    """Mean over samples z of -log softmax_l(-||z - p_l||^2) at its own class, over all classes that have a prototype.

    features [B, F], labels [B]. p_l of a class in the batch is the mean of its features there, for a sample of that
    class without the sample itself; a sample that is alone in its class has no part. known [K, F], known_labels [K]:
    prototypes of classes that are not in the batch, fixed.
    """
    present, places, counts = labels.unique(return_inverse=True, return_counts=True)
    sums = features.new_zeros(len(present), features.shape[1]).index_add(0, places, features)
    others = ~torch.isin(known_labels, present)
    prototypes = torch.cat([sums / counts[:, None], known[others].to(features)])
    distances = features.square().sum(1, keepdim=True) + prototypes.square().sum(1) - 2 * features @ prototypes.T
    own = (sums[places] - features) / (counts[places] - 1).clamp(min=1)[:, None]
    distances = distances.scatter(1, places[:, None], (features - own).square().sum(1, keepdim=True))
    told = counts[places] > 1
    if not told.any():
        return features.sum() * 0
    return cross_entropy(-distances[told], places[told])
