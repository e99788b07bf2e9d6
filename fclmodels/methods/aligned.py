"""Gradient alignment of the clients' updates on the server (FedOMG; STAMP eq. 2 and 4, "spatio").

In place of the mean of a round's displacements g_u = w_u - W the server adds GA(g) (numerics/alignment.py), found from
their Gram matrix: the displacements stay in the spool and pass through memory in chunks. STAMP writes them subtracted,
which is wrong for displacements. With kappa 0 nothing but the mean is left, as in FedAvg; where lengths are made equal,
samples do not weigh clients. Of two vectors of one length GA is their mean, whatever kappa.
"""

from collections.abc import Iterable
from dataclasses import replace
from itertools import groupby
from typing import Literal

import torch
from pydantic import Field, PositiveFloat, PositiveInt, model_validator
from torch import Tensor

from fclmodels.federation.client import Client
from fclmodels.federation.messages import Payload, Reply
from fclmodels.federation.replies import Replies
from fclmodels.methods.base import Memory
from fclmodels.methods.fedavg import FedAvg
from fclmodels.numerics.alignment import Rescale, aligned, alignment, by_descent, equal_norms, exact


class Aligned(FedAvg):
    class Settings(FedAvg.Settings):
        kappa: float = Field(
            0.5, ge=0, le=1e6, description="radius of the search around the mean, in times the mean's length"
        )
        rescale: Rescale = Field(
            "1/(1+kappa)", description="factor of what is found; none: the papers', 1/(1+kappa^2): their code's"
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
        def _only_descent_has_steps(self) -> "Aligned.Settings":
            for name in ("solver_rounds", "solver_lr", "solver_momentum", "solver_step_size"):
                if self.solver == "exact" and getattr(self, name) != type(self).model_fields[name].default:
                    raise ValueError(f"{name} needs solver: descent.")
            return self

    settings: Settings

    @property
    def needs_each(self) -> str | None:
        return f"methods.{self.name} aligns single updates on the server. Use another method."

    @property
    def instead_of_a_mean(self) -> str | None:
        return "aligns them"

    def train(self, client: Client, payload: Payload) -> tuple[Reply, Memory]:
        """FedAvg's, with an update that the server needs by itself."""
        reply, memory = super().train(client, payload)
        if self.needs_each is None:
            return reply, memory
        update = replace(reply.parts["update"], least="each")
        return replace(reply, parts={**reply.parts, "update": update}), memory

    def gathered(self, replies: Replies) -> dict[str, Tensor]:
        """GA of the updates, in the units of their sum; a late one counts less."""
        updates = [tensors for _, tensors in replies.each("update")]
        ages = torch.tensor([replies.facts[client]["weight"] for client in sorted(replies.clients)])
        return aligned(updates, self.groups(updates[0]), lambda G: len(updates) * ages.double() * self.weights(G))

    def weights(self, G: Tensor) -> Tensor:
        """What each vector counts in GA, for vectors with this Gram matrix."""
        factors = equal_norms(G) if self.settings.normalise else torch.ones(len(G), dtype=torch.float64)
        G = factors[:, None] * G * factors
        return factors * alignment(G, self.minimiser(G), self.settings.kappa, self.settings.rescale)

    def minimiser(self, G: Tensor) -> Tensor:
        settings = self.settings
        if settings.solver == "exact":
            return exact(G, settings.kappa)
        steps = {name: getattr(settings, f"solver_{name}") for name in ("rounds", "lr", "momentum", "step_size")}
        return by_descent(G, settings.kappa, **steps)

    def groups(self, names: Iterable[str]) -> list[list[str]]:
        """The weights that one alignment is about: all, or each layer's."""
        if not self.settings.layerwise:
            return [list(names)]
        return [list(members) for _, members in groupby(names, lambda name: name.rpartition(".")[0])]
