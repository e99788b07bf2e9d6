"""Several models in a client's memory: the one that it had at the end of each task, which answer together.

memory: `models` {task: weights}, as the client trained them last.
"""

import torch
from torch import Tensor

from fclmodels.federation.client import Client
from fclmodels.federation.exchange import Memory
from fclmodels.federation.messages import Payload
from fclmodels.federation.prediction import Prediction, Predictor
from fclmodels.federation.training.auxiliary_networks import copy_state
from fclmodels.federation.training.local_training import LocalTraining
from fclmodels.methods.fedavg import FedAvg


class SeveralModels(FedAvg):
    """FedAvg whose clients answer with the mean of the global model and of all models that they keep."""

    name = "several-models"
    paper = "none"

    @property
    def is_personal(self) -> bool:
        return True

    def remember(self, training: LocalTraining) -> Memory:
        memory, task = super().remember(training), str(training.client.task)
        return {**memory, "models": {**memory.get("models", {}), task: copy_state(training.network)}}

    def make_client_predictor(self, client: Client, payload: Payload) -> Predictor:
        own = {int(task): weights for task, weights in client.memory.get("models", {}).items()}
        models = [(client.task, payload["weights"].tensors), *own.items()]
        classes = self.run.splits.count_classes(client.task + 1)

        def predict(inputs: Tensor) -> Prediction:
            total = torch.zeros(len(inputs), classes, device=inputs.device)
            for task, weights in models:
                network = self.networks.load(self.run.make_spec(task + 1), weights).eval()
                probabilities = network(inputs).softmax(1)
                total[:, : probabilities.shape[1]] += probabilities / len(models)
            return Prediction(total)

        return predict
