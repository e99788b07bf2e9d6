"""Features of past tasks that a client keeps, and that move as training moves those of its present images.

Of earlier tasks the images are gone, so a client keeps the features of at most 512 of its images a task, with their
labels, and never sends them: 2 KB for each that has 512 numbers. The network goes on learning, and these features would
no longer be what it makes of such images. So the client measures how far training has moved the features of the images
that it has now, from X_old to X_new [m, F], and moves stored features A alike (ours):

    A <- A + A E,  E = argmin ||X_new - X_old - X_old E||^2 + lambda ||E||^2,  lambda a share of the mean eigenvalue.
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from fclmodels.backbones.inputs.layer_capture import BATCH
from fclmodels.backbones.model.network import Network
from fclmodels.data.batches import Batch
from fclmodels.federation.client import Client
from fclmodels.federation.exchange import Memory
from fclmodels.federation.messages import Payload

STORED = 512  # features of a task that a client keeps at most
RIDGE = 0.01  # lambda, as a share of the mean eigenvalue of the features' Gram matrix


def remember_features(
    client: Client, load: Callable[[dict[str, Tensor]], Network], payload: Payload, stores: bool
) -> tuple[Memory, dict[str, Tensor]]:
    """Return a client's memory, with features of this task if it stores them, and how far these moved: energies.

    load: makes a network of weights. Where the payload has those that the task began with, earlier tasks' features
    move too.
    """
    rows = client.rows.draw_some(STORED, client.make_generator("features"))
    batches = list(client.run.batches.iterate_ordered(rows, BATCH))
    features = compute_features(load(payload["weights"].tensors), batches)
    stored, energies = dict(client.memory.get("features", {})), {}
    if "before" in payload:
        before = compute_features(load(payload["before"].tensors), batches)
        stored = {task: move_features(A, before, features) for task, A in stored.items()}
        moved, size = (X.square().sum(dtype=torch.float64) for X in (features - before, before))
        energies = {"moved": moved, "size": size}
    labels = dict(client.memory.get("labels", {}))
    if stores:
        stored[str(client.task)] = features
        labels[str(client.task)] = torch.cat([batch.labels for batch in batches]).cpu()
    memory = {**client.memory, "features": stored, "labels": labels} if stored else client.memory
    return memory, energies


@torch.no_grad()
def compute_features(network: Network, batches: Sequence[Batch]) -> Tensor:
    """Return the features [n, F] of batches, in evaluation mode, in main memory."""
    return torch.cat([network.eval().backbone(batch.inputs).cpu() for batch in batches])


def move_features(A: Tensor, before: Tensor, after: Tensor) -> Tensor:
    """Return features A [n, F] moved by A E, where E carries other features [m, F] from before to after training.

    E = before^T (before before^T + lambda I)^-1 (after - before), the ridge regression in its dual form.
    """
    X, change = before.double(), (after - before).double()
    gram = X @ X.T
    gram.diagonal().add_(RIDGE * float(gram.diagonal().mean()) + torch.finfo(torch.float64).tiny)
    return (A.double() + (A.double() @ X.T) @ torch.linalg.solve(gram, change)).to(A.dtype)
