"""Heads that the server fits to what clients tell of their features after a task, instead of training them.

knowledge: `sums`, what the head was fitted to, over all tasks; `head`, as FittedHead has it.
"""

from dataclasses import replace
from typing import Literal

import torch
from pydantic import Field
from torch import Tensor

from fclmodels.backbones.model.network import Network
from fclmodels.federation.client import Client
from fclmodels.federation.engine.cohort import Cohort
from fclmodels.federation.exchange import Answer, Exchange, Form
from fclmodels.federation.messages import Payload, make_outline
from fclmodels.federation.prediction import FittedHead
from fclmodels.federation.run_context import Run
from fclmodels.federation.server import Server
from fclmodels.methods.fedavg import FedAvg
from fclmodels.numerics import fitted_heads
from fclmodels.numerics.fitted_heads import LinearHead
from fclmodels.numerics.task_relevance import Router

RANDOM_FEATURES, RIDGE, SAMPLES = 20, 0.1, 8


class FittedClasses(FedAvg):
    """FedAvg whose answers come from a head that the server has fitted."""

    name = "fitted-classes"
    paper = "none"

    class Settings(FedAvg.Settings):
        fit: Literal["nearest-mean", "ridge", "random-ridge", "gaussians"] = Field("ridge", description="how")
        routed: bool = Field(False, description="whether a router, which is drawn, predicts tasks")

    settings: Settings

    def __init__(self, settings: Settings, run: Run) -> None:
        super().__init__(settings, run)
        self.tell = self.declare(Exchange("tell", self.make_payload, self.add_up, self.make_sums_form))

    @property
    def is_of_products(self) -> bool:
        return "ridge" in self.settings.fit

    def finish_task(self, server: Server, cohort: Cohort) -> Server:
        new, old = cohort.ask(self.tell, server).sum("sums"), server.knowledge.get("sums", {})
        sums = {name: grow(old[name], total) + total if name in old else total for name, total in new.items()}
        projection = self.projection(self.networks.build(server.spec))
        head = self.fit(sums, server)
        further = {} if projection is None else {"projection": projection}
        knowledge = {"sums": sums, "head": {"weight": head.weight, "bias": head.bias, **further}}
        return replace(server, knowledge=knowledge)

    def fit(self, sums: dict[str, Tensor], server: Server) -> LinearHead:
        if self.is_of_products:
            return fitted_heads.fit_ridge(sums["gram"], sums["cross"], RIDGE)
        if self.settings.fit == "nearest-mean":
            return fitted_heads.fit_nearest_mean(sums["weight"], sums["sum"])
        gaussians = fitted_heads.fit_gaussians(sums["weight"], sums["sum"], sums["outer"])
        features, labels = fitted_heads.draw_features(gaussians, SAMPLES, self.run.make_generator("fit", server.task))
        start = LinearHead(server.weights["heads.0.weight"], server.weights["heads.0.bias"])
        return fitted_heads.train_head(start, features, labels)

    def find_head(self, server: Server) -> FittedHead | None:
        """Return the last one; None while a task is learned whose classes it does not have."""
        head = server.knowledge.get("head")
        if head is None or len(head["bias"]) != server.spec.label_count:
            return None
        return FittedHead(**head)

    def make_router(self, server: Server) -> Router | None:
        if not self.settings.routed:
            return None
        random, tasks = self.run.make_generator("router"), len(server.spec.tasks)
        features = server.weights["heads.0.weight"].shape[1]
        directions = torch.linalg.qr(torch.randn(features, features, generator=random)).Q
        references = torch.rand(3, tasks, tasks, generator=random)
        return Router(directions.tensor_split(tasks, dim=1), references, torch.ones(3, tasks, dtype=torch.bool))

    def projection(self, network: Network) -> Tensor | None:
        """Return P [F, M] of random features, drawn by the run's seed wherever it is needed."""
        if self.settings.fit != "random-ridge":
            return None
        return torch.randn(network.backbone.features, RANDOM_FEATURES, generator=self.run.make_generator("projection"))

    def make_sums_form(self, task: int, round: int) -> Form:
        classes, features = self.networks.build(self.run.make_spec(task + 1)).heads[0].weight.shape
        if self.settings.fit == "random-ridge":
            features = RANDOM_FEATURES
        of_products = {"gram": (features, features), "cross": (features, classes)}
        of_classes = {"weight": (classes,), "sum": (classes, features), "outer": (classes, features, features)}
        return {
            "sums": make_outline("class-statistics", of_products if self.is_of_products else of_classes, torch.float64)
        }

    @torch.no_grad()
    def add_up(self, client: Client, payload: Payload) -> Answer:
        network = self.networks.load(self.run.make_spec(client.task + 1), payload["weights"].tensors).eval()
        (batch,) = self.run.batches.iterate_ordered(client.rows, len(client.rows))
        features, classes = network.backbone(batch.inputs), network.heads[0].out_features
        projection = self.projection(network)
        if projection is not None:
            features = torch.relu(features @ projection.to(features))
        add_up = fitted_heads.sum_products if self.is_of_products else fitted_heads.sum_classes
        return Answer({"sums": add_up(features, batch.labels, classes)}, client.memory)


def grow(sums: Tensor, like: Tensor) -> Tensor:
    """Return sums with zeros for the classes that came since: rows or, of A^T Y, columns."""
    grown = torch.zeros_like(like)
    grown[tuple(map(slice, sums.shape))] = sums
    return grown
