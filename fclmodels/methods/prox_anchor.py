"""FedProx to the last task's model: what SPECIAL's objective (Eq. 4) asks of a client, by its gradient.

From the second task on the local objective is F_k(w) + mu/2 ||w - W*||^2; its gradient gains mu (w - W*). Under plain
SGD SPECIAL-C with eta and c is this with the learning rate eta / (1 + c) and mu = c / eta.
"""

import torch
from pydantic import Field

from fclmodels.federation.local import LocalTraining
from fclmodels.methods.anchored import AnchoredOnClients, AnchoredTraining, rows


class ProxAnchor(AnchoredOnClients):
    """FedAvg with a proximal term that holds clients near the last task's model."""

    name = "prox-anchor"
    paper = "none: FedProx's term, to the anchor of SPECIAL"

    class Settings(AnchoredOnClients.Settings):
        mu: float = Field(0.1, ge=0, le=1e6, description="weight of the proximal term")

    settings: Settings

    @torch.no_grad()
    def gradient(self, training: LocalTraining) -> None:
        assert isinstance(training, AnchoredTraining)
        gradients = training.gradients
        for name, anchor in training.anchor.items():
            if name in gradients:
                rows(gradients[name], anchor).add_(training.anchored[name] - anchor, alpha=self.settings.mu)
