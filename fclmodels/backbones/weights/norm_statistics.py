"""Running statistics of batch normalisation, estimated anew on images without labels.

For weights whose statistics are of other images, or lost. Each batch passes the network, normalised by its own mean and
variance in every layer, and the running ones become the means over all batches of these (of variances the unbiased
ones), by the batches' sizes, where torch.optim.swa_utils.update_bn counts a short last batch in full. Weights stay.
"""

from collections.abc import Iterable

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from fclmodels.errors import UserError

LEAST = 4  # images; ours


@torch.no_grad()
def estimate_statistics(network: nn.Module, batches: Iterable[Tensor]) -> int:
    """Replace the running statistics of a network by those of these batches; return how many images there were."""
    layers = [m for m in network.modules() if isinstance(m, _BatchNorm) and m.running_mean is not None]
    if not layers:
        raise UserError("fcl weights: this backbone has no running statistics. Nothing is to be estimated.")
    momenta = [layer.momentum for layer in layers]
    network.eval()
    for layer in layers:
        layer.reset_running_stats()
        layer.train()
    images = 0
    for batch in batches:
        images += len(batch)
        for layer in layers:
            layer.momentum = len(batch) / images  # so that the running one is the mean over all images so far
        network(batch)
    if images < LEAST:
        raise UserError(f"fcl weights: {images} images are too few for statistics. Give {LEAST} or more.")
    for layer, momentum in zip(layers, momenta, strict=True):
        layer.momentum = momentum
    network.eval()
    return images
