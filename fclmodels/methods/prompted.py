"""Federated prompts (PIP section 3.2, Algorithm 2): clients train prompts, keys and head, the server averages them.

The loss is eq. 5: cross entropy + lambda sum_k (1 - cosine of a sample's query and the key of its k-th prompt).

memory: `taken` {task, rounds}: how often the client has taken part in the task; `head`, where each keeps its own.
"""

from dataclasses import replace
from typing import Literal

import torch
from pydantic import Field, NonNegativeFloat
from torch import Tensor

from fclmodels.backbones.network import Network
from fclmodels.data.batches import Batch
from fclmodels.federation.client import Client
from fclmodels.federation.local import LocalTraining
from fclmodels.federation.messages import Payload, Reply
from fclmodels.methods.base import Memory
from fclmodels.methods.frozen import Frozen


class Prompted(Frozen):
    class Settings(Frozen.Settings):
        matching: NonNegativeFloat = Field(1.0, le=1e6, description="lambda, weight of the key matching loss (eq. 5)")
        head: Literal["shared", "own"] = Field(
            "shared", description="heads are averaged in each round, or each client keeps its own (Table 5)"
        )
        omega: Literal["samples", "participation"] = Field(
            "samples",
            description="what a client counts: federation.weighting, or that times its rounds in the task (eq. 12, 13)",
        )

    settings: Settings

    @property
    def personal(self) -> bool:
        return self.settings.head == "own"

    @property
    def without_bound(self) -> str | None:
        if self.settings.omega == "participation":
            return "weighs clients by participation. Set omega: samples."
        return super().without_bound

    def advice(self) -> list[str]:
        lines = super().advice()
        first, last = self.run.spec(1), self.run.spec(len(self.run.splits.tasks))
        if self.loss_is_over_seen(first) and last.seen > first.seen:
            lines.append(
                "model.loss_over: seen lets a new task push down earlier ones' classes; the papers train over the "
                "task's classes alone (model.loss_over: task)"
            )
        return lines

    # On a client.

    def train(self, client: Client, payload: Payload) -> tuple[Reply, Memory]:
        reply, memory = super().train(client, payload)
        if not self.personal:
            return reply, memory
        update = {n: t for n, t in reply.parts["update"].tensors.items() if not n.startswith("heads.")}
        without_head = replace(reply.parts["update"], tensors=update)
        return replace(reply, parts={**reply.parts, "update": without_head}), memory

    def client_weight(self, client: Client) -> float:
        return client.weight * (taken(client) if self.settings.omega == "participation" else 1)

    def updated(self, task: int) -> dict[str, Tensor]:
        return {n: t for n, t in super().updated(task).items() if not (self.personal and n.startswith("heads."))}

    def largest_weight(self, task: int) -> float:
        return super().largest_weight(task) * (self.run.rounds(task) if self.settings.omega == "participation" else 1)

    def own(self, client: Client, network: Network) -> Memory:
        memory: Memory = {"taken": {"task": client.task, "rounds": taken(client)}}
        if self.personal:
            memory["head"] = {name: p.detach().clone() for name, p in network.heads.named_parameters("heads")}
        return memory

    def whole(self, client: Client, payload: Payload) -> dict[str, Tensor]:
        """With its own head, and the server's rows of the classes that came since it has trained that."""
        sent = payload["weights"].tensors
        own = client.memory.get("head", {})
        return {
            **sent,
            **{name: torch.cat([rows.to(sent[name]), sent[name][len(rows) :]]) for name, rows in own.items()},
        }

    def loss(self, training: LocalTraining, batch: Batch) -> Tensor:
        task, network = training.client.task, training.network
        found = self.found(network, batch, task)
        loss = self.head_loss(training, found.features, batch.labels)
        if found.distance is not None:
            loss = loss + self.settings.matching * found.distance
        return loss

    def head_loss(self, training: LocalTraining, features: Tensor, labels: Tensor) -> Tensor:
        """The cross entropy of a batch's features [B, F] and labels [B]."""
        return self.cross_entropy(training.network, features, labels, training.client.task)


def taken(client: Client) -> int:
    """rho: rounds of the task that the client takes part in, this one too."""
    before = client.memory.get("taken", {"task": -1, "rounds": 0})
    return 1 + (before["rounds"] if before["task"] == client.task else 0)
