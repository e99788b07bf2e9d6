"""A class-balanced memory: each client keeps as many samples of each class of each task, by herding or at random.

memory: `samples` as in replay_memory.py, class by class in the order in which they were selected, so that a class that
has to give up some keeps its best ones. A task's samples come in once, when it has ended. Herding is iCaRL's (Rebuffi
et al. 2017, Algorithm 4): features of length 1, each sample the one that brings the mean of all selected nearest to the
class's. They never leave the client.
"""

from collections.abc import Callable, Iterator
from typing import Literal

import torch
from pydantic import Field, PositiveInt
from torch import Tensor
from torch.nn.functional import normalize

from fclmodels.backbones.model.network import Network
from fclmodels.backbones.model.spec import ModelSpec
from fclmodels.data.batches import Batch
from fclmodels.federation.client import Client
from fclmodels.federation.exchange import Memory
from fclmodels.methods.parts.coreset_memory import extract_in_parts
from fclmodels.methods.parts.replay_memory import pack_samples, unpack_samples
from fclmodels.numerics.coreset import select_by_herding
from fclmodels.settings.base import Settings as BaseSettings


class ExemplarSettings(BaseSettings):
    exemplars: PositiveInt = Field(
        20, le=1_000_000, description="samples that each client keeps, of all classes together or of each (see budget)"
    )
    budget: Literal["total", "class"] = Field(
        "total", description="exemplars is a number for all classes so far, which share it alike; class: for each"
    )
    selection: Literal["herding", "random"] = Field(
        "herding", description="of a class's samples: those whose mean feature is near the class's; random: any"
    )


class ExemplarMemory:
    """Chooses the samples that a client keeps of each class and task, and drops some when more classes come."""

    def __init__(self, settings: ExemplarSettings) -> None:
        self.settings = settings

    def add_task(
        self,
        client: Client,
        network: Network,
        extract: Callable[[Tensor], Tensor] | None = None,
        scores: Tensor | None = None,
    ) -> Memory:
        """Return the client's memory with exemplars of its task, chosen by the features of this network.

        extract: other features [B, F] of inputs, in place of the backbone's. scores: of the task's rows [n], of which
        the highest are chosen, whatever `selection`.

        The memory of a client that has no rows of the task stays as it is.
        """
        if not len(client.rows):
            return client.memory
        old, arriving = unpack_samples(client.memory), client.run.batches.read_raw(client.rows)
        classes = list_classes(old) if old else []
        labels = arriving.labels.unique().tolist()
        shares = self.share(len(classes) + len(labels))
        parts = []
        for share, (task, label) in zip(shares, classes, strict=False):
            assert old is not None
            parts.append(old.take(find_class(old, task, label)[:share]))
        features = (
            extract_in_parts(client, extract or network.backbone, arriving)
            if self.settings.selection == "herding" and scores is None
            else None
        )
        random = client.make_generator("exemplars")
        for share, label in zip(shares[len(classes) :], labels, strict=True):
            places = find_class(arriving, client.task, label)
            if scores is not None:
                order = scores[places].argsort(descending=True, stable=True)[:share]
            elif features is None:
                order = torch.randperm(len(places), generator=random)[:share]
            else:
                order = herd(features[places], share)
            parts.append(arriving.take(places[order]))
        return {**client.memory, **pack_samples(Batch.concatenate(parts))} if parts else client.memory

    def share(self, classes: int) -> list[int]:
        """Return how many exemplars each of so many classes has; what is over goes to the first ones."""
        if self.settings.budget == "class":
            return [self.settings.exemplars] * classes
        of_all = self.settings.exemplars
        return [of_all // classes + (place < of_all % classes) for place in range(classes)]

    def limit(self, spec: ModelSpec) -> int:
        """Return the largest number of exemplars of a client after these tasks."""
        return self.settings.exemplars * (sum(map(len, spec.tasks)) if self.settings.budget == "class" else 1)


def herd(features: Tensor, count: int) -> Tensor:
    """Return the places of `count` samples of a class, the best first, from its features [n, F]."""
    directions = normalize(features.double())
    return select_by_herding(directions, count, directions.mean(0), directions[:0])


def list_classes(samples: Batch) -> list[tuple[int, int]]:
    """Return (task, label) of each class of each task that is stored, in the order in which they came."""
    pairs = zip(samples.tasks.tolist(), samples.labels.tolist(), strict=True)
    return list(dict.fromkeys(pairs))


def find_class(samples: Batch, task: int, label: int) -> Tensor:
    """Return the places of a task's samples of a class, on the CPU."""
    return ((samples.tasks == task) & (samples.labels == label)).nonzero().flatten().cpu()


def iterate_joined_epochs(client: Client, stored: Batch | None) -> Iterator[Iterator[Batch]]:
    """Yield the round's local epochs over the client's rows and stored raw samples, shuffled together.

    Without stored samples they are the client's own, to the bit.
    """
    if stored is None:
        yield from client.yield_epochs()
        return
    random = client.make_generator("batches")
    for _ in range(client.run.params.federation.local_epochs):
        yield _join_epoch(client, stored, random)


def _join_epoch(client: Client, stored: Batch, random: torch.Generator) -> Iterator[Batch]:
    count, batches = len(client.rows), client.run.batches
    order = torch.randperm(count + len(stored.labels), generator=random)
    augmenting = batches.make_device_generator(random)
    for places in order.split(client.run.params.federation.batch_size):
        rows = batches.read_raw(client.rows.take(places[places < count].numpy()))
        raw = Batch.concatenate([rows, stored.take(places[places >= count] - count)])
        yield batches.augment_raw(raw, augmenting)


def iterate_stored_epochs(client: Client, samples: Batch, epochs: int) -> Iterator[Iterator[Batch]]:
    """Yield epochs over stored raw samples alone, each in an order of its own."""
    random, batches = client.make_generator("tuning"), client.run.batches
    augmenting = batches.make_device_generator(random)
    for _ in range(epochs):
        order = torch.randperm(len(samples.labels), generator=random)
        size = client.run.params.federation.batch_size
        yield (batches.augment_raw(samples.take(places), augmenting) for places in order.split(size))
