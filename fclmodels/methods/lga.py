"""LGA: GLFC with category-balanced gradients and a proxy server that adds noise to features (Dong et al. 2023).

With t old tasks g_i becomes g_i^(t / (t + 1)), so that gaps differ less the fewer tasks there have been. w_i is g_i
over its mean in the batch's samples of i's own task, within [0.5, 5]; both losses have it, and weight 1:

    L = mean of w_i BCE(z_i, one-hot) + mean of w_i BCE(z_i, one-hot with old columns s(z*))

In the release the marks of classes add up over the tasks, so that older samples count several times: here each counts
in its own task (ours). In the first task all weigh 1.

The proxy server measures models on noisy copies of its images' features, f + r e with e from N(0, I), after the first
rounds of a task. r^2 is the mean over the first task's classes of tr(Sigma) / F, their features' covariance. For that
clients send moments of their classes when the first task has ended (ours: the release's server reads their images); its
noise has squared variances in place of deviations.

knowledge: GLFC's, and `radius`.
"""

from dataclasses import replace

import torch
from pydantic import Field, NonNegativeInt, PositiveInt
from torch import Tensor

from fclmodels.federation.engine.cohort import Cohort
from fclmodels.federation.exchange import Exchange, Memory
from fclmodels.federation.run_context import Run
from fclmodels.federation.server import Server
from fclmodels.methods.glfc import Glfc
from fclmodels.numerics.gradient_compensation import compensate, weigh_cross_entropy
from fclmodels.numerics.prototypes import Moments, fit_gaussians

LEAST, MOST = 0.5, 5.0  # of a sample's weight


class Lga(Glfc):
    """Clients balance the gradients of tasks; a proxy server picks the old model that stands noise best."""

    name = "lga"
    paper = "No One Left Behind: Real-World Federated Class-Incremental Learning"

    class Settings(Glfc.Settings):
        copies: PositiveInt = Field(5, le=1000, description="noisy copies of each image's features (the release's)")
        first_rounds: NonNegativeInt = Field(
            6, le=100_000, description="rounds of a task whose models are no teacher (the release's)"
        )

    settings: Settings

    def __init__(self, settings: Settings, run: Run) -> None:
        super().__init__(settings, run)
        if settings.proxy:
            self.describe = self.declare(Exchange("describe", self.payload, self.sum_moments, self.moments_form))

    # On the server.

    def keep_over_tasks(self, server: Server) -> Memory:
        return {"radius": server.knowledge["radius"]} if "radius" in server.knowledge else {}

    def finish_task(self, server: Server, cohort: Cohort) -> Server:
        if self.settings.proxy and server.task == 0:
            radius = measure_radius(cohort.ask(self.describe, server).sum("moments"))
            server = replace(server, knowledge={**server.knowledge, "radius": radius})
        return super().finish_task(server, cohort)

    def judge(self, server: Server) -> float:
        """Return the share of noisy features that the model's heads answer right; 0 in a task's first rounds."""
        rounds = server.knowledge.get("best", {"rounds": 0})["rounds"]
        if rounds < self.settings.first_rounds:
            return 0.0
        network, images = self.networks.load(server.spec, server.weights).eval(), server.knowledge["proxy"]
        features = self.proxy.embed_images(network, images).repeat(self.settings.copies, 1)
        random = self.run.generator("proxy noise", server.task, rounds)
        noise = torch.randn(features.shape, generator=random).to(features)
        return self.proxy.measure(
            network, features + server.knowledge.get("radius", 0.0) * noise, images, self.settings.copies
        )

    # On a client.

    def weigh(self, gaps: Tensor, tasks: Tensor, task: int) -> Tensor:
        """Return w [B] within [0.5, 5], each task's samples by themselves; in the first task 1."""
        return compensate(gaps ** (task / (task + 1)), tasks).clamp(LEAST, MOST) if task else torch.ones_like(gaps)

    def join(self, right: Tensor, logits: Tensor, targets: Tensor, weights: Tensor) -> Tensor:
        return right + weigh_cross_entropy(logits, targets, weights)


def measure_radius(total: Moments) -> float:
    """Return the root of the mean over classes of their features' mean variance."""
    gaussians = fit_gaussians(total)
    return float(gaussians.sigma2[gaussians.present].mean().sqrt())
