"""STAMP: spatio-temporal gradient alignment with a prototypical coreset (Algorithm 1).

On the server GA takes the place of the mean of the clients' updates (aligned.py, "spatio"). On a client, from its
second task on, GA combines the current task's gradient with one of each task that it has had ("temporal"): by step at
the same weights, or by round, where each task's vector is the displacement of equally many steps from the round's
start. Past tasks' gradients are of coreset samples (coreset.py), or of prototypes (eq. 3), which are features: those
reach the head only, so the backbone keeps the current gradient. Eq. 7's prototypical network trains the encoder.

Table 2's (1) is spatio, (2) temporal with selection: random and protonet: 0, (3) coreset and prototypical network.
"""

from collections.abc import Iterable, Iterator
from typing import Literal

import torch
from pydantic import Field, model_validator
from torch import Tensor, nn

from fclmodels.backbones.network import Network
from fclmodels.backbones.norms import statistics_names
from fclmodels.data.batches import Batch
from fclmodels.federation.client import Client
from fclmodels.federation.local import LocalTraining, make_optimiser
from fclmodels.federation.messages import Payload
from fclmodels.federation.replies import Replies
from fclmodels.methods.coreset import Coreset
from fclmodels.methods.episodic import drawn, stored
from fclmodels.methods.fedavg import FedAvg
from fclmodels.numerics.alignment import aligned
from fclmodels.numerics.protonet import prototype_loss
from fclmodels.randomness import ambient

Gradients = dict[str, Tensor]


class Stamp(Coreset):
    """Aligns updates of clients on the server, and gradients of tasks on each client, by a few kept samples."""

    name = "stamp"
    paper = "Exploiting Client Heterogeneity for Forgetting Mitigation in Federated Continual Learning"

    class Settings(Coreset.Settings):
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

    @property
    def needs_each(self) -> str | None:
        if not self.settings.spatio:
            return None
        return "methods.stamp.spatio aligns single updates on the server. Set it to false."

    @property
    def instead_of_a_mean(self) -> str | None:
        return "aligns them (spatio: false averages)" if self.settings.spatio else None

    def gathered(self, replies: Replies) -> dict[str, Tensor]:
        return super().gathered(replies) if self.settings.spatio else FedAvg.gathered(self, replies)

    def training(self, client: Client, payload: Payload, network: Network, start: dict[str, Tensor]) -> LocalTraining:
        samples = stored(client.memory)
        if samples is None:
            return super().training(client, payload, network, start)
        return StampTraining(self, client, network, start, samples)

    def trainable(self, network: Network, task: int) -> dict[str, nn.Parameter]:
        """Earlier tasks' own heads too: gradients of their samples go through them."""
        return {**super().trainable(network, task), **dict(network.heads.named_parameters("heads"))}

    def loss(self, training: LocalTraining, batch: Batch) -> Tensor:
        """Cross entropy in the batch's task, and eq. 7 against what is known of other classes."""
        network = training.network
        features = network.backbone(batch.inputs)
        loss = self.cross_entropy(network, features, batch.labels, int(batch.tasks[0]))
        if self.settings.protonet:
            known = training.prototypes if isinstance(training, StampTraining) else nothing_known(features)
            loss = loss + self.settings.protonet * prototype_loss(features, batch.labels, *known)
        return loss

    def gradient(self, training: LocalTraining) -> None:
        """By step: GA of the current gradient and one of each past task, for the optimiser to subtract."""
        if not isinstance(training, StampTraining) or self.settings.temporal != "step":
            return
        past = training.by_prototypes() if self.settings.tasks_from == "prototypes" else training.by_samples()
        for name, gradient in self.across_tasks([training.gradients, *past]).items():
            training.parameters[name].grad = gradient

    def across_tasks(self, vectors: list[Gradients]) -> Gradients:
        """GA of tasks' vectors, over the names that past tasks' have; what one lacks counts as zeros."""
        names = {name: g for vector in vectors[1:] for name, g in vector.items()}
        if not names:  # past tasks whose loss is 0 to the bit move nothing
            return {}
        whole = [{n: vector[n] if n in vector else torch.zeros_like(g) for n, g in names.items()} for vector in vectors]
        return aligned(whole, self.groups(list(names)), self.weights)


class StampTraining(LocalTraining):
    """The training of a client that has a coreset of earlier tasks."""

    method: Stamp

    def __init__(
        self, method: Stamp, client: Client, network: Network, start: dict[str, Tensor], samples: Batch
    ) -> None:
        super().__init__(method, client, network, start)
        self.random = client.generator("replay")
        self.augmenting = client.run.batches.augmenting(self.random)
        past = samples.tasks.unique().tolist()
        self.of_task = {task: samples.take(samples.tasks.eq(task).nonzero().flatten()) for task in past}
        device = client.run.device
        self.prototypes = tuple(client.memory["prototypes"][part].to(device) for part in ("means", "labels"))

    def run(self) -> float:
        loss = super().run()
        if self.method.settings.temporal == "round":
            self.align_round()
        return loss

    # By step.

    def by_samples(self) -> Iterator[Gradients]:
        """A gradient of each past task at the present weights, by name."""
        for task in self.of_task:
            yield self.gradients_of(self.method.loss(self, self.drawn(task)))

    def by_prototypes(self) -> Iterator[Gradients]:
        """The same of the head, by the prototypes of each task's classes (eq. 3), as long as the current one there.

        Prototypes are features of evaluation mode: beside batch normalisation in training mode their gradients have
        another scale, and blow up the head.
        """
        head = [name for name in self.parameters if name.startswith("heads.")]
        current = length([g for name, g in self.gradients.items() if name in head])
        means, labels = self.prototypes
        for task, samples in self.of_task.items():
            mine = torch.isin(labels, samples.labels.to(labels))
            loss = self.method.cross_entropy(self.network, means[mine], labels[mine].long(), task)
            yield of_length(self.gradients_of(loss, head), current)

    def drawn(self, task: int) -> Batch:
        return drawn(self.client, self.of_task[task], self.random, self.augmenting)

    # By round.

    def align_round(self) -> None:
        """GA of the displacements that the current task and each past one make in equally many steps."""
        statistics = {name: self.network.get_buffer(name).clone() for name in statistics_names(self.network)}
        moved = [self._since(self.start)]
        for task in self.of_task:
            self.restart()
            self.train_on(task)
            moved.append({name: d for name, d in self._since(self.start).items() if d.any()})
        self._take(self.start, {**moved[0], **self.method.across_tasks(moved)})
        with torch.no_grad():
            for name, value in statistics.items():
                self.network.get_buffer(name).copy_(value)

    @torch.no_grad()
    def restart(self) -> None:
        for name, parameter in self.parameters.items():
            parameter.copy_(self.start[name])

    def train_on(self, task: int) -> None:
        client = self.client
        federation = client.run.params.federation
        optimiser = make_optimiser(client.run.params.optimizer, list(self.parameters.values()), client.round)
        steps = federation.local_epochs * -(-len(client.rows) // federation.batch_size)
        key = ("coreset", client.task, client.round, client.index, task)
        with ambient(client.run.seed, *key, device=client.run.device):
            for _ in range(steps):
                self._train_on(self.drawn(task), optimiser)


def nothing_known(features: Tensor) -> tuple[Tensor, Tensor]:
    return features[:0].detach(), torch.zeros(0, dtype=torch.int64, device=features.device)


def length(vector: Iterable[Tensor]) -> Tensor:
    return torch.stack(torch._foreach_norm(list(vector))).norm()


def of_length(vector: Gradients, wanted: Tensor) -> Gradients:
    found = length(vector.values())
    return {name: g * (wanted / found) for name, g in vector.items()} if found > 0 else vector
