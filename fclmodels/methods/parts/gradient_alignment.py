"""Gradient alignment of vectors, such as the clients' updates on the server (FedOMG; STAMP eq. 2 and 4, "spatio").

In place of the mean of a round's displacements g_u = w_u - W the server adds GA(g) (numerics/alignment.py), computed
from their Gram matrix: the displacements stay in the spool and pass through memory in chunks. STAMP subtracts them,
which is wrong for displacements. With kappa 0 GA is the mean, as in FedAvg; where lengths are made equal, clients have
equal weights. For two vectors of one length GA is their mean with any kappa.
"""

from collections.abc import Iterable, Sequence
from dataclasses import replace
from itertools import groupby
from typing import Literal

import torch
from pydantic import Field, PositiveFloat, PositiveInt, model_validator
from torch import Tensor

from fclmodels.federation.engine.replies import Replies
from fclmodels.federation.exchange import Form
from fclmodels.numerics.alignment import (
    Named,
    Rescale,
    align,
    alignment,
    equalise_norms,
    solve_by_descent,
    solve_exactly,
)
from fclmodels.settings.base import Settings as BaseSettings


class AlignmentSettings(BaseSettings):
    kappa: float = Field(
        0.5, ge=0, le=1e6, description="radius of the search around the mean, in times the mean's length"
    )
    rescale: Rescale = Field(
        "1/(1+kappa)", description="factor of the solution; none: the papers', 1/(1+kappa^2): their code's"
    )
    normalise: bool = Field(True, description="bring all vectors to their mean length first (STAMP F.4.1)")
    layerwise: bool = Field(False, description="one alignment a layer in place of one of all weights")
    solver: Literal["exact", "descent"] = Field(
        "exact", description="of the search; descent: the papers' softmax weights and momentum, settings solver_*"
    )
    solver_rounds: PositiveInt = Field(100, description="under descent: steps")
    solver_lr: PositiveFloat = Field(25.0, description="under descent: learning rate")
    solver_momentum: float = Field(0.5, ge=0, lt=1, description="under descent: momentum")
    solver_step_size: PositiveInt = Field(30, description="under descent: steps after which the rate is halved")

    @model_validator(mode="after")
    def _only_descent_has_steps(self) -> "AlignmentSettings":
        for name in ("solver_rounds", "solver_lr", "solver_momentum", "solver_step_size"):
            if self.solver == "exact" and getattr(self, name) != type(self).model_fields[name].default:
                raise ValueError(f"{name} needs solver: descent.")
        return self


class GradientAlignment:
    """GA under its settings."""

    def __init__(self, settings: AlignmentSettings) -> None:
        self.settings = settings

    def combine(self, replies: Replies) -> dict[str, Tensor]:
        """Return GA of the clients' updates, in the units of their sum; a late one counts less."""
        updates = [tensors for _, tensors in replies.yield_each("update")]
        ages = torch.tensor([replies.facts[client]["weight"] for client in sorted(replies.clients)])
        return align(updates, self.list_groups(updates[0]), lambda G: len(updates) * ages.double() * self.weigh(G))

    def align(self, vectors: Sequence[Named]) -> dict[str, Tensor]:
        """Return GA of vectors of the same names."""
        return align(vectors, self.list_groups(list(vectors[0])), self.weigh)

    def weigh(self, G: Tensor) -> Tensor:
        """Return the weights [n] of n vectors in GA, from their Gram matrix [n, n]."""
        factors = equalise_norms(G) if self.settings.normalise else torch.ones(len(G), dtype=torch.float64)
        G = factors[:, None] * G * factors
        return factors * alignment(G, self._minimise(G), self.settings.kappa, self.settings.rescale)

    def list_groups(self, names: Iterable[str]) -> list[list[str]]:
        """Return the names of weights that are aligned together: all, or each layer's."""
        if not self.settings.layerwise:
            return [list(names)]
        return [list(members) for _, members in groupby(names, lambda name: name.rpartition(".")[0])]

    def _minimise(self, G: Tensor) -> Tensor:
        settings = self.settings
        if settings.solver == "exact":
            return solve_exactly(G, settings.kappa)
        steps = {name: getattr(settings, f"solver_{name}") for name in ("rounds", "lr", "momentum", "step_size")}
        return solve_by_descent(G, settings.kappa, **steps)


def require_single_updates(form: Form) -> Form:
    """Return the form of an answer whose update the server needs by itself."""
    return {**form, "update": replace(form["update"], least="each")}
