"""Replay memory: clients keep some samples of each task and replay them later (ER+FL, A-GEM+FL).

memory: `samples`, prepared pixels [m, C, H, W] or token ids, with their labels [m] and tasks [m]; `seen`, the number of
samples that the client has had. A task's samples arrive once, when it has ended; reservoir sampling makes the memory a
uniform sample of all samples so far, whichever tasks the client missed. With `memory_of: each-task` each task adds as
many samples of its own, so that the memory grows. It never leaves the client.
"""

from collections.abc import Callable
from typing import Literal

import torch
from pydantic import Field, PositiveInt
from torch import Tensor

from fclmodels.backbones.model.network import Network
from fclmodels.data.batches import Batch
from fclmodels.federation.client import Client
from fclmodels.federation.engine.cohort import Cohort
from fclmodels.federation.exchange import Answer, Exchange, Memory
from fclmodels.federation.messages import Payload
from fclmodels.federation.run_context import Run
from fclmodels.federation.server import Server
from fclmodels.federation.training.local_training import LocalTraining
from fclmodels.methods.fedavg import FedAvg
from fclmodels.numerics.reservoir import reservoir
from fclmodels.settings.base import Settings as BaseSettings


class ReplaySettings(BaseSettings):
    memory: PositiveInt = Field(20, le=1_000_000, description="samples of earlier tasks that each client keeps")
    memory_of: Literal["all-tasks", "each-task"] = Field(
        "all-tasks",
        description="whether all tasks share that number, as in a reservoir, or each adds it (FOT)",
    )


class Replaying(FedAvg):
    """FedAvg whose clients store a reservoir of their samples."""

    class Settings(ReplaySettings, FedAvg.Settings):
        pass

    settings: Settings
    trains_earlier_heads = True

    def __init__(self, settings: Settings, run: Run) -> None:
        super().__init__(settings, run)
        self.store = self.declare(Exchange("remember", lambda: {}, self.store_samples))

    def finish_task(self, server: Server, cohort: Cohort) -> Server:
        cohort.ask(self.store)
        return server

    def store_samples(self, client: Client, payload: Payload) -> Answer:
        """Return the memory with samples of the task; the answer itself is empty."""
        return Answer({}, add_task(client, self.settings))

    def start_training(self, training: LocalTraining, payload: Payload) -> None:
        start_replay(training)


def start_replay(training: LocalTraining) -> None:
    """Let a training replay what its client has stored, if anything."""
    samples = unpack_samples(training.client.memory)
    if samples is not None:
        training.add(Replay(training.client, samples))


def descend_both(
    method: FedAvg, training: LocalTraining, batch: Batch, loss_of_new: Callable[[Network, Tensor, Tensor, int], Tensor]
) -> Tensor:
    """Return the mean of a batch's loss and the cross entropy of as many replayed samples, which pass as one batch.

    loss_of_new: of network, features, labels and task. It is the loss by itself where nothing is stored.
    """
    replay, network, task = training.find_added(Replay), training.network, training.client.task
    if replay is None:
        return loss_of_new(network, training.compute_features(batch), batch.labels, task)
    replayed = replay.draw()
    features = training.compute_features(batch, replayed.inputs)
    new, old = features.split([len(batch.labels), len(replayed.labels)])
    loss = loss_of_new(network, new, batch.labels, task)
    return (loss + method.compute_cross_entropy_by_task(network, old, replayed.labels, replayed.tasks)) / 2


class Replay:
    """Draws batches from the samples that a client has stored, in one training."""

    def __init__(self, client: Client, samples: Batch) -> None:
        self.client = client
        self.samples = samples
        self.random = client.make_generator("replay")
        self.augmenting = client.run.batches.make_device_generator(self.random)

    def draw(self, count: int | None = None) -> Batch:
        return draw_batch(self.client, self.samples, self.random, self.augmenting, count)


def add_task(client: Client, settings: ReplaySettings) -> Memory:
    """Return a client's memory with samples of its task."""
    before, arriving = client.memory.get("seen", 0), len(client.rows)
    random, most = client.make_generator("reservoir"), settings.memory
    if settings.memory_of == "each-task":
        old = unpack_samples(client.memory)
        stored = 0 if old is None else len(old.labels)
        places = torch.cat([torch.arange(stored), stored + reservoir(0, arriving, most, random)])
    else:
        places = reservoir(before, arriving, most, random)
    samples = pack_samples(select_samples(client, places))
    return {**client.memory, **samples, "seen": before + arriving}


def draw_batch(
    client: Client, samples: Batch, random: torch.Generator, augmenting: torch.Generator, count: int | None = None
) -> Batch:
    """Return so many stored samples (None: as a batch has; or all), without replacement and ready to train on."""
    count = count or client.run.params.federation.batch_size
    places = torch.randperm(len(samples.labels), generator=random)[:count]
    return client.run.batches.augment_raw(samples.take(places), augmenting)


def select_samples(client: Client, places: Tensor) -> Batch:
    """Return the client's samples at these places, numbered over those that it has stored and then the task's."""
    old = unpack_samples(client.memory)
    count = 0 if old is None else len(old.labels)
    new = client.run.batches.read_raw(client.rows.take((places[places >= count] - count).numpy()))
    return new if old is None else Batch.concatenate([old.take(places[places < count]), new])


def pack_samples(samples: Batch) -> Memory:
    """Return raw samples as a client remembers them: labels and tasks in the manifest's types."""
    return {"samples": {"raw": samples.inputs, "labels": samples.labels.int(), "tasks": samples.tasks.short()}}


def unpack_samples(memory: Memory) -> Batch | None:
    """Return the raw samples that a client remembers."""
    samples = memory.get("samples")
    return samples and Batch(samples["raw"], samples["labels"].long(), samples["tasks"].long())
