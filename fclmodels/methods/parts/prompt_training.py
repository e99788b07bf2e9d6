"""Training of prompts (PIP section 3.2, Algorithm 2): clients train prompts, keys and head, the server averages them.

The loss is eq. 5: cross entropy + lambda sum_k (1 - cosine of a sample's query and the key of its k-th prompt).

memory: `taken` {task, rounds}: how often the client has taken part in the task; `personal`, its head where each keeps
its own.
"""

from collections.abc import Callable
from typing import Any, Literal

from pydantic import Field, NonNegativeFloat
from torch import Tensor

from fclmodels.data.batches import Batch
from fclmodels.federation.client import Client
from fclmodels.federation.method import Obstacle
from fclmodels.federation.training.local_training import LocalTraining
from fclmodels.methods.parts.frozen_backbone import FrozenBackbone
from fclmodels.settings.base import Settings as BaseSettings


class PromptSettings(BaseSettings):
    matching: NonNegativeFloat = Field(1.0, le=1e6, description="lambda, weight of the key matching loss (eq. 5)")
    head: Literal["shared", "own"] = Field(
        "shared", description="heads are averaged in each round, or each client keeps its own (Table 5)"
    )
    omega: Literal["samples", "participation"] = Field(
        "samples",
        description="what a client counts: federation.weighting, or that times its rounds in the task (eq. 12, 13)",
    )


class PromptTraining:
    """The loss of prompts, and a client's weight by its rounds in the task."""

    def __init__(self, settings: PromptSettings, backbone: FrozenBackbone) -> None:
        self.settings = settings
        self.backbone = backbone
        self.run = backbone.run
        self.counts_rounds = settings.omega == "participation"

    @property
    def obstacle_to_noise(self) -> Obstacle | None:
        return Obstacle("weighs clients by participation", "Set omega: samples") if self.counts_rounds else None

    def advice(self) -> list[str]:
        lines, model = self.backbone.advice(), self.run.params.model
        first, last = self.run.spec(1), self.run.spec(len(self.run.splits.tasks))
        if first.head == "growing" and model.loss_over == "seen" and last.label_count > first.label_count:
            lines.append(
                "model.loss_over: seen lets a new task push down earlier ones' classes; the papers train over the "
                "task's classes alone (model.loss_over: task)"
            )
        return lines

    def weight(self, client: Client) -> float:
        """Return a client's weight in the average."""
        return client.weight * (count_rounds_taken(client) if self.counts_rounds else 1)

    def most_rounds(self, task: int) -> int:
        """Return the largest factor of a client's weight in a task."""
        return self.run.rounds(task) if self.counts_rounds else 1

    def memory(self, client: Client) -> dict[str, Any]:
        """Return the part of a client's memory about its rounds."""
        return {"taken": {"task": client.task, "rounds": count_rounds_taken(client)}}

    def loss(
        self, training: LocalTraining, batch: Batch, head_loss: Callable[[LocalTraining, Tensor, Tensor], Tensor]
    ) -> Tensor:
        """Return eq. 5, with the loss of the head on a batch's features [B, F] and labels [B]."""
        features = self.backbone.compute_features(training.network, batch, training.client.task)
        loss = head_loss(training, features.features, batch.labels)
        if features.distance is not None:
            loss = loss + self.settings.matching * features.distance
        return loss


def count_rounds_taken(client: Client) -> int:
    """Return rho: the rounds of the task that the client takes part in, this one too."""
    before = client.memory.get("taken", {"task": -1, "rounds": 0})
    return 1 + (before["rounds"] if before["task"] == client.task else 0)
