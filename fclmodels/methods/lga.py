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

from fclmodels.backbones.model.network import Network
from fclmodels.data.batches import Batch
from fclmodels.federation.client import Client
from fclmodels.federation.engine.cohort import Cohort
from fclmodels.federation.engine.replies import Replies
from fclmodels.federation.exchange import Exchange, Memory
from fclmodels.federation.run_context import Run
from fclmodels.federation.server import Server
from fclmodels.federation.training.local_training import LocalTraining
from fclmodels.methods.parts.proxy_server import ProxyServer, ProxySettings
from fclmodels.methods.parts.rehearsal import LastModel, Rehearsed, find_targets
from fclmodels.numerics.gradient_compensation import compensate, measure_gaps, weigh_cross_entropy
from fclmodels.numerics.prototypes import Moments, fit_gaussians

LEAST, MOST = 0.5, 5.0  # of a sample's weight


class Lga(Rehearsed):
    """Clients balance the gradients of tasks; a proxy server picks the old model that stands noise best."""

    name = "lga"
    paper = "No One Left Behind: Real-World Federated Class-Incremental Learning"

    class Settings(Rehearsed.Settings, ProxySettings):
        copies: PositiveInt = Field(5, le=1000, description="noisy copies of each image's features (the release's)")
        first_rounds: NonNegativeInt = Field(
            6, le=100_000, description="rounds of a task whose models are no teacher (the release's)"
        )

    settings: Settings

    def __init__(self, settings: Settings, run: Run) -> None:
        super().__init__(settings, run)
        self.proxy = ProxyServer(settings, run, self.name, self.prepare_training, self.load_final)
        self.show = Exchange("show", self.make_payload, self.proxy.show_prototypes, self.proxy.make_form)
        self.describe = Exchange("describe", self.make_payload, self.sum_moments, self.make_moments_form)
        if settings.proxy:
            self.declare(self.show)
            self.declare(self.describe)

    # On the server.

    def enter_task(self, server: Server, last: Server) -> Server:
        return self.proxy.choose_teacher(server, last)

    def begin_task(self, server: Server, cohort: Cohort) -> Server:
        return self.proxy.rebuild(server, cohort, self.show)

    def aggregate(self, server: Server, replies: Replies) -> Server:
        return self.proxy.hold_best(super().aggregate(server, replies), self.judge)

    def leave_task(self, server: Server, cohort: Cohort) -> Server:
        if not self.settings.proxy or server.task > 0:
            return server
        radius = measure_radius(cohort.ask(self.describe, server).sum("moments"))
        return replace(server, knowledge={**server.knowledge, "radius": radius})

    def judge(self, server: Server) -> float:
        """Return the share of noisy features that the model's heads answer right; 0 in a task's first rounds."""
        rounds = server.knowledge.get("best", {"rounds": 0})["rounds"]
        if rounds < self.settings.first_rounds:
            return 0.0
        network, images = self.networks.load(server.spec, server.weights).eval(), server.knowledge["proxy"]
        features = self.proxy.embed_images(network, images).repeat(self.settings.copies, 1)
        random = self.run.make_generator("proxy noise", server.task, rounds)
        noise = server.knowledge.get("radius", 0.0) * torch.randn(features.shape, generator=random)
        return self.proxy.measure(network, features + noise.to(features), images, self.settings.copies)

    # On a client.

    def note(self, client: Client, network: Network, memory: Memory) -> Memory:
        return self.proxy.note_entropy(client, network, memory)

    def compute_loss(self, training: LocalTraining, batch: Batch) -> Tensor:
        teacher, (logits, labels) = training.find_added(LastModel), self.score(training, batch)
        weights = balance(measure_gaps(logits, labels), batch.tasks, training.client.task)
        loss = weigh_cross_entropy(logits, find_targets(None, logits, labels, batch.inputs), weights)
        if teacher is None:
            return loss
        return loss + weigh_cross_entropy(logits, find_targets(teacher, logits, labels, batch.inputs), weights)


def balance(gaps: Tensor, tasks: Tensor, task: int) -> Tensor:
    """Return w [B] within [0.5, 5], each task's samples by themselves; in the first task 1."""
    return compensate(gaps ** (task / (task + 1)), tasks).clamp(LEAST, MOST) if task else torch.ones_like(gaps)


def measure_radius(total: Moments) -> float:
    """Return the root of the mean over classes of their features' mean variance."""
    gaussians = fit_gaussians(total)
    return float(gaussians.sigma2[gaussians.present].mean().sqrt())
