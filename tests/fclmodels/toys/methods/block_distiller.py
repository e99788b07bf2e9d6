"""Activations of named blocks in the loss, and an optimiser for each part of the network that goes on within a task.

The teacher is the model that the task began with. The head is trained by Adam, the rest by the run's optimiser.

knowledge: `teacher`, that model.
"""

from dataclasses import replace
from typing import ClassVar

import torch
from torch import Tensor

from fclmodels.backbones.inputs.block_outputs import capture_block_outputs
from fclmodels.backbones.model.network import Network, NetworkCache
from fclmodels.data.batches import Batch
from fclmodels.federation.messages import Part, Payload
from fclmodels.federation.run_context import Run
from fclmodels.federation.server import Server
from fclmodels.federation.training.local_training import LocalTraining, ParameterGroup
from fclmodels.methods.fedavg import FedAvg
from fclmodels.settings.schema import OptimizerSettings


class Teacher:
    """The model that a task began with, in one training."""

    def __init__(self, network: Network) -> None:
        self.network = network.eval()


class BlockDistiller(FedAvg):
    """FedAvg whose clients keep their blocks' outputs near the teacher's."""

    name = "block-distiller"
    paper = "none"
    keeps_optimisers: ClassVar[bool] = True

    def __init__(self, settings: FedAvg.Settings, run: Run) -> None:
        super().__init__(settings, run)
        self.teachers = NetworkCache(run.device, self.prepare_network)

    def start_task(self, server: Server, task: int) -> Server:
        started = super().start_task(server, task)
        return replace(started, knowledge={"teacher": started.weights})

    def make_payload(self, server: Server) -> Payload:
        teacher = server.knowledge.get("teacher", server.weights)
        return {**super().make_payload(server), "teacher": Part("weights", teacher, once=True)}

    def start_training(self, training: LocalTraining, payload: Payload) -> None:
        spec = self.run.make_spec(training.client.task + 1)
        training.add(Teacher(self.teachers.load(spec, payload["teacher"].tensors)))

    def compute_loss(self, training: LocalTraining, batch: Batch) -> Tensor:
        teacher, backbone = training.find_added(Teacher), training.network.backbone
        names = backbone.blocks[:2]
        with capture_block_outputs(backbone, names) as outputs:
            loss = super().compute_loss(training, batch)
        if teacher is None:
            return loss
        with torch.no_grad(), capture_block_outputs(teacher.network.backbone, names) as targets:
            teacher.network.backbone(batch.inputs)
        return loss + 0.1 * sum((outputs[name] - targets[name]).square().mean() for name in names)

    def group_parameters(self, training: LocalTraining) -> list[ParameterGroup]:
        heads = [name for name in training.parameters if name.startswith("heads.")]
        return [ParameterGroup(heads, OptimizerSettings(kind="adam", lr=0.01))]
