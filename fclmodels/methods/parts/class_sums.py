"""Sums over a client's samples of each class of a task, on a network's features."""

from collections.abc import Callable, Iterable

import torch
from torch import Tensor

from fclmodels.backbones.model.network import Network
from fclmodels.backbones.model.spec import to_local_labels
from fclmodels.data.batches import Batch
from fclmodels.numerics.prototypes import clip_rows, moments


@torch.no_grad()
def add_up_classes(
    network: Network,
    batches: Iterable[Batch],
    task: int,
    add_up: Callable[[Tensor, Tensor, int], dict[str, Tensor]] = moments,
    clip: float | None = None,
) -> dict[str, Tensor]:
    """Return the sums by `add_up` of a task's classes, in evaluation mode; clip: the longest that features may be."""
    network.eval()
    classes = len(network.spec.tasks[task])
    total = add_up(torch.zeros(0, network.backbone.features), torch.zeros(0, dtype=torch.int64), classes)
    for batch in batches:
        features = network.backbone(batch.inputs)
        if clip is not None:
            features = clip_rows(features, clip)
        of_batch = add_up(features, to_local_labels(network.spec, task, batch.labels), classes)
        total = {name: value + of_batch[name].cpu() for name, value in total.items()}
    return total
