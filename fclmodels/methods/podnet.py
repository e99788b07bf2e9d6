"""PODNet+FL: distillation of pooled block outputs, and a classifier of cosine proxies (Douillard et al. 2020).

A client descends  NCA + sqrt((n + m) / m) (lambda_c POD-spatial + lambda_f POD-flat)  for n old and m new columns on
the union of its rows and exemplars (parts/proxy_classifier.py, which says how a federation has it). POD-spatial is the
mean over blocks of the distance between pooled outputs, POD-flat that of the features (pooled_distillation.py).

Answers are the nearest mean of exemplars, the paper's NME, whose lambda_c is 5. Its CNN, with 3, where the classifier
answers, is not there.
"""

from typing import ClassVar

import torch
from pydantic import Field, NonNegativeFloat
from torch import Tensor, nn
from torch.nn.functional import normalize

from fclmodels.data.batches import Batch
from fclmodels.federation.engine.cohort import Cohort
from fclmodels.federation.exchange import Exchange
from fclmodels.federation.messages import Payload
from fclmodels.federation.method import Obstacle
from fclmodels.federation.prediction import Predictor
from fclmodels.federation.run_context import Run
from fclmodels.federation.server import Server
from fclmodels.federation.training.auxiliary_networks import Auxiliary
from fclmodels.federation.training.local_training import LocalTraining
from fclmodels.methods.parts.proxy_classifier import (
    FEATURES,
    NOISE,
    ClassifierSettings,
    Outputs,
    ProxyClassifier,
    clamp_gradients,
    declare_proxies,
    omit_heads,
)
from fclmodels.methods.parts.rehearsal import Rehearsed
from fclmodels.numerics.pooled_distillation import measure_angle, measure_pooled_distance


class Podnet(Rehearsed):
    """Clients hold on to pooled outputs of all blocks while they learn proxies of new classes."""

    name = "podnet"
    paper = "PODNet: Pooled Outputs Distillation for Small-Tasks Incremental Learning"
    answers_by_means: ClassVar[bool] = True

    class Settings(ClassifierSettings, Rehearsed.Settings):
        spatial: NonNegativeFloat = Field(5.0, le=1e6, description="lambda_c, weight of the blocks' distance")
        flat: NonNegativeFloat = Field(1.0, le=1e6, description="lambda_f, weight of the features' distance")

    settings: Settings
    uses_frozen_activations = False

    def __init__(self, settings: Settings, run: Run) -> None:
        super().__init__(settings, run)
        self.classifier = ProxyClassifier(settings, run, self.auxiliaries, self.load_final)
        introduce = Exchange("introduce", self.make_payload, self.sum_moments, self.make_moments_form)
        self.introduce = self.declare(introduce)
        self.tune = self.declare(
            Exchange("tune", self.make_payload, self.classifier.tune_proxies, self.classifier.make_tune_form)
        )

    def list_auxiliary_networks(self) -> list[Auxiliary]:
        return [declare_proxies(self.run, self.settings.proxies)]

    @property
    def obstacle_to_noise(self) -> Obstacle | None:
        return NOISE

    # On the server.

    def enter_task(self, server: Server, last: Server) -> Server:
        return self.classifier.grow(server, last)

    def begin_task(self, server: Server, cohort: Cohort) -> Server:
        return self.classifier.draw(server, cohort, self.introduce)

    def leave_task(self, server: Server, cohort: Cohort) -> Server:
        return self.classifier.tune(server, cohort, self.tune)

    def make_predictor(self, server: Server) -> Predictor:
        if self.find_head(server) is not None:
            return super().make_predictor(server)
        return self.classifier.make_predictor(server, self.networks.load(server.spec, server.weights).eval())

    # On a client.

    def select_parameters(self, parameters: dict[str, nn.Parameter]) -> dict[str, nn.Parameter]:
        return omit_heads(parameters)

    def scale_features(self, features: Tensor) -> Tensor:
        return normalize(features)

    def change_gradients(self, training: LocalTraining) -> None:
        clamp_gradients(training)

    def finish_step(self, training: LocalTraining) -> None:
        self.classifier.restore_old(training)

    def equip(self, training: LocalTraining, payload: Payload) -> None:
        self.classifier.hold_old(training, payload)

    def compute_loss(self, training: LocalTraining, batch: Batch) -> Tensor:
        return self.classifier.compute_loss(training, batch, self.compare)

    def compare(self, outputs: Outputs, targets: Outputs) -> Tensor:
        """Return lambda_c POD-spatial + lambda_f POD-flat."""
        names = [name for name in outputs if name != FEATURES]
        spatial = torch.stack([measure_pooled_distance(outputs[name], targets[name]) for name in names]).mean()
        angle = measure_angle(outputs[FEATURES], targets[FEATURES])
        return self.settings.spatial * spatial + self.settings.flat * angle
