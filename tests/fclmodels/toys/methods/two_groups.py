"""A model for each of two groups of clients: what a client downloads is its group's, and groups are averaged apart.

knowledge: `groups`, the weights of each group. The server's own model is their mean.
"""

from dataclasses import replace

from torch import Tensor

from fclmodels.federation.engine.replies import Replies
from fclmodels.federation.exchange import Form
from fclmodels.federation.messages import Part, Payload
from fclmodels.federation.server import Server
from fclmodels.methods.fedavg import FedAvg

GROUPS = ("even", "odd")


class TwoGroups(FedAvg):
    """FedAvg among clients of even numbers, and among those of odd ones."""

    name = "two-groups"
    paper = "none"

    @property
    def is_personal(self) -> bool:
        return True

    def start_task(self, server: Server, task: int) -> Server:
        started = super().start_task(server, task)
        before = server.knowledge.get("groups", dict.fromkeys(GROUPS, server.weights))
        grown = {name: self.network.grow(before[name], server.spec, started.spec) for name in GROUPS}
        return replace(started, knowledge={"groups": grown})

    def make_payload(self, server: Server) -> Payload:
        return {name: part for name, part in super().make_payload(server).items() if name != "weights"}

    def make_own_payload(self, server: Server, client: int) -> Payload:
        return {"weights": Part("weights", server.knowledge["groups"][GROUPS[client % 2]])}

    def make_update_form(self, task: int, round: int) -> Form:
        return {name: replace(part, least="group") for name, part in super().make_update_form(task, round).items()}

    def aggregate(self, server: Server, replies: Replies) -> Server:
        groups = {}
        for number, name in enumerate(GROUPS):
            members = [client for client in replies.clients if client % 2 == number]
            groups[name] = self.move(server.knowledge["groups"][name], replies, members)
        mean = {name: (groups["even"][name] + groups["odd"][name]) / 2 for name in server.weights}
        return replace(server, weights=mean, knowledge={"groups": groups})

    def move(self, weights: dict[str, Tensor], replies: Replies, members: list[int]) -> dict[str, Tensor]:
        """Return a group's weights after a round; the same where none of it has answered."""
        if not members:
            return weights
        total = replies.sum_among("weight", members)["weight"].item()
        update = replies.sum_among("update", members)
        return {**weights, **{name: weights[name].add(change, alpha=1 / total) for name, change in update.items()}}
