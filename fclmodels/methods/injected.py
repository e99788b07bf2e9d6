"""Prototype injection (PIP sections 4.2 to 4.4, Algorithm 1): heads also learn from classes that a client lacks.

After its training a client sends its classes' moments of the features, on its own prompts, and the server makes a
Gaussian of each class (numerics/prototypes.py). From the next round on a batch is joined by vectors drawn from those of
the task's classes that the client does not have, about as many a class as its own have samples (eq. 9 and 11).

knowledge: `prototypes`, {mu, sigma2, known, labels, task} of the present task; `earlier`, those of each task before,
where they are kept, which is not in the paper.
"""

from dataclasses import replace
from typing import Literal

import torch
from pydantic import Field
from torch import Tensor

from fclmodels.backbones.network import Network
from fclmodels.backbones.spec import local_labels
from fclmodels.errors import UserError
from fclmodels.federation.client import Client
from fclmodels.federation.executor import TRAIN
from fclmodels.federation.local import LocalTraining
from fclmodels.federation.messages import Part, Payload
from fclmodels.federation.replies import Replies
from fclmodels.federation.run import Run
from fclmodels.federation.server import Server
from fclmodels.methods.prompted import Prompted
from fclmodels.numerics.prototypes import (
    BOUND,
    Augmentation,
    Gaussians,
    Moments,
    augmented,
    balanced,
    carried,
    clipped_rows,
    gaussians,
    in_units,
    moments,
    out_of_units,
    weighted,
)

Known = dict[str, Tensor]


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

    settings: Settings

    def __init__(self, settings: Settings, run: Run) -> None:
        super().__init__(settings, run)
        if settings.earlier and run.spec(1).head == "per-task":
            raise UserError(
                f"methods.{self.name}.earlier does nothing under model.head: per-task, where a task trains its own "
                "head alone. Leave it out, or use model.head: growing."
            )

    @property
    def without_bound(self) -> str | None:
        if self.settings.pooled == "omega":
            return "weighs prototypes by omega, and noise covers means over samples. Set pooled: counts."
        return super().without_bound

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
        knowledge, total = dict(server.knowledge), replies.sum("moments")
        if self.longest is not None:
            total = out_of_units(total, self.longest, replies.noise("moments"))
        found = gaussians(total)
        if "prototypes" in knowledge:
            old = knowledge["prototypes"]
            found = carried(Gaussians(old["mu"], old["sigma2"], old["known"]), found)
        labels = torch.tensor(server.spec.tasks[server.task])
        knowledge["prototypes"] = {**found._asdict(), "labels": labels, "tasks": torch.full_like(labels, server.task)}
        return replace(server, knowledge=knowledge)

    def sends(self, task: int, round: int) -> dict[str, dict[str, Part]]:
        sent = super().sends(task, round)
        return {**sent, TRAIN: {**sent[TRAIN], "moments": self.moments_of(task)}}

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
            if self.longest is not None:
                features = clipped_rows(features, self.longest)
            found = moments(features, local_labels(network.spec, client.task, batch.labels), classes)
            total = found if total is None else added(total, found)
        assert total is not None
        if self.longest is not None:
            return Part("prototype", in_units(total, self.longest), bound=BOUND)
        if self.settings.pooled == "omega":
            total = weighted(total, self.client_weight(client))
        return Part("prototype", total)

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
