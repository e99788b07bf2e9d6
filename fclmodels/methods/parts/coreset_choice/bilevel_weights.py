"""BCSR (Hao et al. 2023): samples drawn by weights whose weighted training lowers the loss of all candidates.

The weights p lie on the simplex. A step of the model on the mean of p_i l_i, then one of p down the gradient of
mean l_i - beta E_z[sum of the K largest of p + delta z] at the model that has moved (numerics/coreset_choice.py), and
back onto the simplex. Its release adds its noise after it has taken the K largest and leaves out that term's gradient,
so that beta does nothing; here it counts (ours: the gradient of the sum over the K places that are largest with noise).
Candidates come in batches of `candidates`; of each class as many are drawn without replacement, by the weights of all
batches, as there is room for. Where fewer have a weight, those of the largest loss fill up (ours). In double precision.
"""

import torch
from pydantic import Field, PositiveFloat, PositiveInt
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from fclmodels.backbones.model.network import Network
from fclmodels.data.batches import Batch
from fclmodels.methods.parts.coreset_choice.candidates import Candidates, list_trained, measure_losses
from fclmodels.numerics.coreset_choice import compute_weight_gradient, project_onto_simplex
from fclmodels.settings.base import Settings as BaseSettings


class BcsrSettings(BaseSettings):
    steps: PositiveInt = Field(5, le=10_000, description="steps of the weights (its release)")
    candidates: PositiveInt = Field(50, le=65_536, description="samples that share the simplex (its release's stream)")
    beta: float = Field(0.1, ge=0, description="weight of the K largest's sum (its release)")
    delta: float = Field(1e-3, ge=0, description="deviation of the noise beside them (its release)")
    inner_lr: PositiveFloat = Field(5.0, description="step of the model (its release)")
    outer_lr: PositiveFloat = Field(5.0, description="step of the weights (its release)")


def choose_by_weights(candidates: Candidates, settings: BcsrSettings) -> dict[int, Tensor]:
    """Return the places of each class's samples to store, as they were drawn."""
    count, target = len(candidates.new.labels), sum(candidates.room.values())
    random = candidates.client.make_generator("bcsr")
    weights, losses = torch.zeros(count, dtype=torch.float64), torch.zeros(count, dtype=torch.float64)
    for places in torch.randperm(count, generator=random).split(settings.candidates):
        few = max(1, round(target * len(places) / count))
        with sdpa_kernel(SDPBackend.MATH):  # other kernels' gradients have none either
            p, of_batch = learn_weights(candidates, candidates.prepare(places), few, settings, random)
        weights[places], losses[places] = p * len(places), of_batch
    return {
        label: draw_places(candidates.find_places(label), room, weights, losses, random)
        for label, room in candidates.room.items()
    }


def learn_weights(
    candidates: Candidates, batch: Batch, few: int, settings: BcsrSettings, random: torch.Generator
) -> tuple[Tensor, Tensor]:
    """Return the weights [n] of a batch's samples, and their losses [n] on the final model."""
    network = candidates.copy_network().double()  # so that no product is oneDNN's, whose gradient has none
    batch = Batch(batch.inputs.double(), batch.labels, batch.tasks)
    parameters = list_trained(network)
    with torch.no_grad():
        first = measure_losses(network, batch)
    p = torch.full_like(first, 1 / len(first))
    for _ in range(settings.steps):
        step_model(network, batch, p, settings.inner_lr)
        gradient = compute_weight_gradient(
            parameters,
            lambda: measure_losses(network, batch),
            lambda: measure_losses(network, batch).mean(),
            p,
            settings.inner_lr,
        )
        noise = settings.delta * torch.randn(len(p), generator=random, dtype=p.dtype).to(p.device)
        largest = torch.zeros_like(p).index_fill(0, (p + noise).topk(min(few, len(p))).indices, 1)
        p = project_onto_simplex(p - settings.outer_lr * (gradient - settings.beta * largest))
    return p.cpu(), first.cpu()


def step_model(network: Network, batch: Batch, p: Tensor, lr: float) -> None:
    """Move the network by - lr times the gradient of mean p_i l_i."""
    parameters = list_trained(network)
    gradients = torch.autograd.grad((p * measure_losses(network, batch)).mean(), parameters, materialize_grads=True)
    with torch.no_grad():
        for parameter, gradient in zip(parameters, gradients, strict=True):
            parameter.sub_(lr * gradient)


def draw_places(places: Tensor, room: int, weights: Tensor, losses: Tensor, random: torch.Generator) -> Tensor:
    """Return so many of a class's places: drawn by their weights, then by the highest loss."""
    own = weights[places]
    drawn = torch.multinomial(own, count, generator=random) if (count := min(room, int((own > 0).sum()))) else own[:0]
    rest = torch.ones(len(places), dtype=torch.bool).index_fill(0, drawn.long(), value=False).nonzero().flatten()
    filling = rest[losses[places[rest]].argsort(descending=True, stable=True)][: room - count]
    return places[torch.cat([drawn.long(), filling])]
