"""AF-FCL: replay of features from a flow, in which a sample counts by how credible it is to a client (Wuerkaixi et al.
2024, "Accurate Forgetting").

Features h [d] of the backbone go through a layer fc2 (d to d, leaky ReLU) to the head. Beside it all clients train a
class-conditional flow f on features (feature_flow.py). For each batch (x, y) a client takes three steps, each of an
optimiser of its own:

1. the flow: -mean log f(h|y) + memory * -mean log f(h~|y~), h~ drawn from the last task's final flow, y~ uniform over
   all clients' classes of earlier tasks;
2. fc2 alone, on features v that the current flow draws, y uniform over all clients' classes so far:
   replay * (mean_i[w_i CE_i(v)] ((1 - theta) P + theta) + outputs * D(v)), with P = mean exp(log f(h) / d);
3. all layers: CE + features * mean (h - h°)^2 + outputs * D(x), ° the last task's final global model.

D is distillation at temperature 2 (distillation.py) over the columns that the last model has: the release's cross
entropy of square roots of probabilities without its constant. The credibility w_i is the mean over dimensions of the
density of the draw's latents among the batch's latents of its class (a Gaussian), and P where the batch has fewer than
two of these. The release compares the draw's *features* with those latents, and with a single one w is 0
(`credibility: release`). An inverted coupling divides by as little as 0.001: draws of ten times the length of the
batch's longest features count for nothing, in step 1 too (ours; the release has no such bound).

Steps 1 and 2 see h in evaluation mode, so that batch normalisation's statistics move once a batch; the release draws P
in training mode. Optimisers start anew in each round as the engine's do; the release's go on. In the first task too
there is replay, of the task's classes over all clients. A task's head of its own has its own cross entropy and its own
part of D (ours). With replay 0 there is no flow, and no client is asked for its classes; with features and outputs 0
too it is FedAvg of this network.

The release's runs (all with outputs 0.02 and features 0.1; batches of 64, 100 a round, with CIFAR-100 400):

    run                      replay  memory  theta  optimizer.lr  flow_lr
    CIFAR-100 (the defaults) 0.5     0.1     0.1    1e-3          5e-3
    EMNIST                   0.5     0.4     0      1e-4          1e-4
    EMNIST, shuffled         0.05    0.02    0.5    1e-4          1e-3
    EMNIST, noisy clients    0.5     0.1     0.5    1e-4          1e-3
    MNIST-SVHN-Fashion       0.1     0       0      1e-4          1e-3

knowledge: `anchor`, `past` {layer, flow}: the last task's final model; with replay `columns` (label_sets.py).
"""

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

import torch
from pydantic import Field, NonNegativeFloat
from torch import Tensor, nn

from fclmodels.backbones.layers.norms import SharedPolicy
from fclmodels.backbones.model.network import NetworkCache, build_skeleton
from fclmodels.data.batches import Batch
from fclmodels.federation.engine.cohort import Cohort
from fclmodels.federation.messages import Part, Payload
from fclmodels.federation.method import Obstacle
from fclmodels.federation.prediction import OwnModel
from fclmodels.federation.run_context import Run
from fclmodels.federation.server import Server
from fclmodels.federation.training.auxiliary_networks import Auxiliary, AuxiliaryNetworks
from fclmodels.federation.training.local_training import LocalTraining
from fclmodels.methods.fedavg import FedAvg
from fclmodels.methods.parts.anchor import anchor_payload, anchor_to
from fclmodels.methods.parts.class_table import grow_tables
from fclmodels.methods.parts.feature_flow import FeatureFlow, build_flow
from fclmodels.methods.parts.feature_replay import (
    FeatureReplay,
    FeatureReplaySettings,
    LastLayeredModel,
    distil_outputs,
)
from fclmodels.methods.parts.hidden_layer import LayeredModel, build_layer
from fclmodels.methods.parts.joined_heads import count_columns, find_columns
from fclmodels.methods.parts.label_sets import LabelSets

WIDEST = 512


class AfFcl(FedAvg):
    """Clients replay features that a flow draws, weighed by how credible they are to each."""

    name = "af-fcl"
    paper = "Accurate Forgetting for Heterogeneous Federated Continual Learning"

    class Settings(FeatureReplaySettings, FedAvg.Settings):
        batch_norm: SharedPolicy = Field(
            "average", description="running statistics: average over clients; batch: none; frozen after task 1"
        )
        features: NonNegativeFloat = Field(
            0.1, le=1e6, description="weight of the distance of features from the last model's (0.2 * 0.5)"
        )

    settings: Settings
    trains_earlier_heads = True

    def __init__(self, settings: Settings, run: Run) -> None:
        super().__init__(settings, run)
        self.labels = LabelSets(run)
        if settings.replay:
            self.declare(self.labels.exchange)
        self.last_networks = NetworkCache(run.device, self.prepare_network)
        self.last_auxiliaries = AuxiliaryNetworks(self.list_auxiliary_networks(), run.seed, run.device)

    def list_auxiliary_networks(self) -> list[Auxiliary]:
        features = build_skeleton(self.run.make_spec(1)).backbone.features
        layer = Auxiliary("layer", {"features": features}, build_layer, "averaged", self.run.params.optimizer)
        if not self.settings.replay:
            return [layer]
        classes = count_columns(self.run.make_spec(len(self.run.splits.tasks)))
        width = self.settings.flow_width or min(features, WIDEST)
        flow = {"features": features, "width": width, "classes": classes}
        return [layer, Auxiliary("flow", flow, build_flow, "averaged")]

    @property
    def obstacle_to_noise(self) -> Obstacle | None:
        if not self.settings.replay:
            return None
        return Obstacle("asks which classes clients have, which noise would hide", "Use lwf or fedproto")

    @property
    def looks_back(self) -> bool:
        """Whether clients need the last task's final model and flow."""
        settings = self.settings
        return bool(settings.features or settings.outputs or settings.replay * settings.memory)

    # On the server.

    def start_task(self, server: Server, task: int) -> Server:
        started = super().start_task(server, task)
        if self.looks_back:
            started = anchor_to(started, server)
        fresh = self.auxiliaries.create_initial()
        grown = {name: grow_tables(state, fresh[name]) for name, state in server.networks.items()}
        knowledge = {**started.knowledge, **({"past": grown} if task and self.looks_back else {})}
        server = replace(started, networks=grown, knowledge=knowledge)
        return self.labels.start_task(server) if self.settings.replay else server

    def begin_task(self, server: Server, cohort: Cohort) -> Server:
        return self.labels.ask(server, cohort) if self.settings.replay else server

    def make_payload(self, server: Server) -> Payload:
        past = {f"past-{n}": Part("generator", s, once=True) for n, s in server.knowledge.get("past", {}).items()}
        sets = self.labels.make_payload(server) if self.settings.replay else {}
        return {**super().make_payload(server), **anchor_payload(server), **past, **sets}

    def make_own_model(self, server: Server) -> OwnModel:
        features, statistics = len(server.networks["layer"]["weight"]), self.settings.batch_norm != "batch"
        spec = {"model": server.spec.to_json(), "features": features, "statistics": statistics}
        network = {f"network.{name}": tensor for name, tensor in server.weights.items()}
        layer = {f"layer.{name}": tensor for name, tensor in server.networks["layer"].items()}
        return OwnModel(spec, {**network, **layer})

    @staticmethod
    def build_own_model(spec: Mapping[str, Any]) -> nn.Module:
        return LayeredModel(spec)

    # On a client.

    def start_training(self, training: LocalTraining, payload: Payload) -> None:
        if "anchor" in payload:
            network = self.last_networks.load(self.run.make_spec(training.client.task), payload["anchor"].tensors)
            past = {
                a.name: self.last_auxiliaries.load(a, payload[f"past-{a.name}"].tensors).eval().requires_grad_(False)
                for a in self.last_auxiliaries.auxiliaries
            }
            training.add(LastLayeredModel(network.eval(), past["layer"], past.get("flow")))
        if self.settings.replay and "columns" in payload:
            flow, layer = (training.networks[name][0] for name in ("flow", "layer"))
            assert isinstance(flow, FeatureFlow)
            sets = {name: columns.to(self.run.device) for name, columns in payload["columns"].tensors.items()}
            training.add(
                FeatureReplay(
                    self.settings, flow, layer, self.run.params.optimizer, sets, training.find_added(LastLayeredModel)
                )
            )

    def yield_epochs(self, training: LocalTraining) -> Iterator[Iterator[Batch]]:
        for epoch in super().yield_epochs(training):
            yield self.replay_before(training, epoch)

    def replay_before(self, training: LocalTraining, epoch: Iterator[Batch]) -> Iterator[Batch]:
        """Yield an epoch's batches, each after the flow's step on it and the layer's on draws."""
        replay, network = training.find_added(FeatureReplay), training.network
        for batch in epoch:
            if replay is not None:
                with torch.no_grad(), training.precision():
                    features = network.eval().backbone(batch.inputs).float()
                self.set_modes(network, training.client.task)
                columns = find_columns(network.spec, batch.labels, batch.tasks)
                replay.step_flow(features, columns)
                replay.step_layer(network, features, columns, training.lr)
            yield batch

    def compute_loss(self, training: LocalTraining, batch: Batch) -> Tensor:
        network, past = training.network, training.find_added(LastLayeredModel)
        features = training.compute_features(batch)
        hidden = training.networks["layer"][0](features)
        loss = self.compute_cross_entropy(network, hidden, batch.labels, training.client.task)
        if past is None:
            return loss
        with torch.no_grad():
            earlier = past.network.backbone(batch.inputs)
        if self.settings.features:
            loss = loss + self.settings.features * (features - earlier).square().mean()
        if self.settings.outputs:
            loss = loss + self.settings.outputs * distil_outputs(network, hidden, past, earlier)
        return loss
