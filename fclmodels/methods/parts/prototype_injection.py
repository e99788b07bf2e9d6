"""Prototype injection (PIP sections 4.2 to 4.4, Algorithm 1): heads also learn from classes that a client lacks.

After its training a client sends its classes' moments of the features, on its own prompts, and the server fits a
Gaussian to each class (numerics/prototypes.py). From the next round on vectors of the task's classes, sampled from
these, join each batch: about as many a class as the client's own classes have samples (eq. 9, 11). Before there are
any, a client's own join from its second epoch on.

knowledge: `prototypes`, {mu, sigma2, known, labels, tasks} of the present task; `earlier`, those of each task before,
where the setting `earlier` keeps them, which is not in the paper.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Literal

import torch
from pydantic import Field, PositiveInt
from torch import Tensor

from fclmodels.backbones.model.spec import to_local_labels
from fclmodels.federation.client import Client
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
from fclmodels.settings.base import Profiles
from fclmodels.settings.base import Settings as BaseSettings

PROTOTYPE = {"mu": torch.float32, "sigma2": torch.float32, "labels": torch.int32, "tasks": torch.int32}


INJECTION_PROFILES: Profiles = {
    "paper": {"omega": "all-participation", "pooled": "omega", "augmentation": "paper", "inject": "all", "own": True},
    "release": {
        "omega": "participation",
        "pooled": "omega",
        "augmentation": "release",
        "m": 2,
        "inject": "all",
        "own": False,
    },
}


class InjectionSettings(BaseSettings):
    augmentation: Augmentation = Field(
        "normal", description="vectors of a class: normal, N(mu, sigma^2); paper: mu + beta sigma (eq. 11); release"
    )
    m: PositiveInt | None = Field(
        None,
        le=10_000,
        description="vectors of a class in a batch beside its first (eq. 11); null: as many in all as one of the "
        "client's classes has samples there",
    )
    inject: Literal["missing", "all"] = Field(
        "missing",
        description="classes whose vectors join a batch: those that the client lacks (section 4.2's argument), or all "
        "of the task (eq. 9, and the release)",
    )
    own: bool = Field(
        True,
        description="with inject: all, while a task has no prototypes yet a client's own join from its second epoch on "
        "(Algorithm 1, line 21); the release has none then",
    )
    pooled: Literal["counts", "omega"] = Field(
        "counts",
        description="what a client's prototype counts: its samples of the class, or omega (eq. 14, 15 as printed)",
    )
    earlier: bool = Field(False, description="keep the prototypes of earlier tasks and inject them too (ours)")
    refit: bool = Field(
        False,
        description="after a task's rounds the server fits the head to Gaussians of all classes so far, whose means "
        "follow the prompts' drift (ours)",
    )


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

    def make_payload(self, server: Server) -> Payload:
        """Return means and variances of the classes that have a prototype, in single precision."""
        tasks = [*server.knowledge.get("earlier", []), *filter(None, [server.knowledge.get("prototypes")])]
        if not tasks:
            return {}
        of_tasks = [list_prototypes(of) for of in tasks]
        return {"prototypes": Part("prototype", {n: torch.cat([of[n] for of in of_tasks]) for n in PROTOTYPE})}

    def gather(self, server: Server, replies: Replies) -> Server:
        """Return the server with a Gaussian of each class that a client has sent moments of."""
        knowledge, total = dict(server.knowledge), replies.sum("moments")
        if (clip := self.backbone.feature_clip) is not None:
            total = from_units(total, clip, replies.compute_noise("moments"))
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
    def compute_moments(self, training: LocalTraining, weight: float) -> Moments:
        """Return the moments of a client's classes on the prompts that it has just trained (eq. 7 and 8).

        weight: omega, where it weighs prototypes. Algorithm 1, line 25.
        """
        total = self.count_moments(training)
        if (clip := self.backbone.feature_clip) is not None:
            return to_units(total, clip)
        return weigh(total, weight) if self.settings.pooled == "omega" else total

    @torch.no_grad()
    def count_moments(self, training: LocalTraining) -> Moments:
        """Return the moments of a client's classes on its prompts, of batches of mixed classes as in training."""
        client, network, clip = training.client, training.network.eval(), self.backbone.feature_clip
        classes, total = len(network.spec.tasks[client.task]), None
        order = torch.randperm(len(client.rows), generator=client.make_generator("moments"))
        rows, size = client.rows.take(order.numpy()), self.run.params.federation.batch_size
        for batch in self.run.batches.iterate_ordered(rows, size):
            features = self.backbone.compute_features(network, batch, client.task).features
            if clip is not None:
                features = clip_rows(features, clip)
            of_batch = moments(features, to_local_labels(network.spec, client.task, batch.labels), classes)
            total = of_batch if total is None else add_moments(total, of_batch)
        assert total is not None
        return total

    def start(self, training: LocalTraining, payload: Payload) -> None:
        """Give a training the prototypes that its client was sent."""
        if "prototypes" in payload:
            training.add(InjectedPrototypes(training.client, payload["prototypes"].tensors, self.settings))

    def add_own(self, training: LocalTraining) -> None:
        """Give a training its client's own prototypes, where it was sent none of the task."""
        settings, client, sent = self.settings, training.client, training.find_added(InjectedPrototypes)
        if not settings.own or settings.inject == "missing" or (sent is not None and client.task in sent.tasks):
            return
        gaussians = fit_gaussians(self.count_moments(training))
        training.network.train()
        labels = torch.tensor(training.network.spec.tasks[client.task], device=gaussians.mu.device)
        own = list_prototypes({**gaussians.to_tree(), "labels": labels, "tasks": torch.full_like(labels, client.task)})
        if sent is not None:
            own = {name: torch.cat([getattr(sent, name), tensor]) for name, tensor in own.items()}
        training.add(InjectedPrototypes(client, own, settings))


class InjectedPrototypes:
    """The Gaussians whose vectors join a client's batches."""

    def __init__(self, client: Client, prototypes: Mapping[str, Tensor], settings: InjectionSettings) -> None:
        labels = prototypes["labels"]
        own = torch.from_numpy(client.rows.labels).unique().to(labels)
        injected = ~torch.isin(labels, own) if settings.inject == "missing" else labels >= 0
        self.mu, self.sigma2, self.labels, self.tasks = (prototypes[name][injected] for name in PROTOTYPE)
        self.own_classes = len(own)
        self.m, self.augmentation = settings.m, settings.augmentation
        self.random = client.make_generator("prototypes")

    def draw(self, batch_size: int) -> tuple[Tensor, Tensor, Tensor]:
        """Return vectors [n, F], labels [n] and tasks [n] that join a batch of so many samples."""
        count = count_balanced(batch_size, self.own_classes) if self.m is None else 1 + self.m
        vectors = draw_vectors(self.mu, self.sigma2, count, self.augmentation, self.random)
        labels, tasks = (values.long().repeat_interleave(count) for values in (self.labels, self.tasks))
        return vectors.flatten(0, 1), labels, tasks


def list_prototypes(gaussians: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return means, variances, labels and tasks of the classes that have a Gaussian, as they travel."""
    return {name: gaussians[name][gaussians["known"]].to(dtype) for name, dtype in PROTOTYPE.items()}


def add_moments(total: Moments, more: Moments) -> Moments:
    return {name: total[name] + value for name, value in more.items()}
