"""FedProx: FedAvg with a proximal term to the round's global model (Li et al. 2020, Eq. 2).

The local objective is F_k(w) + mu/2 ||w - W||^2; its gradient gains mu (w - W).
"""

import torch
from pydantic import Field, NonNegativeFloat

from fclmodels.federation.training.local_training import LocalTraining
from fclmodels.methods.fedavg import FedAvg


class FedProx(FedAvg):
    """FedAvg with a proximal term that holds clients near the round's global model."""

    name = "fedprox"
    paper = "Federated Optimization in Heterogeneous Networks"

    class Settings(FedAvg.Settings):
        mu: NonNegativeFloat = Field(0.01, le=1e6, description="weight of the proximal term")

    settings: Settings

    @torch.no_grad()
    def change_gradients(self, training: LocalTraining) -> None:
        for name, gradient in training.gradients.items():
            gradient.add_(training.parameters[name] - training.start[name], alpha=self.settings.mu)
