"""A method that predicts tasks by itself: FedAvg with a router that is drawn, not learned."""

import torch
from torch import Tensor

from fclmodels.backbones.network import Network
from fclmodels.federation.prediction import Prediction
from fclmodels.federation.server import Server
from fclmodels.methods.base import Predictor
from fclmodels.methods.fedavg import FedAvg
from fclmodels.numerics.relevance import Router


class Signpost(FedAvg):
    """FedAvg that sends samples, and whole batches, to tasks by chance."""

    name = "signpost"
    paper = "none"

    def router(self, server: Server) -> Router:
        return self.drawn(len(server.spec.tasks), server.weights["heads.0.weight"].shape[1])

    def drawn(self, tasks: int, features: int) -> Router:
        random = self.run.generator("router")
        directions = torch.linalg.qr(torch.randn(features, features, generator=random)).Q
        references = torch.rand(3, tasks, tasks, generator=random)
        return Router(directions.tensor_split(tasks, dim=1), references, torch.ones(3, tasks, dtype=torch.bool))

    def predict_with(self, network: Network) -> Predictor:
        network.eval()
        router = self.drawn(len(network.spec.tasks), network.heads[0].in_features)

        def predict(inputs: Tensor) -> Prediction:
            features = network.backbone(inputs)
            logits = torch.cat([head(features) for head in network.heads], dim=1)
            return Prediction(logits, router.sample_scores(features), router.batch_scores(features))

        return predict
