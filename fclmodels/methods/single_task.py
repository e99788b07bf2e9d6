"""Single-task training: an upper reference without anything to forget.

Every task has a model of its own, trained from scratch by FedAvg on that task only. When the task is known, its
model answers; when it is not, the highest logit over all models does.
"""

from dataclasses import replace

import torch
from pydantic import Field
from torch import Tensor

from fclmodels.backbones.layers.norms import FromScratch
from fclmodels.backbones.model.network import Network, NetworkCache, compute_task_cross_entropy
from fclmodels.federation.prediction import Columns, Prediction, Predictor
from fclmodels.federation.server import Server
from fclmodels.methods.fedavg import FedAvg


class SingleTask(FedAvg):
    """Upper reference: one model a task, each trained from scratch by FedAvg."""

    name = "single-task"
    paper = "none: an upper reference"

    class Settings(FedAvg.Settings):
        batch_norm: FromScratch = Field("average", description="running statistics: average; batch: none")

    def start_task(self, server: Server, task: int) -> Server:
        earlier = [*server.knowledge.get("models", []), server.weights] if task > 0 else []
        spec = self.run.make_spec(task + 1)
        return replace(
            server, spec=spec, weights=self.network.make_initial_weights(spec), task=task, knowledge={"models": earlier}
        )

    def compute_cross_entropy(self, network: Network, features: Tensor, labels: Tensor, task: int) -> Tensor:
        """Return it over the task's classes only: there are no others for a model that knows one task."""
        return compute_task_cross_entropy(network, features, labels, task)

    def find_server_lr(self, task: int) -> float:
        """Return the same in each task: each one begins anew."""
        return self.run.params.federation.server_lr

    def freezes(self, task: int) -> bool:
        """Return whether blocks are frozen from the start: each task begins anew, so none is the second."""
        return self.run.params.model.freeze_after == 0

    def list_columns(self, server: Server) -> Columns:
        return Columns.order_by_task(server.spec, self.run.device)

    def list_earlier_models(self, server: Server) -> list[dict[str, Tensor]]:
        return list(server.knowledge.get("models", []))

    def make_predictor(self, server: Server) -> Predictor:
        models = enumerate([*self.list_earlier_models(server), server.weights])
        networks = [
            NetworkCache(self.run.device, self.prepare_network).load(self.run.make_spec(t + 1), w).eval()
            for t, w in models
        ]

        def predict(inputs: Tensor) -> Prediction:
            return Prediction(torch.cat([network(inputs, task) for task, network in enumerate(networks)], dim=1))

        return predict
