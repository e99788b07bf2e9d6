"""FedProto: features are drawn to the mean features of their class over all clients (Tan et al., AAAI 2022).

Clients descend CE + lambda MSE(feature, prototype of its class), the mean over batch and dimensions; a sample whose
class has no prototype yet adds 0. After training a client sends the count and the sum of its features of each class on
its own model, in evaluation mode (the release takes them while weights move). The server's prototype is the mean over
the round's samples, or over its clients as in the release; a class that nobody has keeps its last one, so that those of
earlier tasks stay.

In the paper only prototypes travel and every client keeps a model of its own, `models: personal`. Compared in continual
learning, models are averaged too, as here by default: with lambda 0 this is FedAvg to the bit. Nothing in it is made
against forgetting.

knowledge: `prototypes`, {weight [labels], sum [labels, F]}.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Literal

import torch
from pydantic import Field, NonNegativeFloat
from torch import Tensor

from fclmodels.backbones.model.network import Network, build_skeleton
from fclmodels.backbones.model.spec import ModelSpec
from fclmodels.data.batches import Batch
from fclmodels.federation.client import Client
from fclmodels.federation.engine.replies import Replies
from fclmodels.federation.exchange import Form
from fclmodels.federation.messages import Part, Payload, make_outline
from fclmodels.federation.prediction import Columns, FittedHead, Predictor, predict_by_heads
from fclmodels.federation.run_context import Run
from fclmodels.federation.server import Server
from fclmodels.federation.training.local_training import LocalTraining
from fclmodels.methods.fedavg import FedAvg
from fclmodels.methods.parts.class_sums import add_up_classes
from fclmodels.methods.parts.frozen_backbone import AT_ONCE
from fclmodels.methods.parts.trained_network import TrainedNetwork
from fclmodels.numerics.fitted_heads import fit_nearest_mean
from fclmodels.numerics.prototypes import Moments, from_units, moments, to_units, weigh

BOUND = math.sqrt(2)  # of a sample's count and sum together, in the units of `to_units`


class PersonalNetwork(TrainedNetwork):
    """No tensor of the network travels: each client trains a model of its own, from what the run's seed draws."""

    @property
    def is_personal(self) -> bool:
        return True

    def list_personal_names(self, network: Network) -> set[str]:
        return set(network.state_dict())

    def list_undownloaded_names(self, spec: ModelSpec) -> set[str]:
        return set(build_skeleton(spec).state_dict())


@dataclass(frozen=True)
class Prototypes:
    """Mean features [labels, F] of the classes that are there [labels]."""

    means: Tensor
    present: Tensor

    def measure_distance(self, features: Tensor, labels: Tensor) -> Tensor:
        """Return the mean over batch and dimensions of squared differences to the prototypes that are there."""
        squares = (features - self.means[labels].to(features)).square()
        return (squares * self.present[labels][:, None]).mean()


class FedProto(FedAvg):
    """FedAvg, or personal models, whose features are drawn to the global mean feature of their class."""

    name = "fedproto"
    paper = "FedProto: Federated Prototype Learning across Heterogeneous Clients"

    class Settings(FedAvg.Settings):
        lam: NonNegativeFloat = Field(
            1.0, le=1e6, alias="lambda", description="weight of the distance to prototypes (release: 1, CIFAR-10 0.1)"
        )
        mean: Literal["samples", "clients"] = Field(
            "samples", description="what counts the same in a prototype: each sample, or each client (the release)"
        )
        models: Literal["averaged", "personal"] = Field(
            "averaged", description="models are averaged too; personal: only prototypes travel (the paper)"
        )
        predicts: Literal["head", "prototype"] = Field(
            "head", description="what answers: the head, or the nearest prototype of all classes"
        )

    settings: Settings

    def __init__(self, settings: Settings, run: Run) -> None:
        personal = PersonalNetwork(run, settings.batch_norm) if settings.models == "personal" else None
        super().__init__(settings, run, personal)

    @property
    def clip(self) -> float | None:
        """The length at which features are clipped that enter a prototype; None where there is no noise."""
        privacy = self.run.params.federation.privacy
        return privacy.features if privacy.on else None

    # On the server.

    def start_task(self, server: Server, task: int) -> Server:
        started = super().start_task(server, task)
        features = self.networks.build(started.spec).backbone.features
        total = moments(torch.zeros(0, features), torch.zeros(0, dtype=torch.int64), started.spec.label_count)
        for name, old in server.knowledge.get("prototypes", {}).items():
            total[name][: len(old)] = old
        return replace(started, knowledge={"prototypes": {name: total[name] for name in ("weight", "sum")}})

    def make_payload(self, server: Server) -> Payload:
        total = server.knowledge["prototypes"]
        means = total["sum"] / total["weight"].clamp(min=torch.finfo(torch.float64).tiny)[:, None]
        tensors = {"means": means.float(), "present": total["weight"] > 0}
        return {**super().make_payload(server), "prototypes": Part("prototype", tensors)}

    def make_update_form(self, task: int, round: int) -> Form:
        network = self.networks.build(self.run.make_spec(task + 1))
        rows = len(network.spec.tasks[task]), network.backbone.features
        outline = make_outline("prototype", {"weight": rows[:1], "sum": rows}, torch.float64, bound=BOUND)
        return {**super().make_update_form(task, round), "moments": outline}

    def aggregate(self, server: Server, replies: Replies) -> Server:
        server = super().aggregate(server, replies)
        new = replies.sum("moments")
        if self.clip is not None:
            new = from_units(new, self.clip, replies.compute_noise("moments"))
        labels, present = torch.tensor(server.spec.tasks[server.task]), new["weight"] > 0
        total = {name: value.clone() for name, value in server.knowledge["prototypes"].items()}
        for name, value in total.items():
            value[labels[present]] = new[name][present]
        return replace(server, knowledge={"prototypes": total})

    def find_head(self, server: Server) -> FittedHead | None:
        if self.settings.predicts == "head" or not server.knowledge:
            return None
        return self.fit_head(server.spec, self.make_payload(server))

    def fit_head(self, spec: ModelSpec, payload: Payload) -> FittedHead:
        """Return the head whose largest logit is the class of the nearest prototype, a row for each column."""
        means, present = (payload["prototypes"].tensors[name] for name in ("means", "present"))
        labels = Columns.of(spec, torch.device("cpu")).labels
        return FittedHead(*fit_nearest_mean(present[labels].double(), means[labels]))

    # On a client.

    def make_client_predictor(self, client: Client, payload: Payload) -> Predictor:
        spec = self.run.make_spec(client.task + 1)
        network = self.networks.load(spec, self.join_own_weights(client, payload))
        head = self.fit_head(spec, payload) if self.settings.predicts == "prototype" else None
        return predict_by_heads(network, fitted_head=head)

    def start_training(self, training: LocalTraining, payload: Payload) -> None:
        training.add(Prototypes(**payload["prototypes"].tensors))

    def compute_loss(self, training: LocalTraining, batch: Batch) -> Tensor:
        features, prototypes = training.compute_features(batch), training.find_added(Prototypes)
        loss = self.compute_cross_entropy(training.network, features, batch.labels, training.client.task)
        if prototypes is None or not self.settings.lam:
            return loss
        return loss + self.settings.lam * prototypes.measure_distance(features, batch.labels)

    @torch.no_grad()
    def make_further_parts(self, training: LocalTraining, payload: Payload) -> Mapping[str, Mapping[str, Tensor]]:
        """Return the moments of the client's classes on its own model, in units of the clip under noise."""
        batches = self.run.batches.iterate_ordered(training.client.rows, AT_ONCE)
        sums = add_up_classes(training.network, batches, training.client.task, clip=self.clip)
        total: Moments = {name: sums[name] for name in ("weight", "sum")}
        if self.settings.mean == "clients":
            total = weigh(total, 1.0)
        if self.clip is not None:
            total = to_units(total, self.clip)
        return {"moments": total}
