"""Fed-CPrompt: CODA-Prompt with a contrastive loss between local, global and earlier prompts (Bagwe et al. 2023).

With P_k the present task's components of a client, as one vector, P_g the same as the round began, and P_i those of
earlier tasks, the paper's loss gains

    lambda max(0, ||P_k - P_g|| - gamma min_{i < t} ||P_k - P_i|| + margin).

lambda, gamma and margin could not be found: 1, 1 and 0.5 are ours, and so is that nothing is gained in the first task.
`contrast: release` is the loss that the release has in its place, of a batch's features f, f_g by the round's global
model and f_p by the last task's final one: max(0, sum_b (1000 ||f - f_g||^2 - 10 ||f - f_p||^2) + 1), times lambda; in
the first task the first term alone. The release's HEAD cannot run; left out are that clients begin a task's first round
with their own last model and that a task ends early.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

import torch
from pydantic import Field, NonNegativeFloat
from torch import Tensor

from fclmodels.backbones.adapters.adapted import PROMPTS
from fclmodels.backbones.adapters.coda_prompts import CodaVit
from fclmodels.backbones.model.network import Network, NetworkCache
from fclmodels.data.batches import Batch
from fclmodels.federation.messages import Payload
from fclmodels.federation.run_context import Run
from fclmodels.federation.training.local_training import LocalTraining
from fclmodels.methods.parts.task_adapters import AdapterTraining

NEAR, FAR, LEAST = 1000.0, 10.0, 1.0  # of the release


@dataclass(frozen=True)
class Prompts:
    """Flattened components of the round's global model, and those of each earlier task [t, n]."""

    start: Tensor
    earlier: Tensor


@dataclass(frozen=True)
class Models:
    """The round's global model and, from the second task on, the last task's final one."""

    start: Network
    last: Network | None


class FedCPrompt(AdapterTraining):
    """Federated CODA-Prompt whose prompts stay near the global ones and away from those of earlier tasks."""

    name = "fed-cprompt"
    paper = "Fed-CPrompt: Contrastive Prompt for Rehearsal-Free Federated Continual Learning"

    attaches = CodaVit

    class Settings(CodaVit.Settings):
        lam: NonNegativeFloat = Field(1.0, le=1e6, alias="lambda", description="weight of the contrastive loss (ours)")
        gamma: NonNegativeFloat = Field(1.0, le=1e6, description="weight of the nearest earlier task's distance (ours)")
        margin: NonNegativeFloat = Field(0.5, le=1e6, description="margin of the contrastive loss (ours)")
        contrast: Literal["prompts", "release"] = Field(
            "prompts", description="between prompts (the paper), or between features of a batch (the release)"
        )

    settings: Settings

    def __init__(self, settings: Settings, run: Run) -> None:
        super().__init__(settings, run)
        self.compared = [NetworkCache(self.run.device, self.prepare_network) for _ in range(2)]

    def start_training(self, training: LocalTraining, payload: Payload) -> None:
        task, start = training.client.task, training.start
        if self.settings.contrast == "prompts":
            if task > 0:
                earlier = torch.stack([flatten_prompts(start, of) for of in range(task)])
                training.add(Prompts(flatten_prompts(start, task), earlier))
            return
        global_model = self.compared[0].load(training.network.spec, start).eval()
        last_model = None
        if task > 0:
            spec = self.run.make_spec(task)
            last_model = self.compared[1].load(spec, crop(start, spec.label_count)).eval()
        training.add(Models(global_model, last_model))

    def compute_loss(self, training: LocalTraining, batch: Batch) -> Tensor:
        network, task, settings = training.network, training.client.task, self.settings
        features = self.compute_features(network, batch, task)
        loss = self.compute_cross_entropy(network, features, batch.labels, task)
        if not settings.lam:
            return loss
        if prompts := training.find_added(Prompts):
            own = flatten_prompts(training.parameters, task)
            further = contrast_prompts(own, prompts.start, prompts.earlier, settings.gamma, settings.margin)
            return loss + settings.lam * further
        if models := training.find_added(Models):
            with torch.no_grad():
                start = self.compute_features(models.start, batch, task)
                last = None if models.last is None else self.compute_features(models.last, batch, task)
            return loss + settings.lam * contrast_features(features, start, last)
        return loss

    def compute_features(self, network: Network, batch: Batch, task: int) -> Tensor:
        """Return the features [B, F] of a batch."""
        return self.network.compute_features(network, batch, task).features


def flatten_prompts(tensors: Mapping[str, Tensor], task: int) -> Tensor:
    """Return a task's components P of all layers as one vector."""
    return tensors[f"{PROMPTS}.{task}.P"].flatten()


def crop(weights: dict[str, Tensor], labels: int) -> dict[str, Tensor]:
    """Return weights whose growing head has the rows of the first so many labels."""
    return {name: w[:labels] if name.startswith("heads.0.") else w for name, w in weights.items()}


def contrast_prompts(own: Tensor, start: Tensor, earlier: Tensor, gamma: float, margin: float) -> Tensor:
    """Return max(0, ||P_k - P_g|| - gamma min_i ||P_k - P_i|| + margin), for P_i in rows [t, n]."""
    nearest = (own - earlier).norm(dim=1).min()
    return ((own - start).norm() - gamma * nearest + margin).clamp(min=0)


def contrast_features(features: Tensor, start: Tensor, last: Tensor | None) -> Tensor:
    """Return max(0, sum_b (1000 ||f - f_g||^2 - 10 ||f - f_p||^2) + 1), or without f_p 1000 sum_b ||f - f_g||^2."""
    near = NEAR * (features - start).square().sum()
    if last is None:
        return near
    return (near - FAR * (features - last).square().sum() + LEAST).clamp(min=0)
