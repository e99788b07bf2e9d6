"""FedAvg of prompts whose heads also learn from classes' Gaussians: the base of PIP-L2P and PIP-DualP (Algorithm 1)."""

from collections.abc import Iterator
from typing import ClassVar

import torch
from torch import Tensor

from fclmodels.backbones.adapters.adapted import Adapted
from fclmodels.data.batches import Batch
from fclmodels.errors import UserError
from fclmodels.federation.engine.cohort import Cohort
from fclmodels.federation.engine.replies import Replies
from fclmodels.federation.exchange import Form, Memory
from fclmodels.federation.messages import Payload
from fclmodels.federation.method import Obstacle
from fclmodels.federation.prediction import FittedHead
from fclmodels.federation.run_context import Run
from fclmodels.federation.server import Server
from fclmodels.federation.training.local_training import LocalTraining
from fclmodels.methods.fedavg import FedAvg
from fclmodels.methods.parts.frozen_backbone import FrozenBackbone
from fclmodels.methods.parts.prompt_training import PromptSettings, PromptTraining
from fclmodels.methods.parts.prototype_injection import InjectedPrototypes, InjectionSettings, PrototypeInjection
from fclmodels.methods.parts.refitted_head import RefittedHead


class InjectedPrompts(FedAvg):
    """FedAvg with the parts FrozenBackbone, PromptTraining and PrototypeInjection."""

    attaches: ClassVar[type[Adapted]]

    class Settings(InjectionSettings, PromptSettings):
        pass

    settings: Settings

    def __init__(self, settings: Settings, run: Run) -> None:
        backbone = FrozenBackbone(settings, run, self.name, self.attaches, settings.head)
        super().__init__(settings, backbone.run, backbone)
        self.prompts = PromptTraining(settings, backbone)
        self.injection = PrototypeInjection(settings, backbone)
        self.refitted = RefittedHead(backbone, self.networks)
        if settings.refit:
            self.declare(self.refitted.exchange)
        for name in ("earlier", "refit"):
            if getattr(settings, name) and run.make_spec(1).head == "per-task":
                raise UserError(
                    f"methods.{self.name}.{name} does nothing under model.head: per-task, where a task trains its own "
                    "head alone. Leave it out, or use model.head: growing."
                )
        if settings.refit and settings.head != "shared":
            raise UserError(f"methods.{self.name}.refit fits one head for all clients. Use head: shared.")

    @property
    def obstacle_to_noise(self) -> Obstacle | None:
        if self.settings.refit:
            return Obstacle("fits the head to sums of features that are not clipped", "Set refit: false")
        if self.settings.pooled == "omega":
            return Obstacle("weighs prototypes by omega, and noise covers means over samples", "Set pooled: counts")
        return self.prompts.obstacle_to_noise

    def list_advice(self) -> list[str]:
        return self.prompts.list_advice()

    # Prototypes: gathered on the server, downloaded by clients, sampled in each batch.

    def start_task(self, server: Server, task: int) -> Server:
        return self.injection.start_task(super().start_task(server, task))

    def make_payload(self, server: Server) -> Payload:
        return {**super().make_payload(server), **self.injection.make_payload(server)}

    def start_training(self, training: LocalTraining, payload: Payload) -> None:
        self.prompts.start(training, payload)
        self.injection.start(training, payload)

    def yield_epochs(self, training: LocalTraining) -> Iterator[Iterator[Batch]]:
        for number, epoch in enumerate(super().yield_epochs(training)):
            if number == 1:
                self.injection.add_own(training)
            yield epoch

    def compute_head_loss(self, training: LocalTraining, features: Tensor, labels: Tensor) -> Tensor:
        """Return the cross entropy of a batch's features [B, F] and labels [B], with vectors of prototypes."""
        network, task = training.network, training.client.task
        injected = training.find_added(InjectedPrototypes)
        if injected is None or not len(injected.labels):  # a monitor's training has none
            return self.compute_cross_entropy(network, features, labels, task)
        vectors, new_labels, tasks = injected.draw(len(labels))
        tasks = torch.cat([torch.full_like(labels, task), tasks])
        features, labels = torch.cat([features, vectors]), torch.cat([labels, new_labels])
        return self.compute_cross_entropy_by_task(network, features, labels, tasks)

    def make_update_form(self, task: int, round: int) -> Form:
        network = self.networks.build(self.run.make_spec(task + 1))
        moments = self.injection.backbone.make_moments_form(network, task, self.injection.bound)
        return {**super().make_update_form(task, round), "moments": moments}

    def make_further_parts(self, training: LocalTraining, payload: Payload) -> dict[str, dict[str, Tensor]]:
        return {"moments": self.injection.compute_moments(training, self.compute_client_weight(training))}

    def aggregate(self, server: Server, replies: Replies) -> Server:
        return self.injection.gather(super().aggregate(server, replies), replies)

    def finish_task(self, server: Server, cohort: Cohort) -> Server:
        server = super().finish_task(server, cohort)
        if not self.settings.refit:
            return server
        return self.refitted.refit(server, cohort.ask(self.refitted.exchange, server))

    def find_head(self, server: Server) -> FittedHead | None:
        return self.refitted.find_head(server)

    # Prompts.

    def compute_loss(self, training: LocalTraining, batch: Batch) -> Tensor:
        return self.prompts.compute_loss(training, batch, self.compute_head_loss)

    def compute_client_weight(self, training: LocalTraining) -> float:
        return self.prompts.weigh(training.client)

    def bound_client_weight(self, task: int) -> float:
        return super().bound_client_weight(task) * self.prompts.bound_weight(task)

    def remember(self, training: LocalTraining) -> Memory:
        return {**super().remember(training), **self.prompts.make_memory(training.client)}
