"""The anchor: the final model of the last task, which a task's training stays near.

knowledge: `anchor` {name: W*_{t-1}}, the global weights as the previous task left them, with that task's own shapes
(a growing head had fewer rows then). There is none during the first task.

Weights that the last task's model did not have, new rows of a head that grows and a new task's own head, learn freely;
or they are anchored where they start the task, by setting (SPECIAL's F.6 leaves it open).
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Literal

import torch
from pydantic import Field
from torch import Tensor

from fclmodels.backbones.layers.norms import STATISTICS, Blended, list_statistics
from fclmodels.federation.messages import Part, Payload
from fclmodels.federation.server import Server
from fclmodels.federation.training.local_training import LocalTraining
from fclmodels.methods.fedavg import FedAvg, join_new_rows

Anchor = dict[str, Tensor]


class AnchorSettings(FedAvg.Settings):
    """Settings of methods that hold a model near the last task's."""

    batch_norm: Blended = Field(  # type: ignore[assignment]  # more values than FedAvg has
        "blend",
        description="running statistics: blend with the anchor's like weights; average over clients and do not "
        "blend; local: each client's own; batch: none; frozen after task 1",
    )
    new_rows: Literal["free", "anchored"] = Field(
        "free", description="rows and heads of new classes: free; or anchored where they start their first task"
    )


def anchor_to(server: Server, last: Server, new_rows: str = "free") -> Server:
    """Return the server that starts a task, anchored to the model that the last task left, and its new rows or not."""
    if server.task == 0:
        return server
    anchor = last.weights if new_rows == "free" else server.weights
    return replace(server, knowledge={**server.knowledge, "anchor": anchor})


def blend_with_anchor(server: Server, share: float, statistics: bool) -> Server:
    """Return the server with (1 - share) W + share W*; during the first task, or for a share of 0, as it is.

    statistics: whether running statistics are blended too.
    """
    if share == 0 or "anchor" not in server.knowledge:
        return server
    anchor = {n: a for n, a in server.knowledge["anchor"].items() if statistics or not n.endswith(STATISTICS)}
    return replace(server, weights=blend(server.weights, anchor, share))


def anchor_payload(server: Server) -> Payload:
    """Return the anchor as a part that clients download once a task; nothing during the first task."""
    if "anchor" not in server.knowledge:
        return {}
    return {"anchor": Part("weights", server.knowledge["anchor"], once=True)}


class AnchoredParameters:
    """The anchor of a client's parameters, and of its running statistics where these blend too."""

    def __init__(self, training: LocalTraining, payload: Payload, statistics: bool) -> None:
        anchor: Anchor = payload["anchor"].tensors if "anchor" in payload else {}
        self.anchor = {name: anchor[name] for name in training.parameters if name in anchor}  # W*, by name
        # The rows that have an anchor, as views.
        self.parameters = {
            name: flatten_rows(training.parameters[name].detach(), old) for name, old in self.anchor.items()
        }
        names = [name for name in list_statistics(training.network) if statistics and name in anchor]
        self.statistics = [training.network.get_buffer(name) for name in names]
        self.statistics_anchor = [anchor[name] for name in names]

    def pull(self, share: float) -> None:
        """Move parameters and statistics by this share of their way to the anchor, in place."""
        if self.anchor:
            torch._foreach_lerp_(list(self.parameters.values()), list(self.anchor.values()), share)
        self.pull_statistics(share)

    def pull_statistics(self, share: float) -> None:
        if self.statistics:
            torch._foreach_lerp_(self.statistics, self.statistics_anchor, share)


def flatten_rows(weights: Tensor, anchor: Tensor) -> Tensor:
    """Return the rows that the anchor has: all, or the old rows of a head that has grown."""
    return weights if weights.shape == anchor.shape else weights[: len(anchor)]


def blend(weights: Mapping[str, Tensor], anchor: Mapping[str, Tensor], share: float) -> dict[str, Tensor]:
    """Return (1 - share) W + share W* of all floating tensors that the anchor has; the rest as it is."""
    names = [name for name, old in anchor.items() if old.is_floating_point()]
    before, old = [flatten_rows(weights[name], anchor[name]) for name in names], [anchor[name] for name in names]
    after = zip(names, torch._foreach_lerp(before, old, share), strict=True)
    return {**weights, **{name: join_new_rows(w, weights[name]) for name, w in after}}


def measure_distance(weights: Mapping[str, Tensor], anchor: Mapping[str, Tensor]) -> float:
    """Return ||W - W*|| over the parameters that the anchor has, running statistics left out."""
    names = [name for name, old in anchor.items() if old.is_floating_point() and not name.endswith(STATISTICS)]
    moved = torch._foreach_sub(
        [flatten_rows(weights[name], anchor[name]) for name in names], [anchor[name] for name in names]
    )
    return float(torch.stack(torch._foreach_norm(moved)).norm())
