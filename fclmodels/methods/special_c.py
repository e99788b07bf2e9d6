"""SPECIAL-C: SPECIAL's anchor in every local step instead of on the server (F.5, Algorithm 2).

From the second task on, a client's step is followed by the proximal mapping of the anchor:
w <- (w - eta g + c W*) / (1 + c), where - eta g stands for any optimiser's step. The server averages as in FedAvg.
After S steps 1/(1 + c)^S of a deviation remains: as much as after a round of SPECIAL where (1 + c)^S = 1 + lambda. The
paper's text at hand lacks the value of c.
"""

import math

import torch
from pydantic import Field

from fclmodels.federation.messages import Payload
from fclmodels.federation.server import Server
from fclmodels.federation.training.local_training import LocalTraining
from fclmodels.methods.fedavg import FedAvg
from fclmodels.methods.parts.anchor import AnchoredParameters, anchor_payload, anchor_to


class SpecialC(FedAvg):
    """SPECIAL's client-side variant: every local step is pulled towards the last task's model."""

    name = "special-c"
    paper = (
        "Server-Proximal Aggregation for Federated Domain-Incremental Learning under Partial Participation: "
        "Task-Uniform Convergence and Backward Transfer"
    )

    class Settings(FedAvg.Settings):
        c: float = Field(0.01, ge=0, le=1e6, description="weight of the anchor in each local step")

    settings: Settings

    def advice(self) -> list[str]:
        """Return c in units of SPECIAL's lambda, by the client that takes most steps in a round."""
        c, tasks = self.settings.c, range(1, len(self.run.splits.tasks))
        if not c or not tasks:
            return []
        steps = max(self.local_steps(task) for task in tasks)
        with_lambda = math.expm1(min(steps * math.log1p(c), 99))
        return [
            f"c {c:g}: over the {steps} local steps of a round it holds a client like SPECIAL's lambda of "
            f"{with_lambda:.2g}: none comes further than {1 / c:.3g} steps from the last task's model"
        ]

    def start_task(self, server: Server, task: int) -> Server:
        return anchor_to(super().start_task(server, task), server)

    def payload(self, server: Server) -> Payload:
        return {**super().payload(server), **anchor_payload(server)}

    def start_training(self, training: LocalTraining, payload: Payload) -> None:
        training.add(AnchoredParameters(training, payload))

    @torch.no_grad()
    def after(self, training: LocalTraining) -> None:
        anchored = training.part(AnchoredParameters)
        if anchored and anchored.anchor:
            share = self.settings.c / (1 + self.settings.c)
            torch._foreach_lerp_(list(anchored.parameters.values()), list(anchored.anchor.values()), share)
