"""Messages of the kinds that open most: synthetic samples, a gradient, a generator, class statistics.

knowledge: what the last task's clients have sent, by kind and client.
"""

from dataclasses import replace
from typing import Literal

import torch
from pydantic import Field
from torch import Tensor

from fclmodels.federation.client import Client
from fclmodels.federation.engine.cohort import Cohort
from fclmodels.federation.exchange import Answer, Exchange, Form
from fclmodels.federation.messages import Part, Payload, make_outline
from fclmodels.federation.run_context import Run
from fclmodels.federation.server import Server
from fclmodels.methods.fedavg import FedAvg
from fclmodels.numerics.fitted_heads import sum_classes

SAMPLES, NOISE = 3, 2
Kind = Literal["samples", "gradient", "generator", "class-statistics"]


class EveryKind(FedAvg):
    """FedAvg whose clients tell too much after each task."""

    name = "every-kind"
    paper = "none"

    class Settings(FedAvg.Settings):
        kinds: tuple[Kind, ...] = Field(("samples", "gradient", "generator", "class-statistics"), description="sent")
        bound: float | None = Field(None, description="of each part, for noise")
        least: Literal["sum", "each"] = Field("each", description="of each part")
        fault: str = Field("", description="what is wrong with client 1's answer")

    settings: Settings

    def __init__(self, settings: Settings, run: Run) -> None:
        super().__init__(settings, run)
        self.tell = self.declare(Exchange("tell", self.make_payload, self.tell_all, self.tell_form))

    def finish_task(self, server: Server, cohort: Cohort) -> Server:
        replies = cohort.ask(self.tell, server)
        if self.settings.least == "sum":
            return replace(server, knowledge={kind: replies.sum(kind) for kind in self.settings.kinds})
        by_kind = {kind: {str(c): tensors for c, tensors in replies.yield_each(kind)} for kind in self.settings.kinds}
        return replace(server, knowledge=by_kind)

    def tell_form(self, task: int, round: int) -> Form:
        head = self.networks.build(self.run.make_spec(task + 1)).heads[0]
        (classes, features), double = head.weight.shape, torch.float64
        inputs = make_outline("samples", {"inputs": (SAMPLES, *self.run.splits.shape)}).tensors
        labels = make_outline("samples", {"labels": (SAMPLES,)}, torch.int64).tensors
        sizes = {"weight": (classes,), "sum": (classes, features), "outer": (classes, features, features)}
        form = {
            "samples": Part("samples", {**inputs, **labels}),
            "gradient": make_outline("gradient", {"heads.0.weight": (classes, features)}),
            "generator": make_outline("generator", {"weight": (features, NOISE)}),
            "class-statistics": make_outline("class-statistics", sizes, double),
        }
        settings = self.settings
        return {kind: replace(form[kind], least=settings.least, bound=settings.bound) for kind in settings.kinds}

    def tell_all(self, client: Client, payload: Payload) -> Answer:
        network = self.networks.load(self.run.make_spec(client.task + 1), payload["weights"].tensors).eval()
        (batch, *_), random = self.run.batches.iterate_ordered(client.rows, 100), client.make_generator("tell")
        features = network.backbone(batch.inputs)
        loss = torch.nn.functional.cross_entropy(network.compute_logits(features), batch.labels)
        (gradient,) = torch.autograd.grad(loss, [network.heads[0].weight])
        classes, width = network.heads[0].weight.shape
        noise = torch.randn(SAMPLES, *self.run.splits.shape, generator=random).to(batch.inputs)
        tensors = {
            "samples": {"inputs": batch.inputs[:SAMPLES] + noise, "labels": batch.labels[:SAMPLES]},
            "gradient": {"heads.0.weight": gradient},
            "generator": {"weight": torch.randn(width, NOISE, generator=random)},
            "class-statistics": sum_classes(features.detach(), batch.labels, classes),
        }
        if client.index == 1 and self.settings.fault:
            spoil(tensors, self.settings.fault)
        return Answer({kind: tensors[kind] for kind in self.settings.kinds}, client.memory)


def spoil(tensors: dict[str, dict[str, Tensor]], fault: str) -> None:
    """Make one part what no reply may hold."""
    statistics = tensors["class-statistics"]
    if fault == "label":
        tensors["samples"]["labels"] = tensors["samples"]["labels"] + 100
    elif fault == "negative label":
        tensors["samples"]["labels"] = tensors["samples"]["labels"] - 100
    elif fault == "labels":
        tensors["samples"]["labels"] = tensors["samples"]["labels"][:-1]
    elif fault == "gradient":
        tensors["gradient"]["heads.0.weight"] = tensors["gradient"]["heads.0.weight"].T
    elif fault == "generator":
        tensors["generator"]["weight"] = tensors["generator"]["weight"] / 0
    elif fault == "asymmetric":
        statistics["outer"] = statistics["outer"] + torch.arange(statistics["outer"].shape[-1])
    elif fault == "variance":
        statistics["outer"] = 0 * statistics["outer"]
    elif fault == "long":
        statistics |= {"sum": 1e4 * statistics["sum"], "outer": 1e8 * statistics["outer"]}
