"""What becomes of batch normalisation's running statistics: never an accident, always a policy.

average: averaged over clients like weights. local: they stay with the client. batch: there are none, each batch is
normalised by itself, in evaluation too. frozen: averaged in the first task, then fixed.
"""

from typing import Literal

from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

Policy = Literal["average", "local", "batch", "frozen"]
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


def _layers(network: nn.Module) -> list[_BatchNorm]:
    return [module for module in network.modules() if isinstance(module, _BatchNorm)]
