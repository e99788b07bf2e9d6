"""SPECIAL-C: SPECIAL's anchor in every local step instead of on the server (F.5, Algorithm 2).

From the second task on, a client's step is followed by the proximal mapping of the anchor:
w <- (w - eta g + c W*) / (1 + c), where - eta g stands for whatever step the optimiser proposes. The server
averages as in FedAvg. After S steps 1/(1 + c)^S of a deviation is left: as much as SPECIAL leaves in a round where
(1 + c)^S = 1 + lambda. c is lost in the paper's text at hand.
"""

import math

import torch
from pydantic import Field

from fclmodels.federation.local import LocalTraining
from fclmodels.methods.anchored import AnchoredOnClients, AnchoredTraining


class SpecialC(AnchoredOnClients):
    """SPECIAL's client-side variant: every local step is pulled towards the last task's model."""

    name = "special-c"
    paper = (
        "Server-Proximal Aggregation for Federated Domain-Incremental Learning under Partial Participation: "
        "Task-Uniform Convergence and Backward Transfer"
    )

    class Settings(AnchoredOnClients.Settings):
        c: float = Field(0.01, ge=0, le=1e6, description="weight of the anchor in each local step")

    settings: Settings

    def advice(self) -> list[str]:
        """c in units of SPECIAL's lambda, by the client that takes most steps in a round."""
        c, tasks = self.settings.c, range(1, len(self.run.splits.tasks))
        if not c or not tasks:
            return []
        steps = max(self.local_steps(task) for task in tasks)
        with_lambda = math.expm1(min(steps * math.log1p(c), 99))
        return [
            f"c {c:g}: over the {steps} local steps of a round it holds a client like SPECIAL's lambda of "
            f"{with_lambda:.2g}: none comes further than {1 / c:.3g} steps from the last task's model"
        ]

    @torch.no_grad()
    def after(self, training: LocalTraining) -> None:
        assert isinstance(training, AnchoredTraining)
        if training.anchor:
            share = self.settings.c / (1 + self.settings.c)
            torch._foreach_lerp_(list(training.anchored.values()), list(training.anchor.values()), share)
