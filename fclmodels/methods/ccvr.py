"""CCVR: after a task the server trains the head again, on features drawn from Gaussians of all classes so far.

Luo et al. (NeurIPS 2021): "classifier calibration with virtual representations". After a task's rounds every client
sends the count, the sum and the second moment of its features of each class on the global model; their sums give the
mean and the unbiased covariance of all clients' samples,

    mu = S / N,   Sigma = (sum a a^T - N mu mu^T) / (N - 1).

The server draws features of every class of all tasks so far, and trains the head alone on them by cross entropy. The
paper does so once; in a stream it is done after each task, over all classes, and the Gaussians of earlier tasks stay as
the model of their time saw them (ours, as are number of draws, passes and optimiser, which follow fed-mammoth's code:
the paper does not give them). So what training moves in the backbone makes them stale; `frozen` trains the head alone.
A class with one sample has no covariance, and its mean is drawn.

Clients send C (F^2 + F + 1) numbers once a task, or C (2 F + 1) with `covariance: diagonal`; the server keeps as many.

knowledge: `classes`, of each task {weight [C], sum [C, F], outer [C, F, F] or square [C, F]}.
"""

import math
from dataclasses import dataclass, replace
from typing import Literal

import torch
from pydantic import Field, NonNegativeFloat, PositiveFloat, PositiveInt
from torch import Tensor
from torch.nn.functional import cross_entropy

from fclmodels.backbones.model.network import Network
from fclmodels.data.batches import Batch
from fclmodels.federation.client import Client
from fclmodels.federation.engine.cohort import Cohort
from fclmodels.federation.exchange import Answer, Exchange, Form
from fclmodels.federation.messages import Payload, make_outline
from fclmodels.federation.method import Obstacle
from fclmodels.federation.run_context import Run
from fclmodels.federation.server import Server
from fclmodels.federation.training.local_training import LocalTraining
from fclmodels.federation.training.optimisers import make_optimiser
from fclmodels.federation.training.server_training import NetworkTraining
from fclmodels.methods.fedavg import FedAvg
from fclmodels.methods.parts.class_sums import add_up_classes
from fclmodels.methods.parts.frozen_backbone import AT_ONCE, FrozenBackbone
from fclmodels.numerics.fitted_heads import ClassGaussians, draw_features, fit_gaussians, sum_classes
from fclmodels.numerics.prototypes import moments
from fclmodels.settings.schema import OptimizerSettings

Statistics = dict[str, Tensor]


@dataclass(frozen=True)
class DrawnFeatures:
    """Features [n, F] that the server has drawn, with labels [n] and tasks [n]."""

    features: Tensor
    labels: Tensor
    tasks: Tensor

    def select(self, places: Tensor) -> "DrawnFeatures":
        """Return those at some places."""
        return DrawnFeatures(self.features[places], self.labels[places], self.tasks[places])


class Ccvr(FedAvg):
    """FedAvg whose server trains the head again after each task, on draws from Gaussians of all classes."""

    name = "ccvr"
    paper = "No Fear of Heterogeneity: Classifier Calibration for Federated Learning with Non-IID Data"

    class Settings(FedAvg.Settings):
        draws: PositiveInt = Field(256, le=100_000, description="features that are drawn of each class")
        passes: PositiveInt = Field(5, le=10_000, description="passes over the drawn features")
        draw_batch: PositiveInt = Field(256, le=100_000, description="drawn features of a step")
        lr: PositiveFloat = Field(0.01, le=100, description="the server's learning rate, which falls by half a cosine")
        momentum: NonNegativeFloat = Field(0.9, lt=1, description="momentum of the server's steps")
        covariance: Literal["full", "diagonal"] = Field("full", description="what is sent of a class's second moments")
        frozen: bool = Field(False, description="train the head alone, on the backbone as it was drawn or read")

    settings: Settings

    def __init__(self, settings: Settings, run: Run) -> None:
        frozen = FrozenBackbone(settings, run, self.name) if settings.frozen else None
        super().__init__(settings, run if frozen is None else frozen.run, frozen)
        self.ask_statistics = self.declare(Exchange("classes", super().make_payload, self.sum_features, self.make_form))

    @property
    def obstacle_to_noise(self) -> Obstacle | None:
        return Obstacle("draws from covariances of single classes, which noise would drown", "Use fedproto or ridge")

    # On the server.

    def finish_task(self, server: Server, cohort: Cohort) -> Server:
        sums = cohort.ask(self.ask_statistics, server).sum("classes")
        classes = [*server.knowledge.get("classes", []), dict(sums)]
        server = replace(server, knowledge={**server.knowledge, "classes": classes})
        drawn, heads = self.draw(server), self.networks.load(server.spec, server.weights).heads.requires_grad_()
        steps = self.settings.passes * math.ceil(len(drawn.labels) / self.settings.draw_batch)
        chosen = OptimizerSettings(lr=self.settings.lr, momentum=self.settings.momentum)
        optimiser = make_optimiser(chosen, list(heads.parameters()), 0)

        def loss(number: int) -> Tensor:
            optimiser.param_groups[0]["lr"] = self.settings.lr * (1 + math.cos(math.pi * number / steps)) / 2
            batch = self.choose_batch(server.task, number, len(drawn.labels))
            return self.measure_loss(self.networks.build(server.spec), drawn.select(batch))

        cohort.train(NetworkTraining("head", {"heads": heads}, [optimiser], loss), steps)
        trained = {f"heads.{name}": tensor.detach().clone() for name, tensor in heads.state_dict().items()}
        return replace(server, weights={**server.weights, **trained})

    def measure_loss(self, network: Network, drawn: DrawnFeatures) -> Tensor:
        """Return the cross entropy over all classes so far, or over each task's own head."""
        if network.spec.head == "growing":
            return cross_entropy(network.compute_logits(drawn.features), drawn.labels)
        return self.compute_cross_entropy_by_task(network, drawn.features, drawn.labels, drawn.tasks)

    def draw(self, server: Server) -> DrawnFeatures:
        """Return features of each class of which there are samples, by task."""
        parts = []
        for task, sums in enumerate(server.knowledge["classes"]):
            random = self.run.make_generator("ccvr", server.task, task)
            features, places = draw_features(fit_classes(sums), self.settings.draws, random)
            labels = torch.tensor(server.spec.tasks[task])[places]
            parts.append((features.float(), labels, torch.full_like(labels, task)))
        return DrawnFeatures(*(torch.cat(of_tasks).to(self.run.device) for of_tasks in zip(*parts, strict=True)))

    def choose_batch(self, task: int, number: int, count: int) -> Tensor:
        """Return which draws the server's step sees; each pass has an order of its own."""
        steps = math.ceil(count / self.settings.draw_batch)
        order = torch.randperm(count, generator=self.run.make_generator("ccvr-order", task, number // steps))
        return order.split(self.settings.draw_batch)[number % steps]

    # On a client.

    def make_form(self, task: int, round: int) -> Form:
        """Return the outline of the sums of a task's classes."""
        network = self.networks.build(self.run.make_spec(task + 1))
        C, F = len(network.spec.tasks[task]), network.backbone.features
        second = {"outer": (C, F, F)} if self.settings.covariance == "full" else {"square": (C, F)}
        return {"classes": make_outline("class-statistics", {"weight": (C,), "sum": (C, F), **second}, torch.float64)}

    @torch.no_grad()
    def sum_features(self, client: Client, payload: Payload) -> Answer:
        """Return the sums over a client's samples of each class on the global model."""
        network = self.networks.load(self.run.make_spec(client.task + 1), self.join_own_weights(client, payload))
        sums = sum_classes if self.settings.covariance == "full" else moments
        batches = self.run.batches.iterate_ordered(client.rows, AT_ONCE)
        return Answer({"classes": add_up_classes(network, batches, client.task, sums)}, client.memory)

    def compute_loss(self, training: LocalTraining, batch: Batch) -> Tensor:
        if not isinstance(self.network, FrozenBackbone):
            return super().compute_loss(training, batch)
        features = self.network.compute_features(training.network, batch, None).features
        return self.compute_cross_entropy(training.network, features, batch.labels, training.client.task)


def fit_classes(sums: Statistics) -> ClassGaussians:
    """Return the Gaussians of a task's classes from their sums; of squares alone, with diagonal covariances."""
    if "outer" in sums:
        return fit_gaussians(sums["weight"], sums["sum"], sums["outer"])
    full = fit_gaussians(sums["weight"], sums["sum"], torch.diag_embed(sums["square"]))
    return full._replace(covariances=torch.diag_embed(full.covariances.diagonal(dim1=1, dim2=2)))
