"""AFC+FL: PODNet whose distillation weighs channels by what they matter to the old tasks' loss (Kang et al. 2022).

PODNet's distances give way to  lambda sqrt((n + m) / m) mean I_c ||u_c - u*_c||  over blocks, samples and channels; u_c
is channel c's map of squares, of length 1 over positions. Squares and norm are the release's, as PODNet has them.

I_c is the squared gradient of the loss by a block's output, summed over positions, over a client's samples of the task
that has ended, and over clients; the server divides it by its mean over the block's channels. Clients take it of the
final model in evaluation mode and without augmentation (ours: in the release passes in training mode move running
statistics). All else is in parts/proxy_classifier.py.

knowledge: PODNet's; `importance` {block: I [C]} of the last task's model.
"""

from dataclasses import replace
from functools import cached_property, partial
from typing import ClassVar

import numpy as np
import torch
from pydantic import Field, NonNegativeFloat
from torch import Tensor, nn
from torch.nn.functional import normalize

from fclmodels.data.batches import Batch
from fclmodels.data.sample_kind import find_kind
from fclmodels.federation.client import Client
from fclmodels.federation.engine.cohort import Cohort
from fclmodels.federation.exchange import Answer, Exchange, Form
from fclmodels.federation.messages import Part, Payload, make_outline
from fclmodels.federation.method import Obstacle
from fclmodels.federation.prediction import Predictor
from fclmodels.federation.run_context import Run
from fclmodels.federation.server import Server
from fclmodels.federation.training.auxiliary_networks import Auxiliary
from fclmodels.federation.training.local_training import LocalTraining
from fclmodels.methods.parts.coreset_memory import EMBED
from fclmodels.methods.parts.proxy_classifier import (
    FEATURES,
    NOISE,
    PROXIES,
    ClassifierSettings,
    Outputs,
    ProxyClassifier,
    clamp_gradients,
    declare_proxies,
    omit_heads,
)
from fclmodels.methods.parts.rehearsal import Rehearsed
from fclmodels.numerics.pooled_distillation import measure_channel_distance, sum_importance, to_maps

IMPORTANCE = "importance"


class Importance(dict[str, Tensor]):
    """I [C] of each block, in one training."""


class Afc(Rehearsed):
    """Clients hold on to channels as far as the loss of earlier tasks depends on them."""

    name = "afc"
    paper = "Class-Incremental Learning by Knowledge Distillation with Adaptive Feature Consolidation"
    answers_by_means: ClassVar[bool] = True

    class Settings(ClassifierSettings, Rehearsed.Settings):
        lam: NonNegativeFloat = Field(
            4.0, le=1e6, alias="lambda", description="weight of the distance; the paper's for ImageNet-100: 10"
        )

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
        self.weigh = self.declare(Exchange("weigh", self.make_payload, self.sum_gradients, self.make_importance_form))

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
        ended = self.classifier.tune(server, cohort, self.tune)
        sums = cohort.ask(self.weigh, ended).sum(IMPORTANCE)
        importance = {name: (total / total.mean()).nan_to_num(1.0).float() for name, total in sums.items()}
        return replace(ended, knowledge={**ended.knowledge, IMPORTANCE: importance})

    def make_predictor(self, server: Server) -> Predictor:
        if self.find_head(server) is not None:
            return super().make_predictor(server)
        return self.classifier.make_predictor(server, self.networks.load(server.spec, server.weights).eval())

    def add_payload(self, server: Server) -> Payload:
        importance = server.knowledge.get(IMPORTANCE)
        return {} if importance is None else {IMPORTANCE: Part("statistics", importance, once=True)}

    # On a client.

    def select_parameters(self, parameters: dict[str, nn.Parameter]) -> dict[str, nn.Parameter]:
        return omit_heads(parameters)

    def scale_features(self, features: Tensor) -> Tensor:
        return normalize(features)

    def change_gradients(self, training: LocalTraining) -> None:
        clamp_gradients(training)

    def finish_step(self, training: LocalTraining) -> None:
        self.classifier.restore_old(training)

    def make_importance_form(self, task: int, round: int) -> Form:
        return {IMPORTANCE: make_outline("statistics", self.channels, torch.float64)}

    @cached_property
    def channels(self) -> dict[str, tuple[int]]:
        """The number of channels of each block, those of an empty sample's outputs."""
        shape, zero = self.run.splits.shape, torch.zeros(1, dtype=torch.int64, device=self.run.device)
        empty = torch.from_numpy(np.zeros((1, *shape), find_kind(shape).dtype)).to(self.run.device)
        network = self.networks.build(self.run.make_spec(1)).eval()
        with torch.no_grad():
            outputs = self.classifier.run_blocks(network, self.run.batches.prepare_inputs(Batch(empty, zero, zero)))
        return {name: (to_maps(output).shape[1],) for name, output in outputs.items() if name != FEATURES}

    def sum_gradients(self, client: Client, payload: Payload) -> Answer:
        """Return the sums of squared gradients of each block's channels over a client's samples of the task."""
        network = self.load_final(client, payload).requires_grad_(True)
        proxies = self.classifier.load_proxies(payload[PROXIES].tensors)
        totals: dict[str, Tensor] = {}
        for batch in self.run.batches.iterate_ordered(client.rows, EMBED):
            outputs = self.classifier.run_blocks(network, batch)
            loss = self.classifier.classify(network, proxies, outputs.pop(FEATURES), batch) * len(batch.labels)
            gradients = torch.autograd.grad(loss, list(outputs.values()))
            for name, gradient in zip(outputs, gradients, strict=True):
                totals[name] = totals.get(name, torch.zeros((), dtype=torch.float64)) + sum_importance(gradient).cpu()
        return Answer({IMPORTANCE: totals}, client.memory)

    def equip(self, training: LocalTraining, payload: Payload) -> None:
        self.classifier.hold_old(training, payload)
        if IMPORTANCE in payload:
            training.add(Importance(payload[IMPORTANCE].tensors))

    def compute_loss(self, training: LocalTraining, batch: Batch) -> Tensor:
        importance = training.find_added(Importance) or Importance()
        return self.classifier.compute_loss(training, batch, partial(self.compare, importance))

    def compare(self, importance: Importance, outputs: Outputs, targets: Outputs) -> Tensor:
        """Return lambda times the mean over blocks of their channels' weighted distances."""
        distances = [
            measure_channel_distance(outputs[name], targets[name], importance.get(name))
            for name in outputs
            if name != FEATURES
        ]
        return self.settings.lam * torch.stack(distances).mean()
