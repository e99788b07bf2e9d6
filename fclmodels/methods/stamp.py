"""STAMP: spatio-temporal gradient alignment with a prototypical coreset (Algorithm 1).

FedAvg with two parts. On the server GA replaces the mean of the clients' updates (gradient_alignment.py, "spatio"). On
a client, from its second task on, GA combines the current task's gradient with one of each task that it has had
("temporal"): by step at the same weights, or by round, where each task's vector is the displacement of equally many
steps from the round's start. Past tasks' gradients are those of coreset samples (coreset_memory.py), or of prototypes
(eq. 3), which are features: they reach the head only, so the backbone keeps the current gradient. Eq. 7's prototypical
network trains the encoder.

Table 2's (1) is spatio, (2) temporal with selection: random and protonet: 0, (3) coreset and prototypical network.
"""

from collections.abc import Iterable, Iterator
from typing import Literal

import torch
from pydantic import Field, model_validator
from torch import Tensor, nn

from fclmodels.backbones.layers.norms import list_statistics
from fclmodels.backbones.model.network import Network
from fclmodels.data.batches import Batch
from fclmodels.federation.client import Client
from fclmodels.federation.engine.cohort import Cohort
from fclmodels.federation.engine.replies import Replies
from fclmodels.federation.exchange import Answer, Exchange, Form
from fclmodels.federation.messages import Payload
from fclmodels.federation.method import Obstacle
from fclmodels.federation.run_context import Run
from fclmodels.federation.server import Server
from fclmodels.federation.training.local_training import LocalTraining, make_optimiser
from fclmodels.methods.fedavg import FedAvg
from fclmodels.methods.parts.coreset_memory import CoresetMemory, CoresetSettings
from fclmodels.methods.parts.gradient_alignment import AlignmentSettings, GradientAlignment, require_single_updates
from fclmodels.methods.parts.replay_memory import draw_batch, unpack_samples
from fclmodels.numerics.protonet import prototype_loss
from fclmodels.randomness import seed_torch

Gradients = dict[str, Tensor]


class Stamp(FedAvg):
    """Aligns updates of clients on the server, and gradients of tasks on each client, by a few stored samples."""

    name = "stamp"
    paper = "Exploiting Client Heterogeneity for Forgetting Mitigation in Federated Continual Learning"

    class Settings(CoresetSettings, AlignmentSettings, FedAvg.Settings):
        spatio: bool = Field(True, description="align the clients' updates on the server; false: average them")
        temporal: Literal["step", "round", "none"] = Field(
            "step", description="align gradients of tasks on each client in every step, or displacements in every round"
        )
        tasks_from: Literal["coreset", "prototypes"] = Field(
            "coreset", description="what past tasks' gradients are of; prototypes: of the head only (eq. 3)"
        )
        protonet: float = Field(0.1, ge=0, description="weight of the prototypical network's loss (eq. 7); 0: without")

        @model_validator(mode="after")
        def _something_is_aligned(self) -> "Stamp.Settings":
            if self.temporal != "step" and self.tasks_from == "prototypes":
                raise ValueError(
                    "tasks_from: prototypes gives gradients, for the alignment of steps: use temporal: step."
                )
            if self.temporal == "none" and not self.spatio:
                raise ValueError("spatio: false and temporal: none leave nothing to align. Use method fedavg.")
            return self

    settings: Settings

    def __init__(self, settings: Settings, run: Run) -> None:
        super().__init__(settings, run)
        self.alignment = GradientAlignment(settings)
        self.coreset = CoresetMemory(settings, run, self.name)
        self.store = self.declare(Exchange("coreset", self.payload, self.store_coreset))

    # Between clients, on the server.

    @property
    def obstacle_to_sums(self) -> Obstacle | None:
        if not self.settings.spatio:
            return None
        return Obstacle("methods.stamp.spatio aligns single updates on the server", "Set it to false")

    @property
    def obstacle_to_robust_rules(self) -> Obstacle | None:
        return Obstacle("aligns them (spatio: false averages)", "Use mean") if self.settings.spatio else None

    def update_form(self, task: int, round: int) -> Form:
        form = super().update_form(task, round)
        return require_single_updates(form) if self.settings.spatio else form

    def combine(self, replies: Replies) -> Gradients:
        return self.alignment.combine(replies) if self.settings.spatio else super().combine(replies)

    def finish_task(self, server: Server, cohort: Cohort) -> Server:
        cohort.ask(self.store, server)
        return server

    # Between tasks, on a client.

    def store_coreset(self, client: Client, payload: Payload) -> Answer:
        """Return the memory with the task's coreset; the answer itself is empty."""
        weights = self.client_weights(client, payload)
        network = self.networks.load(self.run.spec(client.task + 1), weights).eval()
        return Answer({}, self.coreset.add_task(client, network))

    def start_training(self, training: LocalTraining, payload: Payload) -> None:
        samples = unpack_samples(training.client.memory)
        if samples is not None:
            training.add(PastTasks(training.client, samples))

    def trainable(self, network: Network, task: int) -> dict[str, nn.Parameter]:
        """Return earlier tasks' own heads too: gradients of their samples go through them."""
        return {**super().trainable(network, task), **dict(network.heads.named_parameters("heads"))}

    def loss(self, training: LocalTraining, batch: Batch) -> Tensor:
        """Return the cross entropy in the batch's task, and eq. 7 against the client's prototypes of other classes."""
        network = training.network
        features = network.backbone(batch.inputs)
        loss = self.cross_entropy(network, features, batch.labels, int(batch.tasks[0]))
        if self.settings.protonet:
            past = training.part(PastTasks)
            prototypes = past.prototypes if past else make_no_prototypes(features)
            loss = loss + self.settings.protonet * prototype_loss(features, batch.labels, *prototypes)
        return loss

    def gradient(self, training: LocalTraining) -> None:
        """Replace gradients, under `temporal: step`, by GA of the current gradient and one of each past task."""
        past = training.part(PastTasks)
        if past is None or self.settings.temporal != "step":
            return
        by_prototypes = self.settings.tasks_from == "prototypes"
        gradients = (
            self.yield_prototype_gradients(training, past) if by_prototypes else self.sample_gradients(training, past)
        )
        for name, gradient in self.align_tasks([training.gradients, *gradients]).items():
            training.parameters[name].grad = gradient

    def sample_gradients(self, training: LocalTraining, past: "PastTasks") -> Iterator[Gradients]:
        """Yield a gradient of each past task's samples at the present weights, by name."""
        for task in past.samples:
            yield training.compute_gradients(self.loss(training, past.draw(task)))

    def yield_prototype_gradients(self, training: LocalTraining, past: "PastTasks") -> Iterator[Gradients]:
        """Yield a gradient of the head by each past task's prototypes (eq. 3), as long as the current one.

        Prototypes are features of evaluation mode: beside batch normalisation in training mode their gradients have
        another scale, and blow up the head.
        """
        head = [name for name in training.parameters if name.startswith("heads.")]
        current = compute_length([g for name, g in training.gradients.items() if name in head])
        means, labels = past.prototypes
        for task, samples in past.samples.items():
            mine = torch.isin(labels, samples.labels.to(labels))
            loss = self.cross_entropy(training.network, means[mine], labels[mine].long(), task)
            yield scale_to_length(training.compute_gradients(loss, head), current)

    def finish_training(self, training: LocalTraining) -> None:
        """Move, under `temporal: round`, by GA of displacements of equally many steps on the current and past tasks."""
        past = training.part(PastTasks)
        if past is None or self.settings.temporal != "round":
            return
        network, start = training.network, training.start
        statistics = {name: network.get_buffer(name).clone() for name in list_statistics(network)}
        moved = [training.measure_movement(start)]
        for task in past.samples:
            self.train_on_past(training, past, task)
            moved.append({name: d for name, d in training.measure_movement(start).items() if d.any()})
        training.move_from(start, {**moved[0], **self.align_tasks(moved)})
        with torch.no_grad():
            for name, value in statistics.items():
                network.get_buffer(name).copy_(value)

    def train_on_past(self, training: LocalTraining, past: "PastTasks", task: int) -> None:
        """Train from the round's start on a past task's samples, as many steps as the round has."""
        client = training.client
        federation = client.run.params.federation
        with torch.no_grad():
            for name, parameter in training.parameters.items():
                parameter.copy_(training.start[name])
        optimiser = make_optimiser(client.run.params.optimizer, list(training.parameters.values()), client.round)
        steps = federation.local_epochs * -(-len(client.rows) // federation.batch_size)
        key = ("coreset", client.task, client.round, client.index, task)
        with seed_torch(client.run.seed, *key, device=client.run.device):
            for _ in range(steps):
                training.take_step(past.draw(task), [optimiser])

    def align_tasks(self, vectors: list[Gradients]) -> Gradients:
        """Return GA of tasks' vectors, over the names that past tasks' have; a name that one lacks counts as zeros."""
        names = {name: g for vector in vectors[1:] for name, g in vector.items()}
        if not names:  # past tasks whose loss is 0 to the bit move nothing
            return {}
        filled = [
            {n: vector[n] if n in vector else torch.zeros_like(g) for n, g in names.items()} for vector in vectors
        ]
        return self.alignment.align(filled)


class PastTasks:
    """The coreset of a client in one training: samples by task, and prototypes (means [L, F], labels [L])."""

    def __init__(self, client: Client, samples: Batch) -> None:
        self.client = client
        self.random = client.generator("replay")
        self.augmenting = client.run.batches.make_device_generator(self.random)
        tasks = samples.tasks.unique().tolist()
        self.samples = {task: samples.take(samples.tasks.eq(task).nonzero().flatten()) for task in tasks}
        stored, device = client.memory["prototypes"], client.run.device
        self.prototypes = stored["means"].to(device), stored["labels"].to(device)

    def draw(self, task: int) -> Batch:
        return draw_batch(self.client, self.samples[task], self.random, self.augmenting)


def make_no_prototypes(features: Tensor) -> tuple[Tensor, Tensor]:
    return features[:0].detach(), torch.zeros(0, dtype=torch.int64, device=features.device)


def compute_length(vector: Iterable[Tensor]) -> Tensor:
    """Return the norm over all tensors together."""
    return torch.stack(torch._foreach_norm(list(vector))).norm()


def scale_to_length(vector: Gradients, size: Tensor) -> Gradients:
    """Return the vector scaled to a length; a vector of zeros stays as it is."""
    present = compute_length(vector.values())
    return {name: g * (size / present) for name, g in vector.items()} if present > 0 else vector
