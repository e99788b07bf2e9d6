"""Networks beside the model, at all three places: clients train one together, the server one, each client its own.

The decoder reconstructs features, and is averaged. The generator makes features for the clients to be far from; the
server trains it after each task. The scale stays with its client, and stretches the features that it trains on.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from fclmodels.backbones.model.network import build_skeleton
from fclmodels.data.batches import Batch
from fclmodels.federation.engine.cohort import Cohort
from fclmodels.federation.server import Server
from fclmodels.federation.training.auxiliary_networks import Auxiliary, copy_state
from fclmodels.federation.training.local_training import LocalTraining, make_optimiser
from fclmodels.federation.training.server_training import NetworkTraining
from fclmodels.methods.fedavg import FedAvg
from fclmodels.settings.schema import OptimizerSettings

NOISE, STEPS = 3, 5
ADAM = OptimizerSettings(kind="adam", lr=0.01)


class BesideNetwork(FedAvg):
    """FedAvg with a decoder, a generator and a scale beside the model."""

    name = "beside-network"
    paper = "none"

    def list_auxiliary_networks(self) -> list[Auxiliary]:
        spec = {"features": build_skeleton(self.run.make_spec(1)).backbone.features}
        return [
            Auxiliary("decoder", spec, build_decoder, "averaged", ADAM),
            Auxiliary("generator", spec, build_generator, "server"),
            Auxiliary("scale", spec, build_scale, "client", OptimizerSettings(lr=0.5)),
        ]

    def compute_loss(self, training: LocalTraining, batch: Batch) -> Tensor:
        decoder, generator, scale = (training.networks[name][0] for name in ("decoder", "generator", "scale"))
        features = training.compute_features(batch) * scale.weight
        noise = torch.randn(len(features), NOISE, device=features.device)
        distance = (decoder(features) - features.detach()).square().mean() - 0.1 * (
            generator(noise) - features
        ).abs().mean()
        return self.compute_cross_entropy(training.network, features, batch.labels, training.client.task) + distance

    def finish_task(self, server: Server, cohort: Cohort) -> Server:
        (auxiliary,) = self.auxiliaries.list_by_place("server")
        generator = self.auxiliaries.load(auxiliary, server.networks["generator"]).train().requires_grad_(True)
        optimiser = make_optimiser(ADAM, list(generator.parameters()), 0)

        def loss(number: int) -> Tensor:
            return (generator(torch.randn(4, NOISE, device=self.run.device)) - 1).square().mean()

        cohort.train(NetworkTraining("generator", {"generator": generator}, [optimiser], loss), STEPS)
        return replace(server, networks={**server.networks, "generator": copy_state(generator)})


def build_decoder(spec: Mapping[str, Any]) -> nn.Module:
    width = spec["features"]
    return nn.Sequential(nn.Linear(width, width), nn.BatchNorm1d(width), nn.Dropout(0.2), nn.Linear(width, width))


def build_generator(spec: Mapping[str, Any]) -> nn.Module:
    return nn.Sequential(nn.Linear(NOISE, spec["features"]), nn.Dropout(0.2))


def build_scale(spec: Mapping[str, Any]) -> nn.Module:
    scale = nn.Module()
    scale.weight = nn.Parameter(torch.ones(spec["features"]))
    return scale
