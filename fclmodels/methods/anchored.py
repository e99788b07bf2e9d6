"""What methods share that hold a task's training near the final model of the task before it.

knowledge: `anchor` {name: W*_{t-1}}, the global weights as the previous task left them, with that task's own shapes
(a growing head had fewer rows then). There is none during the first task.

What has no anchor learns freely: new rows of a head that grows, and a new task's own head. SPECIAL's F.6 leaves that
open; it is our choice.
"""

from collections.abc import Mapping
from dataclasses import replace

import torch
from pydantic import Field
from torch import Tensor

from fclmodels.backbones.batch_norm import Blended
from fclmodels.backbones.network import Network
from fclmodels.backbones.norms import STATISTICS
from fclmodels.federation.client import Client
from fclmodels.federation.local import LocalTraining
from fclmodels.federation.messages import Part, Payload
from fclmodels.federation.server import Server
from fclmodels.methods.fedavg import FedAvg

Anchor = dict[str, Tensor]


class Anchored(FedAvg):
    def start_task(self, server: Server, task: int) -> Server:
        started = super().start_task(server, task)
        if task == 0:
            return started
        return replace(started, knowledge={**started.knowledge, "anchor": server.weights})


class AnchoredOnServer(Anchored):
    """The server blends its weights with the anchor; clients learn nothing of it."""

    class Settings(Anchored.Settings):
        batch_norm: Blended = Field(  # type: ignore[assignment]
            "blend",
            description="running statistics: blend with the anchor's like weights; average over clients and do not "
            "blend; local: each client's own; batch: none; frozen after task 1",
        )

    settings: Settings

    def blended(self, server: Server, share: float) -> Server:
        """The server with (1 - share) W + share W*; during the first task, or for a share of 0, as it is."""
        if share == 0 or "anchor" not in server.knowledge:
            return server
        whole = self.settings.batch_norm == "blend"
        anchor = {n: a for n, a in server.knowledge["anchor"].items() if whole or not n.endswith(STATISTICS)}
        return replace(server, weights=blend(server.weights, anchor, share))


class AnchoredOnClients(Anchored):
    """The anchor travels to the clients, once a task; W*_{t-1} is then in the payload as `anchor`."""

    def payload(self, server: Server) -> Payload:
        payload = super().payload(server)
        if "anchor" in server.knowledge:
            payload["anchor"] = Part("weights", server.knowledge["anchor"], once=True)
        return payload

    def training(self, client: Client, payload: Payload, network: Network, start: dict[str, Tensor]) -> LocalTraining:
        anchor = payload["anchor"].tensors if "anchor" in payload else {}
        return AnchoredTraining(self, client, network, start, anchor)


class AnchoredTraining(LocalTraining):
    """A client's training with W* at hand, for what it trains: `anchored` are those parameters, as views."""

    def __init__(
        self, method: Anchored, client: Client, network: Network, start: dict[str, Tensor], anchor: Anchor
    ) -> None:
        super().__init__(method, client, network, start)
        self.anchor = {name: anchor[name] for name in self.parameters if name in anchor}
        self.anchored = {name: rows(self.parameters[name].detach(), old) for name, old in self.anchor.items()}


def rows(weights: Tensor, anchor: Tensor) -> Tensor:
    """What the anchor has of them: all, or the old rows of a head that has grown."""
    return weights if weights.shape == anchor.shape else weights[: len(anchor)]


def blend(weights: Mapping[str, Tensor], anchor: Mapping[str, Tensor], share: float) -> dict[str, Tensor]:
    """(1 - share) W + share W*, of all floating tensors that the anchor has; the rest as it is."""
    names = [name for name, old in anchor.items() if old.is_floating_point()]
    before, old = [rows(weights[name], anchor[name]) for name in names], [anchor[name] for name in names]
    after = zip(names, torch._foreach_lerp(before, old, share), strict=True)
    return {**weights, **{name: beside_new_rows(w, weights[name]) for name, w in after}}


def beside_new_rows(old: Tensor, weights: Tensor) -> Tensor:
    """What `rows` has taken of some weights, changed, with the rest of them."""
    return old if old.shape == weights.shape else torch.cat([old, weights[len(old) :]])


def distance(weights: Mapping[str, Tensor], anchor: Mapping[str, Tensor]) -> float:
    """||W - W*|| over the parameters that the anchor has, running statistics left out."""
    names = [name for name, old in anchor.items() if old.is_floating_point() and not name.endswith(STATISTICS)]
    moved = torch._foreach_sub([rows(weights[name], anchor[name]) for name in names], [anchor[name] for name in names])
    return float(torch.stack(torch._foreach_norm(moved)).norm())
