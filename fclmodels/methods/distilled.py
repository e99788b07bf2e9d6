"""What LwF and FLwF-2T share: models of earlier tasks teach the clients how to answer for old classes.

A teacher is shown the client's new samples. What it says of the classes that it knows, the student's logits for the
same classes are to say too: the old rows of a head that grows, all rows where all tasks have the same classes, and the
old tasks' own heads, each by itself, which then move with the rest. There are no teachers in the first task.
"""

from collections.abc import Sequence
from typing import Any

import torch
from pydantic import Field, PositiveFloat
from torch import Tensor, nn
from torch.nn.functional import linear

from fclmodels.backbones.batch_norm import SharedPolicy
from fclmodels.backbones.network import Network
from fclmodels.data.batches import Batch
from fclmodels.federation.client import Client
from fclmodels.federation.local import LocalTraining
from fclmodels.federation.messages import Payload
from fclmodels.federation.networks import Networks
from fclmodels.methods.anchored import AnchoredOnClients
from fclmodels.numerics.distillation import distillation

Weights = dict[str, Tensor]


class Teacher:
    """A model of the past in evaluation mode; its heads have the shapes that they had then."""

    def __init__(self, network: Network, weights: Weights, loudness: float) -> None:
        self.backbone = network.backbone.eval()
        names = (f"heads.{head}" for head in range(len(network.heads)))
        self.heads = [(weights[f"{n}.weight"], weights[f"{n}.bias"]) for n in names if f"{n}.weight" in weights]
        self.loudness = loudness

    @torch.no_grad()
    def logits(self, inputs: Tensor) -> list[Tensor]:
        """Of each of its heads."""
        features = self.backbone(inputs)
        return [linear(features, weight, bias) for weight, bias in self.heads]


class Distilled(AnchoredOnClients):
    class Settings(AnchoredOnClients.Settings):
        batch_norm: SharedPolicy = Field(
            "average", description="running statistics: average over clients; batch: none; frozen after task 1"
        )
        temperature: PositiveFloat = Field(
            2.0, le=1e6, description="logits are divided by it, so that small probabilities teach too"
        )

    settings: Settings

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.desks = Networks(self.run.device, self.prepare), Networks(self.run.device, self.prepare)

    def teachers(self, client: Client, payload: Payload) -> Sequence[tuple[float, Weights]]:
        """The weight of each one's lesson in the loss, and its weights; at most two."""
        raise NotImplementedError

    def training(self, client: Client, payload: Payload, network: Network, start: Weights) -> LocalTraining:
        taught = [(loudness, weights) for loudness, weights in self.teachers(client, payload) if loudness]
        teachers = [
            Teacher(desk.load(network.spec, {**start, **backbone_of(weights)}), weights, loudness)
            for desk, (loudness, weights) in zip(self.desks, taught, strict=False)
        ]
        return TaughtTraining(self, client, network, start, teachers)

    def trainable(self, network: Network, task: int) -> dict[str, nn.Parameter]:
        """Earlier tasks' own heads too."""
        return {**super().trainable(network, task), **dict(network.heads.named_parameters("heads"))}

    def loss(self, training: LocalTraining, batch: Batch) -> Tensor:
        network = training.network
        features = network.backbone(batch.inputs)
        loss = self.cross_entropy(network, features, batch.labels, training.client.task)
        # Monitors look at the loss of a training that has no teachers.
        for teacher in training.teachers if isinstance(training, TaughtTraining) else ():
            loss = loss + teacher.loudness * self.lesson(network, features, teacher.logits(batch.inputs))
        return loss

    def lesson(self, network: Network, features: Tensor, answers: Sequence[Tensor]) -> Tensor:
        """The distillation losses of the heads that the teacher has, summed as in Li and Hoiem's section 3."""
        heads = list(network.heads)[: len(answers)]
        losses = [
            distillation(head(features)[:, : answer.shape[1]], answer, self.settings.temperature)
            for head, answer in zip(heads, answers, strict=True)
        ]
        return torch.stack(losses).sum()


class TaughtTraining(LocalTraining):
    """A client's training beside its teachers, which are loaded once for the round."""

    def __init__(
        self, method: Distilled, client: Client, network: Network, start: Weights, teachers: Sequence[Teacher]
    ) -> None:
        super().__init__(method, client, network, start)
        self.teachers = teachers


def backbone_of(weights: Weights) -> Weights:
    return {name: weight for name, weight in weights.items() if not name.startswith("heads.")}
