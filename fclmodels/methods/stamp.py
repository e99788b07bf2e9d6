"""STAMP: spatio-temporal gradient alignment with a prototypical coreset (Algorithm 1).

FedAvg with two parts. On the server GA replaces the mean of the clients' updates (gradient_alignment.py, "spatio"). On
a client, from its second task on, GA combines a vector of the current task with one of each task that it has had
("temporal"):

- algorithm1, the paper's: after the round's local steps, from theta to theta', the mean g~ of their gradients and a
  gradient g_i of each past task at theta'; theta <- theta - eta_g GA(g~, g_1, ..) (lines 9 to 21). Line 16's weights
  theta^(r,e) and the sum over e say that local steps move the model, as in FedAvg. The displacement theta' - theta
  stands for g~, which under plain SGD is - eta S g~ over S steps, and the g_i are brought to its scale by
  ||theta' - theta|| / ||g~||; so eta_g = eta S times `temporal_lr`, which is 1.
- step: at the same weights in each local step. round: displacements of equally many steps from the round's start.

Past tasks' gradients are those of coreset samples (coreset_memory.py, line 16), or of prototypes (eq. 3): the mean
features of each stored class on the present model, through which the gradient reaches the backbone. Eq. 7's
prototypical network trains the encoder, with such prototypes of the other classes.

Table 2's (1) is spatio, (2) temporal with selection: random and protonet: 0, (3) coreset and prototypical network.
"""

from collections.abc import Collection, Iterator
from typing import Literal

import torch
from pydantic import Field, PositiveFloat, model_validator
from torch import Tensor

from fclmodels.backbones.layers.norms import leave_statistics
from fclmodels.data.batches import Batch
from fclmodels.federation.client import Client
from fclmodels.federation.engine.cohort import Cohort
from fclmodels.federation.engine.replies import Replies
from fclmodels.federation.exchange import Answer, Exchange, Form
from fclmodels.federation.messages import Payload
from fclmodels.federation.method import Obstacle
from fclmodels.federation.run_context import Run
from fclmodels.federation.server import Server
from fclmodels.federation.training.local_training import LocalTraining
from fclmodels.federation.training.optimisers import make_optimiser
from fclmodels.methods.fedavg import FedAvg
from fclmodels.methods.parts.coreset_memory import CoresetMemory, CoresetSettings
from fclmodels.methods.parts.gradient_alignment import AlignmentSettings, GradientAlignment, require_single_updates
from fclmodels.methods.parts.past_tasks import Gradients, PastTasks, isolate_pass
from fclmodels.methods.parts.replay_memory import unpack_samples
from fclmodels.numerics.protonet import average_classes, prototype_loss
from fclmodels.randomness import seed_torch


class Stamp(FedAvg):
    """Aligns updates of clients on the server, and gradients of tasks on each client, by a few stored samples."""

    name = "stamp"
    paper = "Exploiting Client Heterogeneity for Forgetting Mitigation in Federated Continual Learning"

    class Settings(CoresetSettings, AlignmentSettings, FedAvg.Settings):
        spatio: bool = Field(True, description="align the clients' updates on the server; false: average them")
        temporal: Literal["algorithm1", "step", "round", "none"] = Field(
            "algorithm1",
            description="alignment of tasks on each client. algorithm1, the paper's: once a round, the mean gradient "
            "of its local steps with a gradient of each past task; step: gradients in every step; round: displacements "
            "of as many steps on each task, near the release's",
        )
        temporal_lr: PositiveFloat = Field(
            1.0, le=1e3, description="under temporal: algorithm1, eta_g of its line 21, in times the local steps' own"
        )
        tasks_from: Literal["coreset", "prototypes"] = Field(
            "coreset",
            description="what past tasks' gradients are of; prototypes: of their classes' mean features (eq. 3)",
        )
        clients: AlignmentSettings = AlignmentSettings()  # of tasks on each client; those above are the server's
        protonet: float = Field(0.1, ge=0, description="weight of the prototypical network's loss (eq. 7); 0: without")

        @model_validator(mode="after")
        def _something_is_aligned(self) -> "Stamp.Settings":
            if self.temporal in ("round", "none") and self.tasks_from == "prototypes":
                raise ValueError("tasks_from: prototypes gives gradients: use temporal: algorithm1, or temporal: step.")
            if self.temporal != "algorithm1" and self.temporal_lr != type(self).model_fields["temporal_lr"].default:
                raise ValueError("temporal_lr needs temporal: algorithm1.")
            if self.temporal == "none" and not self.spatio:
                raise ValueError("spatio: false and temporal: none leave nothing to align. Use method fedavg.")
            return self

    settings: Settings
    trains_earlier_heads = True

    def __init__(self, settings: Settings, run: Run) -> None:
        super().__init__(settings, run)
        self.alignment = GradientAlignment(settings)
        self.alignment_of_tasks = GradientAlignment(settings.clients)
        self.coreset = CoresetMemory(settings, run, self.name, self.networks)
        self.store = self.declare(Exchange("coreset", self.make_payload, self.store_coreset))

    # Between clients, on the server.

    @property
    def obstacle_to_sums(self) -> Obstacle | None:
        if not self.settings.spatio:
            return None
        return Obstacle("methods.stamp.spatio aligns single updates on the server", "Set it to false")

    @property
    def obstacle_to_robust_rules(self) -> Obstacle | None:
        return Obstacle("aligns them (spatio: false averages)", "Use mean") if self.settings.spatio else None

    def make_update_form(self, task: int, round: int) -> Form:
        form = super().make_update_form(task, round)
        return require_single_updates(form) if self.settings.spatio else form

    def combine(self, replies: Replies) -> Gradients:
        return self.alignment.combine(replies) if self.settings.spatio else super().combine(replies)

    def finish_task(self, server: Server, cohort: Cohort) -> Server:
        cohort.ask(self.store, server)
        return server

    # Between tasks, on a client.

    def store_coreset(self, client: Client, payload: Payload) -> Answer:
        """Return the memory with the task's coreset; the answer itself is empty."""
        weights = self.join_own_weights(client, payload)
        network = self.networks.load(self.run.make_spec(client.task + 1), weights).eval()
        return Answer({}, self.coreset.add_task(client, network))

    def start_training(self, training: LocalTraining, payload: Payload) -> None:
        samples = unpack_samples(training.client.memory)
        if samples is not None:
            training.add(PastTasks(training.client, samples))

    def compute_loss(self, training: LocalTraining, batch: Batch) -> Tensor:
        """Return the cross entropy in the batch's task, and eq. 7 against the client's prototypes of other classes."""
        network = training.network
        features = training.compute_features(batch)
        loss = self.compute_cross_entropy(network, features, batch.labels, int(batch.tasks[0]))
        if self.settings.protonet:
            past = training.find_added(PastTasks)
            prototypes = past.compute_prototypes(training) if past else make_no_prototypes(features)
            loss = loss + self.settings.protonet * prototype_loss(features, batch.labels, *prototypes)
        return loss

    def change_gradients(self, training: LocalTraining) -> None:
        """Replace gradients, under `temporal: step`, by GA of the current gradient and one of each past task."""
        past = training.find_added(PastTasks)
        if past is None:
            return
        if self.settings.temporal == "algorithm1":
            past.add_gradients(training.gradients)
        elif self.settings.temporal == "step":
            vectors = past.reserve_table(training.parameters).fill(self.compute_past_gradients(training, past))
            for name, gradient in self.align_tasks(training.gradients, vectors).items():
                training.parameters[name].grad = gradient

    def compute_past_gradients(self, training: LocalTraining, past: PastTasks) -> Iterator[Gradients]:
        """Yield a gradient of each past task at the present weights, by name: of samples or of prototypes."""
        loss = self.compute_loss if self.settings.tasks_from == "coreset" else self.compute_prototype_loss
        for task in past.samples:
            with isolate_pass(training):
                value = loss(training, past.draw(task))
            yield training.compute_gradients(value)

    def compute_prototype_loss(self, training: LocalTraining, batch: Batch) -> Tensor:
        """Return the mean over the batch's classes of the cross entropy of their mean features (eq. 3)."""
        means, labels = average_classes(training.network.backbone(batch.inputs), batch.labels)
        return self.compute_cross_entropy(training.network, means, labels, int(batch.tasks[0]))

    def finish_training(self, training: LocalTraining) -> None:
        """Move from the round's start by GA of a vector of the current task and one of each past task."""
        past = training.find_added(PastTasks)
        if past is None or self.settings.temporal not in ("algorithm1", "round"):
            return
        client, moved = training.client, training.measure_movement(training.start)
        with seed_torch(client.run.seed, "coreset", client.task, client.round, client.index, device=client.run.device):
            if self.settings.temporal == "algorithm1":
                vectors = self.compute_past_steps(training, past, moved)
            else:
                vectors = (self.train_on_past(training, past, task) for task in past.samples)
            aligned = {**moved, **self.align_tasks(moved, past.reserve_table(training.parameters).fill(vectors))}
        training.move_from(training.start, {name: d * self.settings.temporal_lr for name, d in aligned.items()})

    def compute_past_steps(self, training: LocalTraining, past: PastTasks, moved: Gradients) -> Iterator[Gradients]:
        """Yield - s g_i of each past task, s the length of the local steps' move over that of their mean gradient."""
        mean = compute_length(past.sum.values()) / past.steps
        scale = -compute_length(moved.values()) / mean if mean > 0 else mean
        for gradients in self.compute_past_gradients(training, past):
            yield {name: gradient * scale for name, gradient in gradients.items()}

    def train_on_past(self, training: LocalTraining, past: PastTasks, task: int) -> Gradients:
        """Return how far as many steps as the round has go on a past task's samples, from the round's start."""
        client = training.client
        federation = client.run.params.federation
        with torch.no_grad():
            for name, parameter in training.parameters.items():
                parameter.copy_(training.start[name])
        optimiser = make_optimiser(client.run.params.optimizer, list(training.parameters.values()), *training.progress)
        steps = federation.local_epochs * -(-len(client.rows) // federation.batch_size)
        with leave_statistics(training.network):
            for _ in range(steps):
                training.take_step(past.draw(task), [optimiser])
        return {name: d for name, d in training.measure_movement(training.start).items() if d.any()}

    def align_tasks(self, current: Gradients, past: list[Gradients]) -> Gradients:
        """Return GA of tasks' vectors, over the names that past tasks' have; a name that one lacks counts as zeros."""
        if not past or not past[0]:  # past tasks whose loss is 0 to the bit move nothing
            return {}
        device = next(iter(current.values())).device  # the table's file is not on a GPU
        filled = {
            name: (current[name] if name in current else torch.zeros_like(g)).to(g.device)
            for name, g in past[0].items()
        }
        return {name: g.to(device) for name, g in self.alignment_of_tasks.align([filled, *past]).items()}


def make_no_prototypes(features: Tensor) -> tuple[Tensor, Tensor]:
    return features[:0].detach(), torch.zeros(0, dtype=torch.int64, device=features.device)


def compute_length(vector: Collection[Tensor]) -> Tensor:
    """Return the norm over all tensors together."""
    return torch.stack(torch._foreach_norm(list(vector))).norm()
