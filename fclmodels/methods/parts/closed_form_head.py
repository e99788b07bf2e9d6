"""A head in closed form: ridge regression on sums that every client sends once, after a task's rounds.

With phi = relu(P^T a) of features a that no later task changes, P [F, M] drawn by the run's seed, a client sends

    G_k = sum phi phi^T [M, M]   and   C_k = sum phi y^T [M, columns],   y one-hot,

and the head is W = ((G + lambda I)^-1 C)^T, with G and C the sums over all clients and all tasks so far: for a given
lambda the same, to rounding, however samples are split over clients and tasks; with `auto` however they are split over
clients. What the server holds is M^2 + M columns numbers.

`lambda: auto` (ours, after RanPAC's): sums of about a fifth of the samples, drawn by the run's seed and their place in
the data set, whoever has them, travel by themselves; of 10^-8, 10^-7 to 10^8 the lambda is taken with which the ridge
on the task's other samples has the least squared error on these, tr(W G W^T) - 2 tr(W C) and a constant. Then both are
added up.

Under noise a sample's phi is clipped at `federation.privacy.features` = B, and a client sends means in units of B^2 and
B, no longer than sqrt(2) together. The noisy G is made symmetric, its eigenvalues below 0 are set to 0, and lambda
grows by s sqrt(2 M), the norm of a symmetric matrix of such noise of deviation s.

knowledge: `products`, {gram, cross, lambda, noise: s}, and `head`, as FittedHead has it.
"""

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Literal

import numpy as np
import torch
from pydantic import Field, NonNegativeInt, PositiveFloat
from torch import Tensor

from fclmodels.backbones.model.network import Network, NetworkCache
from fclmodels.backbones.model.spec import ModelSpec, to_local_labels
from fclmodels.data.batches import Batch
from fclmodels.data.splits.split_reader import Rows
from fclmodels.federation.client import Client
from fclmodels.federation.engine.cohort import Cohort
from fclmodels.federation.engine.replies import Replies
from fclmodels.federation.exchange import Answer, Exchange, Form
from fclmodels.federation.messages import Payload, make_outline
from fclmodels.federation.prediction import FittedHead
from fclmodels.federation.run_context import Run
from fclmodels.federation.server import Server
from fclmodels.methods.parts.frozen_backbone import AT_ONCE
from fclmodels.numerics.fitted_heads import choose_ridge, fit_ridge, project_positive, sum_products
from fclmodels.numerics.prototypes import clip_rows
from fclmodels.settings.base import Settings as BaseSettings

FIT, VAL = "products", "held_out_products"
VAL_SHARE = 5  # one of so many samples, on average, is set apart
PER_FEATURE = 10  # random features for each feature, where their number is not set
PRODUCTS_BOUND = math.sqrt(2)  # of a sample's phi phi^T and phi y^T together, in units of B^2 and B


class ClosedFormSettings(BaseSettings):
    random_features: NonNegativeInt | None = Field(
        None,
        le=20_000,
        description="M, random features phi = relu(P^T a), of which M^2 numbers travel (RanPAC 10000, STSA 1250); 0: "
        "the features themselves; null: ten for each feature, at most 1250 (ours)",
    )
    ridge: PositiveFloat | Literal["auto"] = Field(
        "auto", alias="lambda", description="weight of ||W||^2 beside the sum of squared errors; auto: by held-out rows"
    )


class ClosedFormHead:
    """Asks for sums after a task, adds them to those of earlier tasks and fits the head."""

    def __init__(
        self,
        settings: ClosedFormSettings,
        run: Run,
        networks: NetworkCache,
        load: Callable[[Client, Payload], Network],
        compute_features: Callable[[Network, Batch], Tensor],
        payload: Callable[[Server], Payload],
    ) -> None:
        """load: the network of a client's question; compute_features: features [B, F] of a batch as at inference."""
        self.settings = settings
        self.run = run
        self.networks = networks
        self.load = load
        self.compute_features = compute_features
        self.exchange = Exchange("products", payload, self.answer, self.make_form)

    @property
    def clip(self) -> float | None:
        """The length at which phi is clipped; None where there is no noise."""
        privacy = self.run.params.federation.privacy
        return privacy.features if privacy.on else None

    def count_random_features(self, features: int) -> int:
        """Return M for F features."""
        M = self.settings.random_features
        return min(PER_FEATURE * features, 1250) if M is None else M

    def draw_projection(self, features: int) -> Tensor | None:
        """Return P [F, M], standard normal; None where phi is the features themselves."""
        M = self.count_random_features(features)
        return torch.randn(features, M, generator=self.run.make_generator("random-features")) if M else None

    # On the server.

    def finish_task(self, server: Server, cohort: Cohort) -> Server:
        """Return the server with the sums of all tasks so far and the head that is fitted to them."""
        return self.fit(server, cohort.ask(self.exchange, server))

    def fit(self, server: Server, replies: Replies) -> Server:
        """Return the server with the replies' sums added to those of earlier tasks, and the head of all."""
        old = server.knowledge.get("products", {})
        parts = {name: self.read_products(replies, name) for name in self.list_parts()}
        ridge = self.settings.ridge
        if ridge == "auto":
            ridge = choose_ridge(**parts[FIT], held_out=parts[VAL]) or old.get("lambda", 1.0)
        gram, cross = (torch.stack([part[name] for part in parts.values()]).sum(0) for name in ("gram", "cross"))
        if old:
            gram = gram + old["gram"]
            cross[:, : old["cross"].shape[1]] += old["cross"]
        noise = math.hypot(old.get("noise", 0.0), *(self.measure_noise(replies, name) for name in parts))
        head = fit_ridge(gram, cross, ridge + noise * math.sqrt(2 * len(gram)))
        projection = self.draw_projection(self.networks.build(server.spec).backbone.features)
        fitted = {**head._asdict(), **({} if projection is None else {"projection": projection})}
        products = {"gram": gram, "cross": cross, "lambda": ridge, "noise": noise}
        return replace(server, knowledge={**server.knowledge, "products": products, "head": fitted})

    def read_products(self, replies: Replies, part: str) -> dict[str, Tensor]:
        """Return gram [M, M] and cross [M, columns] of a part's sum, in the units of samples."""
        gram, cross = (replies.sum(part)[name] for name in ("gram", "cross"))
        if self.clip is None:
            return {"gram": gram, "cross": cross}
        return {"gram": self.clip**2 * project_positive(gram), "cross": self.clip * cross}

    def measure_noise(self, replies: Replies, part: str) -> float:
        """Return the deviation of the noise in each number of the gram that was read."""
        return 0.0 if self.clip is None else self.clip**2 * replies.compute_noise(part)

    def find_head(self, server: Server) -> FittedHead | None:
        """Return the head; None while a task is learned whose classes it does not have."""
        head = server.knowledge.get("head")
        if head is None or len(head["bias"]) != sum(map(len, server.spec.head_labels)):
            return None
        return FittedHead(**head)

    # On a client.

    def list_parts(self) -> tuple[str, ...]:
        return (FIT, VAL) if self.settings.ridge == "auto" else (FIT,)

    def make_form(self, task: int, round: int) -> Form:
        """Return the outlines of a client's sums; noise finds no sample's share longer than the bound."""
        spec = self.run.make_spec(task + 1)
        features = self.networks.build(spec).backbone.features
        M, columns = self.count_random_features(features) or features, sum(map(len, spec.head_labels))
        shapes = {"gram": (M, M), "cross": (M, columns)}
        return {
            name: make_outline("class-statistics", shapes, torch.float64, bound=PRODUCTS_BOUND)
            for name in self.list_parts()
        }

    @torch.no_grad()
    def answer(self, client: Client, payload: Payload) -> Answer:
        """Return the sums of a client's samples, of those set apart by themselves."""
        network = self.load(client, payload).eval()
        projection = self.draw_projection(network.backbone.features)
        outlines = self.make_form(client.task, client.round)
        return Answer(
            {
                name: self.sum_rows(client, rows, network, projection, outlines[name].tensors)
                for name, rows in self.split_rows(client).items()
            },
            client.memory,
        )

    def split_rows(self, client: Client) -> dict[str, Rows]:
        """Return a client's rows by part: all, or those that the head is fitted to and those set apart."""
        if self.settings.ridge != "auto":
            return {FIT: client.rows}
        draws = torch.randint(VAL_SHARE, (len(self.run.splits.images),), generator=self.run.make_generator("held-out"))
        is_held_out = draws.numpy()[client.rows.samples] == 0
        return {
            FIT: client.rows.take(np.flatnonzero(~is_held_out)),
            VAL: client.rows.take(np.flatnonzero(is_held_out)),
        }

    def iterate_features(
        self, rows: Rows, network: Network, task: int, projection: Tensor | None
    ) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield phi [B, M] of some rows, in their order, and their columns [B]."""
        for batch in self.run.batches.iterate_ordered(rows, AT_ONCE):
            phi = self.compute_features(network, batch)
            if projection is not None:
                phi = torch.relu(phi @ projection.to(phi))
            if self.clip is not None:
                phi = clip_rows(phi, self.clip)
            yield phi, find_columns(network.spec, task, batch.labels)

    def sum_rows(
        self, client: Client, rows: Rows, network: Network, projection: Tensor | None, like: Mapping[str, Tensor]
    ) -> dict[str, Tensor]:
        """Return gram [M, M] and cross [M, columns] of some rows: sums, or means in units of the clip."""
        total = {name: torch.zeros(outline.shape, dtype=outline.dtype) for name, outline in like.items()}
        for phi, columns in self.iterate_features(rows, network, client.task, projection):
            of_batch = sum_products(phi, columns, total["cross"].shape[1])
            total = {name: value + of_batch[name].cpu() for name, value in total.items()}
        if self.clip is None:
            return total
        units = {"gram": self.clip**2, "cross": self.clip}
        return {name: value / (max(len(rows), 1) * units[name]) for name, value in total.items()}


def find_columns(spec: ModelSpec, task: int, labels: Tensor) -> Tensor:
    """Return the column of each label among those of all heads: its own in a growing head, else its task's."""
    if spec.head == "growing":
        return labels
    return sum(map(len, spec.head_labels[:task])) + to_local_labels(spec, task, labels)
