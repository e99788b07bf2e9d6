"""A personal surrogate of the global model, by which a client judges its samples or weights (Re-Fed; FedSSI).

When a task has ended, a client copies the global model w to v and trains v on its samples, in evaluation mode and
without augmentation, by

    v <- v - eta (g(v) + q (v - w)),    q = (1 - lambda) / (2 lambda),

with g the gradient of a batch's mean cross entropy: near lambda = 1 v is the client's own, near 0 it stays at w. v is
thrown away afterwards; nothing of it leaves the client.
"""

from collections.abc import Iterator
from typing import NamedTuple

import torch
from pydantic import Field, PositiveFloat, PositiveInt
from torch import Tensor
from torch.nn.functional import cross_entropy

from fclmodels.backbones.layers.norms import use_statistics_of
from fclmodels.backbones.model.network import Network
from fclmodels.data.batches import Batch
from fclmodels.errors import UserError
from fclmodels.federation.client import Client
from fclmodels.federation.messages import Payload
from fclmodels.federation.run_context import Run
from fclmodels.methods.fedavg import FedAvg
from fclmodels.methods.parts.joined_heads import find_columns, join_heads, list_task_columns
from fclmodels.settings.base import Settings as BaseSettings

Tensors = dict[str, Tensor]


class SurrogateSettings(BaseSettings):
    lam: float = Field(
        0.5, gt=0, le=1, alias="lambda", description="how personal the surrogate is: 1 it is free, near 0 it stays at w"
    )
    passes: PositiveInt = Field(5, le=1000, description="s, the surrogate's passes over a client's samples")
    surrogate_lr: PositiveFloat | None = Field(
        None, le=1e6, description="eta, learning rate of the surrogate; null: optimizer.lr"
    )


class SurrogateBatch(NamedTuple):
    """A batch that the surrogate is about to learn."""

    number: int  # of the pass, from 1
    places: Tensor  # of its samples among all
    batch: Batch


class Surrogate:
    """v of one client after a task."""

    def __init__(self, method: FedAvg, client: Client, payload: Payload, settings: SurrogateSettings) -> None:
        self.method = method
        self.client = client
        self.settings = settings
        weights = method.join_own_weights(client, payload)
        self.network = method.networks.load(method.run.make_spec(client.task + 1), weights).eval()
        self.parameters = method.select_trainable(self.network, client.task)
        self.origin = {name: weights[name].clone() for name in self.parameters}  # w
        self.lr = choose_rate(method.run, settings)

    def iterate(self, samples: Batch) -> Iterator[SurrogateBatch]:
        """Yield the batches of all passes over raw samples, each pass in an order of its own."""
        random, prepare = self.client.make_generator("surrogate"), self.client.run.batches.prepare_inputs
        size = self.client.run.params.federation.batch_size
        for number in range(1, self.settings.passes + 1):
            for places in torch.randperm(len(samples.labels), generator=random).split(size):
                yield SurrogateBatch(number, places, prepare(samples.take(places)))

    def compute_losses(self, batch: Batch) -> Tensor:
        """Return the cross entropy [B] of each sample, over the classes that local training has it over."""
        return compute_sample_losses(self.method, self.network, batch)

    def step(self, batch: Batch) -> tuple[Tensors, Tensors]:
        """Take a step on a batch; return the gradients of the mean cross entropy, and how far each parameter moved."""
        for name, parameter in self.network.named_parameters():
            parameter.requires_grad_(name in self.parameters)
        with use_statistics_of(self.network, batch.inputs):
            loss = self.compute_losses(batch).mean()
        parameters = list(self.parameters.values())
        derivatives = torch.autograd.grad(loss, parameters, allow_unused=True)
        pull = compute_pull(self.settings.lam)
        gradients, moves = {}, {}
        with torch.no_grad():
            for (name, v), g in zip(self.parameters.items(), derivatives, strict=True):
                gradients[name] = torch.zeros_like(v) if g is None else g
                moves[name] = -self.lr * (gradients[name] + pull * (v - self.origin[name]))
                v.add_(moves[name])
        return gradients, moves


def compute_sample_losses(method: FedAvg, network: Network, batch: Batch) -> Tensor:
    """Return the cross entropy [B] of each sample: over all classes so far, or over those of its task."""
    logits, spec = join_heads(network, network.backbone(batch.inputs)), network.spec
    if not method.loss_is_over_seen(spec):
        answers = torch.zeros_like(logits, dtype=torch.bool)
        for task, columns in enumerate(list_task_columns(spec, logits.device)):
            answers[:, columns] |= (batch.tasks == task)[:, None]
        logits = logits.masked_fill(~answers, -torch.inf)
    return cross_entropy(logits, find_columns(spec, batch.labels, batch.tasks), reduction="none")


def compute_pull(lam: float) -> float:
    """Return q = (1 - lambda) / (2 lambda)."""
    return (1 - lam) / (2 * lam)


def choose_rate(run: Run, settings: SurrogateSettings) -> float:
    """Return eta; UserError where the pull alone throws the surrogate beyond where it was."""
    rate = settings.surrogate_lr or run.params.optimizer.lr
    if rate * compute_pull(settings.lam) >= 2:
        raise UserError(
            f"lambda {settings.lam:g} pulls a surrogate of rate {rate:g} to ever farther places. Use a larger lambda, "
            "or a smaller surrogate_lr."
        )
    return rate
