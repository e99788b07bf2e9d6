"""FedProx to the last task's model: SPECIAL's objective (Eq. 4) on the clients, by its gradient.

From the second task on the local objective is F_k(w) + mu/2 ||w - W*||^2; its gradient gains mu (w - W*). Under plain
SGD SPECIAL-C with eta and c is this with the learning rate eta / (1 + c) and mu = c / eta. Where running statistics
blend, they go the share eta mu of their way to the anchor's in each step, as weights do.
"""

import torch
from pydantic import Field

from fclmodels.backbones.layers.norms import Blended
from fclmodels.federation.messages import Payload
from fclmodels.federation.server import Server
from fclmodels.federation.training.local_training import LocalTraining
from fclmodels.methods.fedavg import FedAvg
from fclmodels.methods.parts.anchor import AnchoredParameters, AnchorSettings, anchor_payload, anchor_to, flatten_rows


class ProxAnchor(FedAvg):
    """FedAvg with a proximal term that holds clients near the last task's model."""

    name = "prox-anchor"
    paper = "none: FedProx's term, to the anchor of SPECIAL"

    class Settings(AnchorSettings):
        batch_norm: Blended = Field(
            "average",
            description="running statistics: average over clients; blend: with the anchor's in each local step too; "
            "local: each client's own; batch: none; frozen after task 1",
        )
        mu: float = Field(0.1, ge=0, le=1e6, description="weight of the proximal term")

    settings: Settings

    def start_task(self, server: Server, task: int) -> Server:
        return anchor_to(super().start_task(server, task), server, self.settings.new_rows)

    def make_payload(self, server: Server) -> Payload:
        return {**super().make_payload(server), **anchor_payload(server)}

    def start_training(self, training: LocalTraining, payload: Payload) -> None:
        training.add(AnchoredParameters(training, payload, self.settings.batch_norm == "blend"))

    @torch.no_grad()
    def change_gradients(self, training: LocalTraining) -> None:
        anchored, gradients = training.find_added(AnchoredParameters), training.gradients
        if anchored is None:
            return
        for name, anchor in anchored.anchor.items():
            if name in gradients:
                flatten_rows(gradients[name], anchor).add_(anchored.parameters[name] - anchor, alpha=self.settings.mu)
        anchored.pull_statistics(min(1.0, training.lr * self.settings.mu))
