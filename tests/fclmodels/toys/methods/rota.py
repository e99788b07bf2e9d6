"""A method's own choice of clients: those that have been chosen least often go first.

knowledge: `turns`, how often each client has answered.
"""

from collections import Counter
from collections.abc import Collection
from dataclasses import replace

import torch

from fclmodels.federation.engine.replies import Replies
from fclmodels.federation.server import Server
from fclmodels.methods.fedavg import FedAvg


class Rota(FedAvg):
    """FedAvg whose clients take turns."""

    name = "rota"
    paper = "none"

    def choose_clients(
        self, server: Server, round: int, available: tuple[int, ...], count: int, random: torch.Generator
    ) -> Collection[int]:
        turns = server.knowledge.get("turns", {})
        order = torch.randperm(len(available), generator=random).tolist()
        return sorted(available, key=lambda client: (turns.get(str(client), 0), order[available.index(client)]))[:count]

    def aggregate(self, server: Server, replies: Replies) -> Server:
        turns = Counter(server.knowledge.get("turns", {}))
        turns.update(str(client) for client in replies.clients)
        knowledge = {"turns": dict(sorted(turns.items()))}
        return replace(super().aggregate(server, replies), knowledge=knowledge)
