"""Distillation: models of earlier tasks teach the clients how to answer for old classes (LwF, FLwF-2T).

A teacher answers the client's new samples, and the student's logits shall agree with its logits for the classes that
the teacher has: the old rows of a head that grows, all rows where all tasks have the same classes, and the old tasks'
own heads, each by itself, which then train too. There are no teachers in the first task.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from pydantic import Field, PositiveFloat
from torch import Tensor
from torch.nn.functional import linear

from fclmodels.backbones.layers.norms import SharedPolicy
from fclmodels.backbones.model.network import Network, NetworkCache
from fclmodels.data.batches import Batch
from fclmodels.federation.client import Client
from fclmodels.federation.messages import Payload
from fclmodels.federation.run_context import Run
from fclmodels.federation.server import Server
from fclmodels.federation.training.local_training import LocalTraining
from fclmodels.methods.fedavg import FedAvg
from fclmodels.methods.parts.anchor import anchor_payload, anchor_to
from fclmodels.numerics.distillation import distillation_loss

Weights = dict[str, Tensor]


class Lesson(NamedTuple):
    """A teacher's weights, and the weight of its distillation loss."""

    weight: float
    weights: Weights


class Teacher:
    """A model of the past in evaluation mode; its heads have the shapes that they had then."""

    def __init__(self, network: Network, weights: Weights, loss_weight: float) -> None:
        self.backbone = network.backbone.eval()
        names = (f"heads.{head}" for head in range(len(network.heads)))
        self.heads = [(weights[f"{n}.weight"], weights[f"{n}.bias"]) for n in names if f"{n}.weight" in weights]
        self.loss_weight = loss_weight

    @torch.no_grad()
    def compute_logits(self, inputs: Tensor) -> list[Tensor]:
        """Return the logits [B, classes] of each of its heads."""
        return self.answer(self.backbone(inputs))

    @torch.no_grad()
    def answer(self, features: Tensor) -> list[Tensor]:
        """Return the logits [B, classes] of each of its heads by its own features [B, F]."""
        return [linear(features, weight, bias) for weight, bias in self.heads]


class Teachers(list[Teacher]):
    """The teachers of one client's training."""


class Distilled(FedAvg):
    """FedAvg whose clients are taught by at most two models; the last task's final model is downloaded once a task."""

    class Settings(FedAvg.Settings):
        batch_norm: SharedPolicy = Field(
            "average", description="running statistics: average over clients; batch: none; frozen after task 1"
        )
        temperature: PositiveFloat = Field(
            2.0, le=1e6, description="logits are divided by it, so that small probabilities teach too"
        )

    settings: Settings
    trains_earlier_heads = True
    list_lessons: Callable[[Client, Payload], Sequence[Lesson]]  # of a client that has downloaded this payload
    downloads_last_model = True

    def __init__(self, settings: Settings, run: Run) -> None:
        super().__init__(settings, run)
        self.teacher_networks = [NetworkCache(run.device, self.prepare_network) for _ in range(2)]

    def start_task(self, server: Server, task: int) -> Server:
        return anchor_to(super().start_task(server, task), server)

    def make_payload(self, server: Server) -> Payload:
        return {**super().make_payload(server), **(anchor_payload(server) if self.downloads_last_model else {})}

    def start_training(self, training: LocalTraining, payload: Payload) -> None:
        lessons = [lesson for lesson in self.list_lessons(training.client, payload) if lesson.weight]
        spec, start = training.network.spec, training.start
        teachers = [
            Teacher(networks.load(spec, {**start, **drop_heads(weights)}), weights, loss_weight)
            for networks, (loss_weight, weights) in zip(self.teacher_networks, lessons, strict=False)
        ]
        training.add(Teachers(teachers))

    def compute_loss(self, training: LocalTraining, batch: Batch) -> Tensor:
        network = training.network
        features = training.compute_features(batch)
        task = training.client.task
        loss = self.weigh_labels(task) * self.compute_cross_entropy(network, features, batch.labels, task)
        for teacher in training.find_added(Teachers) or ():
            answers = teacher.compute_logits(batch.inputs)
            loss = loss + teacher.loss_weight * distil_heads(network, features, answers, self.settings.temperature)
        return loss

    def weigh_labels(self, task: int) -> float:
        """Return the weight of the cross entropy with the labels."""
        return 1.0


def distil_heads(network: Network, features: Tensor, answers: Sequence[Tensor], temperature: float) -> Tensor:
    """Return the sum of the distillation losses of the heads that the teacher has (Li and Hoiem, section 3)."""
    heads = list(network.heads)[: len(answers)]
    losses = [
        distillation_loss(head(features)[:, : answer.shape[1]], answer, temperature)
        for head, answer in zip(heads, answers, strict=True)
    ]
    return torch.stack(losses).sum()


def drop_heads(weights: Weights) -> Weights:
    return {name: weight for name, weight in weights.items() if not name.startswith("heads.")}
