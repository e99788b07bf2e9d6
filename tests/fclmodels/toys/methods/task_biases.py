"""Parameters of one task each: a bias vector for each task's classes, of which only the present task's is trained.

They lie beside the model; the optimiser of each task begins anew, and goes on from round to round.
"""

from collections.abc import Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from fclmodels.data.batches import Batch
from fclmodels.federation.messages import Payload
from fclmodels.federation.prediction import Prediction, Predictor
from fclmodels.federation.server import Server
from fclmodels.federation.training.auxiliary_networks import Auxiliary
from fclmodels.federation.training.local_training import LocalTraining
from fclmodels.methods.fedavg import FedAvg
from fclmodels.settings.schema import OptimizerSettings


class TaskBiases(FedAvg):
    """FedAvg with a bias vector for each task."""

    name = "task-biases"
    paper = "none"
    keeps_optimisers: ClassVar[bool] = True

    def list_auxiliary_networks(self) -> list[Auxiliary]:
        spec = {"classes": [len(task.classes) for task in self.run.splits.tasks]}
        return [Auxiliary("biases", spec, build_biases, "averaged", OptimizerSettings(kind="adamw", lr=0.01))]

    def start_training(self, training: LocalTraining, payload: Payload) -> None:
        for task, bias in enumerate(training.networks["biases"][0].parameters()):
            bias.requires_grad_(task == training.client.task)

    def compute_loss(self, training: LocalTraining, batch: Batch) -> Tensor:
        biases, network = training.networks["biases"][0], training.network
        logits = network.compute_logits(training.compute_features(batch))
        return torch.nn.functional.cross_entropy(add_biases(logits, biases, network.spec.tasks), batch.labels)

    def make_predictor(self, server: Server) -> Predictor:
        (auxiliary,), predict = self.auxiliaries.list_by_place("averaged"), super().make_predictor(server)
        biases = self.auxiliaries.load(auxiliary, server.networks["biases"])
        return lambda inputs: Prediction(add_biases(predict(inputs).logits, biases, server.spec.tasks))


def build_biases(spec: Mapping[str, Any]) -> nn.Module:
    return nn.ParameterList([torch.zeros(classes) for classes in spec["classes"]])


def add_biases(logits: Tensor, biases: nn.Module, tasks: tuple[tuple[int, ...], ...]) -> Tensor:
    """Return logits [B, labels], to each task's columns of which its bias is added."""
    for bias, classes in zip(biases.parameters(), tasks, strict=False):
        logits = logits.index_add(1, torch.tensor(classes, device=logits.device), bias.expand(len(logits), -1))
    return logits
