"""Federated prompts (PIP section 3.2, Algorithm 2): clients train prompts, keys and head, the server averages them.

The loss is eq. 5: cross entropy + lambda (1 - cosine of the samples' queries and their prompts' keys).

memory: `taken` {task, rounds}: how often the client has taken part in the task; `head`, where each keeps its own.
"""

import hashlib
import json
from collections.abc import Iterator
from dataclasses import replace
from functools import cached_property
from typing import Literal

import torch
from pydantic import Field, NonNegativeFloat
from torch import Tensor

from fclmodels import state
from fclmodels.backbones.network import Network
from fclmodels.backbones.queries import kept
from fclmodels.data.batches import Batch
from fclmodels.federation.client import Client
from fclmodels.federation.executor import torch_threads
from fclmodels.federation.local import LocalTraining
from fclmodels.federation.messages import Part, Payload, Reply
from fclmodels.federation.server import Server
from fclmodels.methods.base import Memory
from fclmodels.methods.frozen import Frozen, backbone_of
from fclmodels.settings import AugmentSettings

QUERIED = 256  # samples that pass the frozen backbone at once


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

    def advice(self) -> list[str]:
        lines = super().advice()
        if not self.shown_as_prepared:
            lines.append("augment changes pixels: each step asks the frozen backbone for its queries anew")
        first, last = self.run.spec(1), self.run.spec(len(self.run.splits.tasks))
        if self.loss_is_over_seen(first) and last.seen > first.seen:
            lines.append(
                "model.loss_over: seen lets a new task push down earlier ones' classes; the papers train over the "
                "task's classes alone (model.loss_over: task)"
            )
        return lines

    # Queries are of the frozen backbone alone, so they are computed once a data set.

    def setup(self) -> Server:
        server = super().setup()
        _ = self.queries  # here, so that workers find them
        return server

    @property
    def shown_as_prepared(self) -> bool:
        """Whether a client's network sees every sample as it was prepared, in each epoch and task."""
        return self.run.params.augment == AugmentSettings() and all(
            t.permutation is None for t in self.run.splits.tasks
        )

    @cached_property
    def queries(self) -> Tensor | None:
        """[N, F] of all prepared samples; None where clients see other pixels, or there is nowhere to keep them."""
        if self.run.home is None or not self.shown_as_prepared:
            return None
        splits = self.run.splits

        def compute() -> Iterator[Tensor]:
            nothing = torch.zeros(QUERIED, dtype=torch.int64, device=self.run.device)
            for images in splits.images.split(QUERIED):
                labels = nothing[: len(images)]
                yield self.frozen(self.run.batches.ready(Batch(images.to(self.run.device), labels, labels)).inputs)

        about = [state.digest(dict(self.frozen.state_dict())), splits.prepared_digest, splits.mean, splits.std]
        digest = hashlib.sha256(json.dumps(about).encode()).hexdigest()
        with torch_threads(1), torch.inference_mode():  # the same to the bit whoever computes them
            return kept(self.run.home / "queries", digest, (len(splits.images), self.frozen.features), compute)

    # On a client.

    def train(self, client: Client, payload: Payload) -> tuple[Reply, Memory]:
        reply, memory = super().train(client, payload)
        if not self.personal:
            return reply, memory
        update = {n: t for n, t in reply.parts["update"].tensors.items() if not n.startswith("heads.")}
        return replace(reply, parts={**reply.parts, "update": Part("update", update)}), memory

    def client_weight(self, client: Client) -> float:
        return client.weight * (taken(client) if self.settings.omega == "participation" else 1)

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
        queries = None if self.queries is None else self.queries[batch.samples].to(batch.inputs.device)
        found = backbone_of(network).prompted(batch.inputs, task, queries)
        features, labels = self.enriched(training, found.features, batch.labels)
        loss = self.cross_entropy(network, features, labels, task)
        if found.similarity is not None:
            loss = loss + self.settings.matching * (1 - found.similarity)
        return loss

    def enriched(self, training: LocalTraining, features: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        """The features [B, F] and labels [B] that the head learns from."""
        return features, labels


def taken(client: Client) -> int:
    """rho: rounds of the task that the client takes part in, this one too."""
    before = client.memory.get("taken", {"task": -1, "rounds": 0})
    return 1 + (before["rounds"] if before["task"] == client.task else 0)
