"""What SPECIAL's Theorems 4.7 (backward transfer) and 4.10 (task-uniform convergence) are about, before rounds.

An oracle as in gradients.py, every `monitors.every` rounds. L_tau is as there; F is the mean of L_tau over all tasks so
far, F_old over those before task t, W the global model before a round, W* the one that the last task left:

    epsilon         the smallest cos(grad L_t^k(W), grad F_old(W*)) over the clients k of the task: how far their
                    gradients are aligned with the earlier tasks' (Theorem 4.7 assumes it of local steps too)
    old_loss        F_old(W), which Theorem 4.7 bounds
    old_loss_bound  F_old(W*) + <grad F_old(W*), W - W*> + L/2 ||W - W*||^2
    gradient_norm   ||grad F(W)||, whose square Theorem 4.10 bounds on average over rounds

The text at hand lacks both theorems' formulas. old_loss_bound is the smoothness inequality from which the proof of the
first sets out (E.1); L is ||grad F_old(W) - grad F_old(W*)|| / ||W - W*||, a lower estimate, so that the bound is
indicative. Of Theorem 4.10 the constants are lost too: there is the quantity alone, which it says falls with rounds.
"""

from collections.abc import Mapping
from functools import cached_property
from math import sqrt
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from fclmodels.federation.engine.journal import Log
from fclmodels.federation.monitors.oracles.conflicts import compute_gradient
from fclmodels.federation.monitors.oracles.gradients import (
    compute_loss,
    compute_squared_norm,
    list_trainings,
    measure_slope,
    refuse_personal,
)
from fclmodels.federation.monitors.rows import Monitor
from fclmodels.federation.server import Server

if TYPE_CHECKING:
    from fclmodels.federation.engine.rounds import Position
    from fclmodels.federation.method import Method

Named = Mapping[str, Tensor]


class Transfer(Monitor):
    """Alignment with earlier tasks, their loss and its bound, and the gradient over all tasks."""

    def __init__(self, method: "Method", task: int, log: Log, start: Server) -> None:
        refuse_personal(method, "transfer", "loss")
        super().__init__(task, log)
        self.method = method
        self.start = start

    @cached_property
    def old(self) -> tuple[float, dict[str, Tensor]]:
        """F_old(W*) and its gradient."""
        return self._measure_loss(self.start), self._measure_slope(self.start, self.task)

    def look(self, before: "Position", after: "Position") -> None:
        """Note all of them before a round."""
        round, server = before.round, before.server
        if round % self.method.run.params.monitors.every:
            return
        self.note(
            "gradient_norm", sqrt(compute_squared_norm(self._measure_slope(server, self.task + 1).values())), round
        )
        if self.task == 0:
            return
        at_start, slope = self.old
        clients = [
            compute_gradient(self.method, server, training, training.parameters.keys())
            for _, training in list_trainings(self.method, server, self.task)
        ]
        self.note("epsilon", min(compute_cosine(g, slope) for g in clients), round)
        self.note("old_loss", self._measure_loss(server), round)
        moved = {
            name: cut(server.weights[name], old).double() - old.double() for name, old in self.start.weights.items()
        }
        moved = {name: step for name, step in moved.items() if name in slope}
        turned = self._measure_slope(server, self.task)
        change = [cut(turned[name], g) - g for name, g in slope.items()]
        # L/2 ||W - W*||^2 with L = ||change of the gradient|| / ||W - W*||.
        rest = sqrt(compute_squared_norm(change) * compute_squared_norm(moved.values())) / 2
        self.note("old_loss_bound", at_start + compute_product(moved, slope) + rest, round)

    def _measure_loss(self, server: Server) -> float:
        return sum(compute_loss(self.method, server, task) for task in range(self.task)) / self.task

    def _measure_slope(self, server: Server, tasks: int) -> dict[str, Tensor]:
        """Return the gradient of the mean of L_tau over the first tasks."""
        total: dict[str, Tensor] = {}
        for task in range(tasks):
            for name, g in measure_slope(self.method, server, task)[0].items():
                total[name] = total.get(name, 0) + g / tasks
        return total


def cut(tensor: Tensor, like: Tensor) -> Tensor:
    """Return the first rows of a tensor, as many as another one has."""
    return tensor[tuple(map(slice, like.shape))]


def compute_product(one: Named, other: Named) -> float:
    """Return the inner product over what both have; of a head that has grown, over its old rows."""
    return float(sum(torch.sum(cut(one[name], g).double() * g.double()) for name, g in other.items() if name in one))


def compute_cosine(one: Named, other: Named) -> float:
    """Return the cosine of two vectors; what one of them lacks counts as zeros there."""
    norms = compute_squared_norm(one.values()) * compute_squared_norm(other.values())
    return compute_product(one, other) / sqrt(norms) if norms else float("nan")
