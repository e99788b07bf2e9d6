"""Training of prompts (PIP section 3.2, Algorithm 2): clients train prompts, keys and head, the server averages them.

The loss is eq. 5: cross entropy + lambda sum_k (1 - cosine of a sample's query and the key of its k-th prompt).

memory: `taken` {task, rounds, before}: how often the client has taken part in the task, and in tasks before;
`personal`, its head where each keeps its own.
"""

from collections.abc import Callable
from typing import Any, Literal

import torch
from pydantic import Field, NonNegativeFloat
from torch import Tensor

from fclmodels.backbones.model.prompt_adapters import restart_expert
from fclmodels.data.batches import Batch
from fclmodels.federation.client import Client
from fclmodels.federation.messages import Payload
from fclmodels.federation.method import Obstacle
from fclmodels.federation.training.local_training import LocalTraining
from fclmodels.methods.parts.frozen_backbone import FrozenBackbone, HeadPolicy
from fclmodels.settings.base import Settings as BaseSettings


class PromptSettings(BaseSettings):
    profile: Literal["paper", "release"] | None = Field(
        None, description="settings that are not given are the paper's, or its release's; null: the defaults"
    )
    matching: NonNegativeFloat = Field(1.0, le=1e6, description="lambda, weight of the key matching loss (eq. 5)")
    head: HeadPolicy = Field(
        "shared",
        description="heads are averaged in each round; own: each client keeps its own (Table 5); task-end: averaged in "
        "a task's last round alone, as in the release",
    )
    omega: Literal["samples", "participation", "all-participation"] = Field(
        "samples",
        description="what a client counts: federation.weighting, or that times its rounds in the task (the release), "
        "or times all its rounds until now (eq. 12, 13)",
    )


class PromptTraining:
    """The loss of prompts, and a client's weight by its rounds in the task."""

    def __init__(self, settings: PromptSettings, backbone: FrozenBackbone) -> None:
        self.settings = settings
        self.backbone = backbone
        self.run = backbone.run
        self.counts_rounds = settings.omega != "samples"

    @property
    def obstacle_to_noise(self) -> Obstacle | None:
        return Obstacle("weighs clients by participation", "Set omega: samples") if self.counts_rounds else None

    def list_advice(self) -> list[str]:
        lines, params = self.backbone.list_advice(), self.run.params
        model, federation = params.model, params.federation
        if self.settings.profile == "release" and (federation.weighting, params.optimizer.clip) != ("uniform", 1.0):
            lines.append("profile: release goes with federation.weighting: uniform and optimizer.clip: 1.0")
        first, last = self.run.make_spec(1), self.run.make_spec(len(self.run.splits.tasks))
        if first.head == "growing" and model.loss_over == "seen" and last.label_count > first.label_count:
            lines.append(
                "model.loss_over: seen lets a new task push down earlier ones' classes; the papers train over the "
                "task's classes alone (model.loss_over: task)"
            )
        return lines

    def weigh(self, client: Client) -> float:
        """Return a client's weight in the average: times rho, the rounds that it has taken part in, this one too."""
        joined = count_rounds(client)
        rho = {
            "samples": 1,
            "participation": joined["rounds"],
            "all-participation": joined["before"] + joined["rounds"],
        }
        return client.weight * rho[self.settings.omega]

    def bound_weight(self, task: int) -> int:
        """Return the largest factor of a client's weight in a task."""
        before = sum(self.run.count_rounds(earlier) for earlier in range(task))
        most = {"samples": 1, "participation": self.run.count_rounds(task)}
        return most.get(self.settings.omega, before + self.run.count_rounds(task))

    def make_memory(self, client: Client) -> dict[str, Any]:
        """Return the part of a client's memory about its rounds."""
        return {"taken": count_rounds(client)}

    @torch.no_grad()
    def start(self, training: LocalTraining, payload: Payload) -> None:
        """Put the head and the expert in place that a round starts from; updates are from what was downloaded on."""
        downloaded, client = payload["weights"].tensors, training.client
        if self.settings.head == "task-end" and count_rounds(client)["rounds"] == 1:
            for name in self.backbone.list_personal_names(training.network):
                training.network.get_parameter(name).copy_(downloaded[name])
        restart_expert(training.network, self.backbone.adapter, client.task)
        training.start = {**training.start, **downloaded}

    def compute_loss(
        self, training: LocalTraining, batch: Batch, head_loss: Callable[[LocalTraining, Tensor, Tensor], Tensor]
    ) -> Tensor:
        """Return eq. 5, with the loss of the head on a batch's features [B, F] and labels [B]."""
        features = self.backbone.compute_features(training.network, batch, training.client.task)
        loss = head_loss(training, features.features, batch.labels)
        if features.distance is not None:
            loss = loss + self.settings.matching * features.distance
        return loss


def count_rounds(client: Client) -> dict[str, int]:
    """Return the rounds of the task that a client has taken part in, this one too, and those of tasks before."""
    joined = client.memory.get("taken", {"task": client.task, "rounds": 0, "before": 0})
    if joined["task"] == client.task:
        return {**joined, "rounds": joined["rounds"] + 1}
    return {"task": client.task, "rounds": 1, "before": joined["before"] + joined["rounds"]}
