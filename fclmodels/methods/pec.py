"""PEC, federated: a small student for each class predicts one frozen random teacher (Zajac et al., ICLR 2024).

A class c has a student g_c, a convolution of 3x3, instance normalisation, a ReLU, the mean over pool x pool fields and
a linear layer to K numbers; all students begin alike. The teacher h is drawn from the run's seed, `teacher` times as
wide, and never travels or trains. A student trains on its own class's samples alone, and the one that errs least says
the class:

    L = sum_c mean_{x of c} 1/K ||g_c(x) - h(x)||^2        answer: argmin_c ||g_c(x) - h(x)||^2

So classes of other tasks are never touched: with tasks of their own classes and the task known, nothing is forgotten.
The release has one optimiser for each class; one over all students is the same, as it leaves students without samples
in a batch alone. Its learning rate falls linearly to 0 over a task, here over a task's local epochs.

The server averages a student over the clients that have its class, weighted by their numbers of the class's samples
(`federation.weighting: samples`) or alike (ours; FedProTIP, Table 5, says nothing of its Fed+PEC). A class of which no
client had samples never answers. `model.backbone` is not used. The defaults are the release's for CIFAR-100, which go
with Adam at 0.001, single samples and one epoch.

knowledge: `students` {label.parameter}, and `trained` [L], whether anyone has had samples of a class.
"""

from collections.abc import Mapping
from dataclasses import replace
from functools import cached_property
from typing import Any

import torch
from pydantic import Field, PositiveInt
from torch import Tensor, nn

from fclmodels.data.batches import Batch
from fclmodels.data.sample_kind import TEXTS, find_kind
from fclmodels.errors import UserError
from fclmodels.federation.client import Client
from fclmodels.federation.engine.replies import Replies
from fclmodels.federation.exchange import Answer, Form
from fclmodels.federation.messages import Part, Payload, make_outline
from fclmodels.federation.method import Obstacle
from fclmodels.federation.prediction import OwnModel
from fclmodels.federation.run_context import Run
from fclmodels.federation.server import Server
from fclmodels.federation.training.auxiliary_networks import Auxiliary, copy_state
from fclmodels.federation.training.local_training import LocalTraining
from fclmodels.methods.fedavg import FedAvg
from fclmodels.methods.parts.least_error import (
    LeastError,
    LinearlyFalling,
    answer_in_parts,
    build_predictor,
    draw_teacher,
)
from fclmodels.methods.parts.trained_network import TrainedNetwork
from fclmodels.randomness import seed_torch
from fclmodels.settings.base import Settings as BaseSettings
from fclmodels.settings.schema import OptimizerSettings


class Pec(FedAvg):
    """Each class has a student of one random teacher, trained on that class alone; the one that errs least answers."""

    name = "pec"
    paper = "Prediction Error-based Classification for Class-Incremental Learning"

    class Settings(BaseSettings):
        width: PositiveInt = Field(40, le=100_000, description="filters of a student's convolution")
        outputs: PositiveInt = Field(172, le=100_000, description="K, numbers that a student predicts")
        pool: PositiveInt = Field(4, le=1000, description="maps are averaged over pool x pool fields")
        teacher: PositiveInt = Field(100, le=10_000, description="the teacher has as many times a student's filters")

    settings: Settings
    uses_frozen_activations = False

    def __init__(self, settings: Settings, run: Run) -> None:
        if find_kind(run.splits.shape) is TEXTS:
            raise UserError("methods.pec: its students read images, these samples are texts. Use another method.")
        super().__init__(settings, run, TrainedNetwork(run, "average"))

    def list_advice(self) -> list[str]:
        return ["methods.pec: model.backbone is not used; students have methods.pec.width filters."]

    @property
    def obstacle_to_robust_rules(self) -> Obstacle | None:
        return Obstacle("averages a student over the clients that have its class", "Use mean")

    @property
    def obstacle_to_noise(self) -> Obstacle | None:
        return Obstacle("weighs a student by the class's samples, whose numbers have no noise", "Use fedavg")

    # On the server.

    def create_server(self) -> Server:
        return self.add_students(super().create_server())

    def start_task(self, server: Server, task: int) -> Server:
        return self.add_students(super().start_task(server, task))

    def add_students(self, server: Server) -> Server:
        """Return the server with a student, as all begin, for each class that has none."""
        students, trained = server.knowledge.get("students", {}), server.knowledge.get("trained", torch.zeros(0))
        fresh = copy_state(self.draw_student())
        new = range(len(trained), server.spec.label_count)
        students = students | {f"{label}.{name}": tensor for label in new for name, tensor in fresh.items()}
        return replace(server, knowledge={"students": students, "trained": torch.cat([trained, torch.zeros(len(new))])})

    def make_payload(self, server: Server) -> Payload:
        """Return the students of the task's classes."""
        of_task = tuple(f"{label}." for label in server.spec.tasks[server.task])
        students = server.knowledge["students"]
        return {"weights": Part("weights", {name: w for name, w in students.items() if name.startswith(of_task)})}

    def aggregate(self, server: Server, replies: Replies) -> Server:
        counts = dict(zip(server.spec.tasks[server.task], replies.sum("shares")["weight"].tolist(), strict=True))
        students, trained = dict(server.knowledge["students"]), server.knowledge["trained"].clone()
        for name, change in replies.sum("update").items():
            label = get_label(name)
            if counts[label] > 0:
                trained[label] = 1
                students[name] = students[name].add(change, alpha=self.find_server_lr(server.task) / counts[label])
        return replace(server, knowledge={"students": students, "trained": trained})

    def make_own_model(self, server: Server) -> OwnModel:
        labels = self.list_columns(server).labels.tolist()
        sizes = {"shape": list(server.spec.shape), **self.settings.model_dump(mode="json"), "seed": self.run.seed}
        spec = {**sizes, "labels": labels, "trained": server.knowledge["trained"].bool().tolist()}
        students = {f"students.{name}": tensor for name, tensor in server.knowledge["students"].items()}
        return OwnModel(spec, students)

    @staticmethod
    def build_own_model(spec: Mapping[str, Any]) -> nn.Module:
        return LeastError(spec)

    # On a client.

    def make_update_form(self, task: int, round: int) -> Form:
        labels = self.run.make_spec(task + 1).tasks[task]
        shapes = {
            f"{label}.{name}": tensor.shape
            for label in labels
            for name, tensor in self.draw_student().state_dict().items()
        }
        return {
            "update": replace(make_outline("update", shapes), over="weight"),
            "weight": make_outline("count", {"weight": ()}, torch.float64),
            "shares": make_outline("count", {"weight": (len(labels),)}, torch.float64),
        }

    def train(self, client: Client, payload: Payload) -> Answer:
        """Return the students' updates times their weights, and these by class."""
        start, labels = payload["weights"].tensors, self.run.make_spec(client.task + 1).tasks[client.task]
        students = nn.ModuleDict({str(label): self.draw_student() for label in labels}).to(self.run.device)
        students.load_state_dict(start)
        training = LocalTraining(self, client, self.networks.build(self.run.make_spec(client.task + 1)), {})
        training.networks = {
            "students": (students, Auxiliary("students", {}, nn.Module, "client", self.choose_optimiser(client)))
        }
        training.parameters = {}  # students train beside the model
        loss = training.run()
        counts = [float((client.rows.labels == label).sum()) for label in labels]
        by_samples = self.run.params.federation.weighting == "samples"
        weights = dict(zip(labels, counts if by_samples else [float(count > 0) for count in counts], strict=True))
        update = {
            name: (tensor - start[name]) * weights[get_label(name)] for name, tensor in students.state_dict().items()
        }
        parts = {
            "update": update,
            "weight": {"weight": torch.tensor(client.weight, dtype=torch.float64)},
            "shares": {"weight": torch.tensor(list(weights.values()), dtype=torch.float64)},
        }
        return Answer(parts, client.memory, loss, len(client.rows))

    def compute_loss(self, training: LocalTraining, batch: Batch) -> Tensor:
        """Return L; of the model itself, at which monitors look, the cross entropy that nobody descends."""
        if "students" not in training.networks:
            return super().compute_loss(training, batch)
        students, _ = training.networks["students"]
        targets = answer_in_parts(self.teacher, batch.inputs)
        losses = []
        for label in batch.labels.unique().tolist():
            mine = batch.labels == label
            losses.append((students.get_submodule(str(label))(batch.inputs[mine]) - targets[mine]).square().mean())
        return torch.stack(losses).sum()

    def choose_optimiser(self, client: Client) -> OptimizerSettings:
        """Return the run's optimiser with a learning rate that falls linearly to 0 over the task."""
        federation = self.run.params.federation
        epochs = federation.local_epochs * self.run.count_rounds(client.task)
        return LinearlyFalling(**self.run.params.optimizer.model_dump(), epochs=epochs)

    @cached_property
    def teacher(self) -> nn.Module:
        settings = self.settings
        return draw_teacher(self.run.splits.shape, settings.model_dump(), self.run.seed).to(self.run.device)

    def draw_student(self) -> nn.Module:
        """Return a student as all begin."""
        with seed_torch(self.run.seed, "student", device=torch.device("cpu")):
            return build_predictor(self.run.splits.shape, self.settings.model_dump(), 1)


def get_label(name: str) -> int:
    """Return the class of a student's tensor."""
    return int(name.partition(".")[0])
