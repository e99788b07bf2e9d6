"""Prototype injection (PIP sections 4.2 to 4.4, Algorithm 1): heads also learn from classes that a client lacks.

After its training a client sends its classes' moments of the features, on its own prompts, and the server makes a
Gaussian of each class (numerics/prototypes.py). From the next round on a batch is joined by vectors drawn from those of
the task's classes that the client does not have, about as many a class as its own have samples (eq. 9 and 11).

knowledge: `prototypes`, {mu, sigma2, known, labels, task} of the present task; `earlier`, those of each task before,
where they are kept, which is not in the paper.
"""

from dataclasses import replace
from typing import Any, Literal

import torch
from pydantic import Field, PositiveFloat, model_validator
from torch import Tensor

from fclmodels.backbones.network import Network
from fclmodels.backbones.spec import local_labels
from fclmodels.errors import UserError
from fclmodels.federation.client import Client
from fclmodels.federation.local import LocalTraining
from fclmodels.federation.messages import Part, Payload
from fclmodels.federation.replies import Replies
from fclmodels.federation.run import Run
from fclmodels.federation.server import Server
from fclmodels.methods.prompted import Prompted
from fclmodels.numerics.privacy import epsilon
from fclmodels.numerics.prototypes import (
    Augmentation,
    Gaussians,
    Moments,
    augmented,
    balanced,
    carried,
    clipped_rows,
    gaussians,
    least_count,
    moments,
    noisy,
    weighted,
)

Known = dict[str, Tensor]
COVERS = (
    "one sample's own part in a client's prototypes of a task, the prompts taken as given; those are trained on the "
    "sample, move all prototypes and are not covered, nor are head and weight"
)


class Injected(Prompted):
    class Settings(Prompted.Settings):
        augmentation: Augmentation = Field(
            "normal", description="vectors of a class: normal, N(mu, sigma^2); paper: mu + beta sigma (eq. 11); release"
        )
        inject: Literal["missing", "all"] = Field(
            "missing", description="classes whose vectors join a batch: those that the client lacks, or all of the task"
        )
        pooled: Literal["counts", "omega"] = Field(
            "counts",
            description="what a client's prototype counts: its samples of the class, or omega (eq. 14, 15 as printed)",
        )
        earlier: bool = Field(False, description="keep the prototypes of earlier tasks and inject them too")
        noise_multiplier: PositiveFloat | None = Field(
            None, description="of Gaussian noise on each client's moments, in sensitivities to one sample; null: none"
        )
        noise_bound: PositiveFloat = Field(10.0, description="norm at which a noisy client clips its features")
        noise_delta: float = Field(1e-5, gt=0, lt=1, description="delta that epsilon is told for")

        @model_validator(mode="after")
        def _noise_is_on(self) -> "Injected.Settings":
            fields = type(self).model_fields
            idle = [name for name in ("noise_bound", "noise_delta") if getattr(self, name) != fields[name].default]
            if self.noise_multiplier is None and idle:
                raise ValueError(f"{idle[0]} does nothing without noise. Set noise_multiplier too, or leave it out.")
            return self

    settings: Settings

    def __init__(self, settings: Settings, run: Run) -> None:
        super().__init__(settings, run)
        if settings.earlier and run.spec(1).head == "per-task":
            raise UserError(
                f"methods.{self.name}.earlier does nothing under model.head: per-task, where a task trains its own "
                "head alone. Leave it out, or use model.head: growing."
            )

    @property
    def sends_besides(self) -> str | None:
        return "prototypes"

    # On the server.

    def start_task(self, server: Server, task: int) -> Server:
        started, knowledge = super().start_task(server, task), dict(server.knowledge)
        last = knowledge.pop("prototypes", None)
        if self.settings.earlier and last is not None:
            knowledge["earlier"] = [*knowledge.get("earlier", []), last]
        return replace(started, knowledge=knowledge)

    def payload(self, server: Server) -> Payload:
        """Means and variances of the classes that are known, in single precision."""
        tasks = [*server.knowledge.get("earlier", []), *filter(None, [server.knowledge.get("prototypes")])]
        parts = super().payload(server)
        if tasks:
            sent = {"mu": torch.float32, "sigma2": torch.float32, "labels": torch.int32, "tasks": torch.int32}
            tensors = {n: torch.cat([of[n][of["known"]] for of in tasks]).to(kind) for n, kind in sent.items()}
            parts["prototypes"] = Part("prototype", tensors)
        return parts

    def aggregate(self, server: Server, replies: Replies) -> Server:
        server = super().aggregate(server, replies)
        knowledge, clients = dict(server.knowledge), len(replies.facts)
        least = 0.0 if self.settings.pooled == "omega" else self.least_count(clients)
        found = gaussians(replies.sum("moments"), least)
        if self.settings.noise_multiplier is not None:  # no mean of clipped features is longer
            found = found._replace(mu=clipped_rows(found.mu, self.settings.noise_bound))
        if "prototypes" in knowledge:
            old = knowledge["prototypes"]
            found = carried(Gaussians(old["mu"], old["sigma2"], old["known"]), found)
        labels = torch.tensor(server.spec.tasks[server.task])
        knowledge["prototypes"] = {**found._asdict(), "labels": labels, "tasks": torch.full_like(labels, server.task)}
        if (multiplier := self.settings.noise_multiplier) is not None:
            knowledge["privacy"] = self.privacy(server, multiplier)
        return replace(server, knowledge=knowledge)

    def privacy(self, server: Server, multiplier: float) -> dict[str, Any]:
        """What noise is worth to a sample of a client that is asked in every round of the longest task so far."""
        delta, rounds = self.settings.noise_delta, max(self.run.rounds(task) for task in range(server.task + 1))
        return {
            "epsilon": epsilon(multiplier, sample_rate=1.0, releases=1, rounds=rounds, delta=delta),
            "delta": delta,
            "covers": COVERS,
            "noise_multiplier": multiplier,
            "bound": self.settings.noise_bound,
            "rounds": rounds,
        }

    def least_count(self, clients: int) -> float:
        """The noisy count of so many clients up to which a class counts as one that none of them has."""
        return least_count(self.settings.noise_multiplier or 0.0, clients)

    # On a client.

    def further_parts(self, client: Client, payload: Payload, network: Network) -> dict[str, Part]:
        return {**super().further_parts(client, payload, network), "moments": self.moments(client, network)}

    @torch.no_grad()
    def moments(self, client: Client, network: Network) -> Part:
        """Of its classes' features on the prompts that it has just trained (eq. 7 and 8; Algorithm 1, line 25)."""
        network.eval()
        classes, total = len(network.spec.tasks[client.task]), None
        for batch in self.run.batches.ordered(client.rows, self.run.params.federation.batch_size):
            features = self.found(network, batch, client.task).features
            if self.settings.noise_multiplier is not None:
                features = clipped_rows(features, self.settings.noise_bound)
            found = moments(features, local_labels(network.spec, client.task, batch.labels), classes)
            total = found if total is None else added(total, found)
        assert total is not None
        if self.settings.noise_multiplier is not None:
            total = noisy(total, self.settings.noise_multiplier, self.settings.noise_bound, client.generator("noise"))
        if self.settings.pooled == "omega":
            total = weighted(total, self.client_weight(client), self.least_count(clients=1))
        return Part("prototype", total, noisy=self.settings.noise_multiplier is not None)

    def training(self, client: Client, payload: Payload, network: Network, start: dict[str, Tensor]) -> LocalTraining:
        if "prototypes" not in payload:
            return super().training(client, payload, network, start)
        return InjectedTraining(self, client, network, start, payload["prototypes"].tensors)

    def head_loss(self, training: LocalTraining, features: Tensor, labels: Tensor) -> Tensor:
        if not isinstance(training, InjectedTraining) or not len(training.labels):
            return super().head_loss(training, features, labels)
        vectors, theirs, tasks = training.drawn(len(labels))
        tasks = torch.cat([torch.full_like(labels, training.client.task), tasks])
        features, labels = torch.cat([features, vectors]), torch.cat([labels, theirs])
        return self.cross_entropy_by_task(training.network, features, labels, tasks)


class InjectedTraining(LocalTraining):
    """The training of a client that was sent prototypes."""

    method: Injected

    def __init__(
        self, method: Injected, client: Client, network: Network, start: dict[str, Tensor], sent: Known
    ) -> None:
        super().__init__(method, client, network, start)
        own = torch.from_numpy(client.rows.labels).unique().to(sent["labels"])
        chosen = ~torch.isin(sent["labels"], own) if method.settings.inject == "missing" else sent["labels"] >= 0
        self.mu, self.sigma2, self.labels, self.tasks = (
            sent[name][chosen] for name in ("mu", "sigma2", "labels", "tasks")
        )
        self.own_classes = len(own)
        self.random = client.generator("prototypes")

    def drawn(self, batch_size: int) -> tuple[Tensor, Tensor, Tensor]:
        """Vectors [n, F], labels [n] and tasks [n] that join a batch of so many samples."""
        count = balanced(batch_size, self.own_classes)
        vectors = augmented(self.mu, self.sigma2, count, self.method.settings.augmentation, self.random)
        labels, tasks = (whose.long().repeat_interleave(count) for whose in (self.labels, self.tasks))
        return vectors.flatten(0, 1), labels, tasks


def added(total: Moments, more: Moments) -> Moments:
    return {name: total[name] + value for name, value in more.items()}
