"""AF-FCL's replay: steps of the flow and of the layer behind it, before each batch of one training."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

import torch
from pydantic import Field, NonNegativeFloat, PositiveFloat, PositiveInt
from torch import Tensor, nn

from fclmodels.backbones.model.network import Network
from fclmodels.federation.training.optimisers import Optimiser, make_optimiser
from fclmodels.methods.parts.distillation import distil_heads
from fclmodels.methods.parts.feature_flow import FeatureFlow, weigh_by_density
from fclmodels.methods.parts.joined_heads import compute_cross_entropy_in_heads
from fclmodels.methods.parts.label_sets import draw_uniformly
from fclmodels.settings.base import Settings as BaseSettings
from fclmodels.settings.schema import OptimizerSettings

TEMPERATURE = 2.0
FARTHEST = 10.0


class FeatureReplaySettings(BaseSettings):
    replay: NonNegativeFloat = Field(
        0.5, le=1e6, description="weight of replay (the release's k_loss_flow); 0: no flow either"
    )
    memory: NonNegativeFloat = Field(
        0.1, le=1e6, description="weight of the last flow's draws in the flow's loss (k_flow_lastflow)"
    )
    theta: float = Field(
        0.1, ge=0, le=1, description="least share of replay; the rest goes with the density of the batch"
    )
    outputs: NonNegativeFloat = Field(
        0.02, le=1e6, description="weight of distillation of the last model's outputs (0.2 * 0.1)"
    )
    flow_lr: PositiveFloat = Field(5e-3, le=100, description="learning rate of the flow's Adam")
    flow_width: PositiveInt | None = Field(
        None,
        le=100_000,
        description="width of the flow's layers; null: as many as features, at most the release's 512",
    )
    credibility: Literal["latents", "release"] = Field(
        "latents", description="what of a draw is compared with the batch's latents: its latents, or its features"
    )


@dataclass(frozen=True)
class LastLayeredModel:
    """The last task's final model and flow, in evaluation mode, in one training."""

    network: Network
    layer: nn.Module
    flow: nn.Module | None  # where there is replay


class FeatureReplay:
    """The flow, the layer and their optimisers; sets: `past` and `now`, columns that may be drawn."""

    def __init__(
        self,
        settings: FeatureReplaySettings,
        flow: FeatureFlow,
        layer: nn.Module,
        layer_optimizer: OptimizerSettings,
        sets: Mapping[str, Tensor],
        last: LastLayeredModel | None,
    ) -> None:
        self.settings = settings
        self.flow = flow.train().requires_grad_(True)
        self.layer = layer
        self.sets = sets
        self.last = last
        adam = OptimizerSettings(kind="adam", lr=settings.flow_lr)
        self.of_flow = make_optimiser(adam, list(flow.parameters()), 0)
        self.of_layer = make_optimiser(layer_optimizer, list(layer.parameters()), 0)

    def step_flow(self, features: Tensor, columns: Tensor) -> None:
        """Move the flow up the log density of features [B, d], and of draws from the last task's flow."""
        loss, past = -self.flow(features, columns)[1].mean(), self.sets["past"]
        if self.last is not None and self.settings.memory and len(past):
            assert isinstance(self.last.flow, FeatureFlow)
            drawn, _, earlier = draw_near(self.last.flow, past, features)
            if len(drawn):
                loss = loss - self.settings.memory * self.flow(drawn, earlier)[1].mean()
        descend(self.of_flow, loss)

    def step_layer(self, network: Network, features: Tensor, columns: Tensor, lr: float) -> None:
        """Move the layer, at this rate, down the loss of as many draws as there are features."""
        settings = self.settings
        drawn, latents, wished = draw_near(self.flow, self.sets["now"], features)
        if not len(drawn):
            return
        with torch.no_grad():
            present, log_density = self.flow(features, columns)
            density = (log_density / self.flow.features).exp().mean()
            compared, least = (latents, 2) if settings.credibility == "latents" else (drawn, 1)
            weights = weigh_by_density(compared, wished, present, columns, density, least)
        hidden = self.layer(drawn)
        loss = weigh_replay(compute_cross_entropy_in_heads(network, hidden, wished), weights, density, settings.theta)
        if self.last is not None and settings.outputs:
            loss = loss + settings.outputs * distil_outputs(network, hidden, self.last, drawn)
        self.of_layer.param_groups[0]["lr"] = lr
        descend(self.of_layer, settings.replay * loss)


def draw_near(flow: FeatureFlow, columns: Tensor, features: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return as many draws as there are features, without those that are too far, their latents and their columns.

    Columns are drawn uniformly from these. Too far is what is FARTHEST times as long as the longest of the features.
    """
    chosen = draw_uniformly(columns, len(features))
    drawn, latents = flow.draw(chosen)
    near = drawn.norm(dim=1) <= FARTHEST * features.norm(dim=1).max()
    return drawn[near], latents[near], chosen[near]


def descend(optimiser: Optimiser, loss: Tensor) -> None:
    """Take one step of an optimiser down a loss."""
    optimiser.zero_grad()
    loss.backward()
    optimiser.step()


def weigh_replay(losses: Tensor, weights: Tensor, density: Tensor, theta: float) -> Tensor:
    """Return mean_i [w_i CE_i] ((1 - theta) P + theta)."""
    return (weights * losses).mean() * ((1 - theta) * density + theta)


def distil_outputs(network: Network, hidden: Tensor, last: LastLayeredModel, features: Tensor) -> Tensor:
    """Return the sum over the last model's heads of the distillation loss; features: as that model saw them."""
    with torch.no_grad():
        before = last.layer(features)
        answers = [head(before) for head in last.network.heads]
    return distil_heads(network, hidden, answers, TEMPERATURE)
