"""A method that predicts tasks by itself: FedAvg with a router that is drawn, not learned."""

import torch

from fclmodels.federation.client import Client
from fclmodels.federation.messages import Payload
from fclmodels.federation.prediction import Predictor, predict_by_heads
from fclmodels.federation.server import Server
from fclmodels.methods.fedavg import FedAvg
from fclmodels.numerics.task_relevance import Router


class Signpost(FedAvg):
    """FedAvg that sends samples, and whole batches, to tasks by chance."""

    name = "signpost"
    paper = "none"

    def make_router(self, server: Server) -> Router:
        return self.draw_router(len(server.spec.tasks), server.weights["heads.0.weight"].shape[1])

    def make_client_predictor(self, client: Client, payload: Payload) -> Predictor:
        network = self.networks.load(self.run.make_spec(client.task + 1), self.join_own_weights(client, payload))
        return predict_by_heads(network, self.draw_router(len(network.spec.tasks), network.backbone.features))

    def draw_router(self, tasks: int, features: int) -> Router:
        random = self.run.make_generator("router")
        directions = torch.linalg.qr(torch.randn(features, features, generator=random)).Q
        references = torch.rand(3, tasks, tasks, generator=random)
        return Router(directions.tensor_split(tasks, dim=1), references, torch.ones(3, tasks, dtype=torch.bool))
