"""Prototype injection (PIP sections 4.2 to 4.4, Algorithm 1): heads also learn from classes that a client lacks.

After its training a client sends its classes' moments of the features, on its own prompts, and the server fits a
Gaussian to each class (numerics/prototypes.py). From the next round on vectors of the task's classes that a client
lacks, sampled from these, join each batch: about as many a class as the client's own classes have samples (eq. 9, 11).

knowledge: `prototypes`, {mu, sigma2, known, labels, tasks} of the present task; `earlier`, those of each task before,
where the setting `earlier` keeps them, which is not in the paper.
"""

from dataclasses import replace
from typing import Literal

import torch
from pydantic import Field
from torch import Tensor

from fclmodels.backbones.model.spec import to_local_labels
from fclmodels.federation.engine.replies import Replies
from fclmodels.federation.messages import Part, Payload
from fclmodels.federation.server import Server
from fclmodels.federation.training.local_training import LocalTraining
from fclmodels.methods.parts.frozen_backbone import FrozenBackbone
from fclmodels.numerics.prototypes import (
    BOUND,
    Augmentation,
    Gaussians,
    Moments,
    carry_over,
    clip_rows,
    count_balanced,
    draw_vectors,
    fit_gaussians,
    from_units,
    moments,
    to_units,
    weigh,
)
from fclmodels.settings.base import Settings as BaseSettings


class InjectionSettings(BaseSettings):
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


class PrototypeInjection:
    """Gathers Gaussians of classes on the server, and draws vectors from them for the clients' heads."""

    def __init__(self, settings: InjectionSettings, backbone: FrozenBackbone) -> None:
        self.settings = settings
        self.backbone = backbone
        self.run = backbone.run

    # On the server.

    def start_task(self, server: Server) -> Server:
        """Return the server without the last task's prototypes, or with them among the earlier ones."""
        knowledge = dict(server.knowledge)
        last = knowledge.pop("prototypes", None)
        if self.settings.earlier and last is not None:
            knowledge["earlier"] = [*knowledge.get("earlier", []), last]
        return replace(server, knowledge=knowledge)

    def payload(self, server: Server) -> Payload:
        """Return means and variances of the classes that have a prototype, in single precision."""
        tasks = [*server.knowledge.get("earlier", []), *filter(None, [server.knowledge.get("prototypes")])]
        if not tasks:
            return {}
        types = {"mu": torch.float32, "sigma2": torch.float32, "labels": torch.int32, "tasks": torch.int32}
        tensors = {n: torch.cat([of[n][of["known"]] for of in tasks]).to(dtype) for n, dtype in types.items()}
        return {"prototypes": Part("prototype", tensors)}

    def gather(self, server: Server, replies: Replies) -> Server:
        """Return the server with a Gaussian of each class that a client has sent moments of."""
        knowledge, total = dict(server.knowledge), replies.sum("moments")
        if (clip := self.backbone.feature_clip) is not None:
            total = from_units(total, clip, replies.noise("moments"))
        new = fit_gaussians(total)
        if "prototypes" in knowledge:
            old = knowledge["prototypes"]
            new = carry_over(Gaussians(old["mu"], old["sigma2"], old["known"]), new)
        labels = torch.tensor(server.spec.tasks[server.task])
        knowledge["prototypes"] = {**new.to_tree(), "labels": labels, "tasks": torch.full_like(labels, server.task)}
        return replace(server, knowledge=knowledge)

    # On a client.

    @property
    def bound(self) -> float | None:
        """The largest length of a client's moments, where features are clipped."""
        return None if self.backbone.feature_clip is None else BOUND

    @torch.no_grad()
    def moments(self, training: LocalTraining, weight: float) -> Moments:
        """Return the moments of a client's classes on the prompts that it has just trained (eq. 7 and 8).

        weight: omega, where it weighs prototypes. Algorithm 1, line 25.
        """
        client, network, clip = training.client, training.network.eval(), self.backbone.feature_clip
        classes, total = len(network.spec.tasks[client.task]), None
        for batch in self.run.batches.iterate_ordered(client.rows, self.run.params.federation.batch_size):
            features = self.backbone.compute_features(network, batch, client.task).features
            if clip is not None:
                features = clip_rows(features, clip)
            of_batch = moments(features, to_local_labels(network.spec, client.task, batch.labels), classes)
            total = of_batch if total is None else add_moments(total, of_batch)
        assert total is not None
        if clip is not None:
            return to_units(total, clip)
        return weigh(total, weight) if self.settings.pooled == "omega" else total

    def start(self, training: LocalTraining, payload: Payload) -> None:
        """Give a training the prototypes that its client was sent."""
        if "prototypes" in payload:
            training.add(InjectedPrototypes(training, payload["prototypes"].tensors, self.settings))


class InjectedPrototypes:
    """The Gaussians whose vectors join a client's batches."""

    def __init__(self, training: LocalTraining, prototypes: dict[str, Tensor], settings: InjectionSettings) -> None:
        client, labels = training.client, prototypes["labels"]
        own = torch.from_numpy(client.rows.labels).unique().to(labels)
        injected = ~torch.isin(labels, own) if settings.inject == "missing" else labels >= 0
        names = ("mu", "sigma2", "labels", "tasks")
        self.mu, self.sigma2, self.labels, self.tasks = (prototypes[name][injected] for name in names)
        self.own_classes = len(own)
        self.augmentation = settings.augmentation
        self.random = client.generator("prototypes")

    def draw(self, batch_size: int) -> tuple[Tensor, Tensor, Tensor]:
        """Return vectors [n, F], labels [n] and tasks [n] that join a batch of so many samples."""
        count = count_balanced(batch_size, self.own_classes)
        vectors = draw_vectors(self.mu, self.sigma2, count, self.augmentation, self.random)
        labels, tasks = (values.long().repeat_interleave(count) for values in (self.labels, self.tasks))
        return vectors.flatten(0, 1), labels, tasks


def add_moments(total: Moments, more: Moments) -> Moments:
    return {name: total[name] + value for name, value in more.items()}
