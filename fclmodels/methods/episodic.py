"""What methods share whose clients keep some samples of each task and replay them later (ER+FL, A-GEM+FL).

memory: `samples`, pixels [m, C, H, W] or token ids as prepared, with their labels [m] and tasks [m]; `seen`, how many
samples they were drawn from. A task's samples come in once, when it has ended; reservoir sampling makes the memory a
uniform sample of all that the client has had, whichever tasks it missed. It never leaves the client.
"""

import torch
from pydantic import Field, PositiveInt
from torch import Tensor, nn

from fclmodels.backbones.network import Network
from fclmodels.data.batches import Batch
from fclmodels.federation.client import Client
from fclmodels.federation.cohort import Cohort
from fclmodels.federation.local import LocalTraining
from fclmodels.federation.messages import Payload, Reply
from fclmodels.federation.server import Server
from fclmodels.methods.base import Memory
from fclmodels.methods.fedavg import FedAvg
from fclmodels.numerics.reservoir import reservoir


class Episodic(FedAvg):
    class Settings(FedAvg.Settings):
        memory: PositiveInt = Field(20, le=1_000_000, description="samples of earlier tasks that each client keeps")

    settings: Settings

    def finish_task(self, server: Server, cohort: Cohort) -> Server:
        cohort.ask("remember")
        return server

    def answer(self, client: Client, question: str, payload: Payload) -> tuple[Reply, Memory]:
        """The memory after the task's samples have come in; the answer itself is empty."""
        seen, arriving = client.memory.get("seen", 0), len(client.rows)
        chosen = reservoir(seen, arriving, self.settings.memory, client.generator("reservoir"))
        return Reply({}), {**client.memory, **keeping(selected(client, chosen)), "seen": seen + arriving}

    def training(self, client: Client, payload: Payload, network: Network, start: dict[str, Tensor]) -> LocalTraining:
        samples = stored(client.memory)
        if samples is None:
            return super().training(client, payload, network, start)
        return EpisodicTraining(self, client, network, start, samples)

    def trainable(self, network: Network, task: int) -> dict[str, nn.Parameter]:
        """Earlier tasks' own heads too: replayed samples go through them."""
        return {**super().trainable(network, task), **dict(network.heads.named_parameters("heads"))}


class EpisodicTraining(LocalTraining):
    """The training of a client that has samples of earlier tasks."""

    def __init__(
        self, method: Episodic, client: Client, network: Network, start: dict[str, Tensor], samples: Batch
    ) -> None:
        super().__init__(method, client, network, start)
        self.samples = samples
        self.random = client.generator("replay")
        self.augmenting = client.run.batches.augmenting(self.random)

    def replayed(self) -> Batch:
        return drawn(self.client, self.samples, self.random, self.augmenting)


def drawn(client: Client, samples: Batch, random: torch.Generator, augmenting: torch.Generator) -> Batch:
    """As many stored samples as a batch has, without replacement and ready to train on; all where there are fewer."""
    places = torch.randperm(len(samples.labels), generator=random)[: client.run.params.federation.batch_size]
    return client.run.batches.of_raw(samples.take(places), augmenting)


def selected(client: Client, chosen: Tensor) -> Batch:
    """Some of the samples that a client has, numbered over those that it keeps and then the task's."""
    old = stored(client.memory)
    held = 0 if old is None else len(old.labels)
    new = client.run.batches.raw(client.rows.take((chosen[chosen >= held] - held).numpy()))
    return new if old is None else Batch.concatenate([old.take(chosen[chosen < held]), new])


def keeping(samples: Batch) -> Memory:
    """Raw samples as a client remembers them: labels and tasks in the manifest's types."""
    return {"samples": {"raw": samples.inputs, "labels": samples.labels.int(), "tasks": samples.tasks.short()}}


def stored(memory: Memory) -> Batch | None:
    """The raw samples that a client remembers."""
    samples = memory.get("samples")
    return samples and Batch(samples["raw"], samples["labels"].long(), samples["tasks"].long())
