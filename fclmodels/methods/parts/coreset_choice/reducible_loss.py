"""CSReL (Tong et al. 2025): samples whose loss falls most from a network of the chosen ones to one of all samples.

A reference network, drawn anew, trains on all samples of the task. Then, in each of some rounds, the samples with the
largest loss(current) - loss(reference) join the chosen ones, classes alike, and the current network, drawn anew, takes
a few steps on them. Earlier tasks' samples stay as they were chosen (ours): its release chooses among them again.
"""

from collections.abc import Iterator

import torch
from pydantic import Field, PositiveFloat, PositiveInt
from torch import Tensor

from fclmodels.backbones.model.network import Network
from fclmodels.federation.training.optimisers import Sgd
from fclmodels.methods.parts.coreset_choice.candidates import (
    Candidates,
    list_trained,
    measure_losses,
)
from fclmodels.numerics.coreset_choice import choose_levelled
from fclmodels.randomness import seed_torch
from fclmodels.settings.base import Settings as BaseSettings

EVALUATED = 256  # samples that pass the network at once


class CsrelSettings(BaseSettings):
    rounds: PositiveInt = Field(40, le=10_000, description="rounds of choice (its release)")
    updates: PositiveInt = Field(7, le=100_000, description="steps on the chosen samples in each (its release)")
    lr: PositiveFloat = Field(5e-3, description="learning rate of these (its release)")
    reference_epochs: PositiveInt = Field(10, le=10_000, description="epochs of the reference (its release)")
    reference_lr: PositiveFloat = Field(3e-3, description="learning rate of the reference (its release)")
    batch: PositiveInt = Field(32, le=65_536, description="samples of a step (its release)")


def choose_by_reducible_loss(candidates: Candidates, settings: CsrelSettings) -> dict[int, Tensor]:
    """Return the places of each class's samples to store, in the order in which they were chosen."""
    labels = candidates.new.labels.tolist()
    reference = train_reference(candidates, settings)
    chosen: list[int] = []
    target = sum(candidates.room.values())
    size = max(1, -(-target // settings.rounds))
    while len(chosen) < target:
        current = train_on_chosen(candidates, settings, chosen, len(chosen) // size)
        gains = measure_in_parts(candidates, current) - reference
        gains[chosen] = -torch.inf
        counts = {label: sum(labels[place] == label for place in chosen) for label in candidates.room}
        joining = choose_levelled(gains, labels, counts, candidates.room, min(size, target - len(chosen)))
        if not joining:
            break
        chosen += joining
    return {
        label: torch.tensor([place for place in chosen if labels[place] == label], dtype=torch.int64)
        for label in candidates.room
    }


def train_reference(candidates: Candidates, settings: CsrelSettings) -> Tensor:
    """Return the losses [n] of all samples on a network that has trained on them."""
    network, count = candidates.draw_network("csrel-reference"), len(candidates.new.labels)
    steps = settings.reference_epochs * -(-count // settings.batch)
    descend(candidates, network, "csrel-reference", torch.arange(count), steps, settings.reference_lr, settings.batch)
    return measure_in_parts(candidates, network)


def train_on_chosen(candidates: Candidates, settings: CsrelSettings, chosen: list[int], round: int) -> Network:
    """Return a network drawn anew, after a few steps on the chosen samples."""
    purpose = f"csrel-{round}"
    network = candidates.draw_network(purpose)
    if chosen:
        places = torch.tensor(chosen)
        descend(candidates, network, purpose, places, settings.updates, settings.lr, settings.batch)
    return network


def descend(
    candidates: Candidates, network: Network, purpose: str, places: Tensor, steps: int, lr: float, size: int
) -> None:
    """Train a network on the samples at these places, in shuffled batches; it ends in evaluation mode."""
    client = candidates.client
    optimiser = Sgd(list_trained(network), lr, 0.0, 0.0)
    draws = draw_batches(client.make_generator(purpose), places, size)
    network.train()
    with seed_torch(client.run.seed, purpose, client.task, client.index, device=client.run.device):
        for _ in range(steps):
            optimiser.zero_grad()
            measure_losses(network, candidates.prepare(next(draws))).mean().backward()
            optimiser.step()
    network.eval()


def draw_batches(random: torch.Generator, places: Tensor, size: int) -> Iterator[Tensor]:
    """Yield batches of places without end, each epoch in an order of its own."""
    while True:
        yield from places[torch.randperm(len(places), generator=random)].split(size)


@torch.no_grad()
def measure_in_parts(candidates: Candidates, network: Network) -> Tensor:
    """Return each new sample's loss [n], on the CPU."""
    parts = candidates.iterate(candidates.new, EVALUATED)
    return torch.cat([measure_losses(network, part) for part in parts]).cpu()
