"""OCS (Yoon et al. 2022): samples whose gradients are like the task's, unlike each other's, and like the stored ones'.

u_i = cos(g, g_i) - mean over j != i of cos(g_i, g_j) + tau cos(r, g_i), of gradients of all parameters on the final
model. The release draws what it stores at random, and counts a sample among its own others; here the highest u_i of
each class stay. Memory: four vectors of the model's length, whatever the number of samples, each of which takes two
backward passes of its own.
"""

from collections.abc import Iterator

import torch
from pydantic import Field
from torch import Tensor

from fclmodels.backbones.model.network import Network
from fclmodels.data.batches import Batch
from fclmodels.methods.parts.coreset_choice.candidates import (
    Candidates,
    list_trained,
    measure_losses,
)
from fclmodels.numerics.coreset_choice import score_similarity
from fclmodels.settings.base import Settings as BaseSettings


class OcsSettings(BaseSettings):
    tau: float = Field(1000.0, ge=0, description="weight of the likeness to stored samples' gradient (its release)")


def choose_by_gradients(candidates: Candidates, settings: OcsSettings) -> dict[int, Tensor]:
    """Return the places of each class's samples to store, the best first."""
    network = candidates.copy_network()
    stored = None
    if len(candidates.old.labels):
        stored = sum(yield_gradients(candidates, network, candidates.old), start=torch.zeros(()))
    scores = score_similarity(lambda: yield_gradients(candidates, network, candidates.new), stored, settings.tau)
    return candidates.take_best(scores.cpu())


def yield_gradients(candidates: Candidates, network: Network, raw: Batch) -> Iterator[Tensor]:
    """Yield the gradient of each sample's loss by all trained parameters: [P]."""
    parameters = list_trained(network)
    for sample in candidates.iterate(raw, 1):
        gradients = torch.autograd.grad(measure_losses(network, sample).sum(), parameters, materialize_grads=True)
        yield torch.cat([gradient.flatten() for gradient in gradients])
