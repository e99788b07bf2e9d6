"""SPECIAL-C: SPECIAL's anchor in every local step instead of on the server (F.5, Algorithm 2).

From the second task on, a client's step is followed by the proximal mapping of the anchor:
w <- (w - eta g + c W*) / (1 + c), where - eta g stands for any optimiser's step. With c = eta lambda, the default, it
is the proximal gradient step of F_k(w) + lambda/2 ||w - W*||^2, eq. 4 with SPECIAL's lambda. The server averages as in
FedAvg. After S steps 1/(1 + c)^S of a deviation remains: as much as after a round of SPECIAL with (1 + c)^S - 1 for its
lambda. Where running statistics blend, they go the same share of their way in each step.
"""

import math

import torch
from pydantic import Field

from fclmodels.backbones.layers.norms import Blended
from fclmodels.federation.messages import Payload
from fclmodels.federation.server import Server
from fclmodels.federation.training.local_training import LocalTraining
from fclmodels.methods.fedavg import FedAvg
from fclmodels.methods.parts.anchor import AnchoredParameters, AnchorSettings, anchor_payload, anchor_to


class SpecialC(FedAvg):
    """SPECIAL's client-side variant: every local step is pulled towards the last task's model."""

    name = "special-c"
    paper = (
        "Server-Proximal Aggregation for Federated Domain-Incremental Learning under Partial Participation: "
        "Task-Uniform Convergence and Backward Transfer"
    )

    class Settings(AnchorSettings):
        batch_norm: Blended = Field(
            "average",
            description="running statistics: average over clients; blend: with the anchor's in each local step too; "
            "local: each client's own; batch: none; frozen after task 1",
        )
        lam: float = Field(
            0.25,
            ge=0,
            le=1e6,
            alias="lambda",
            description="weight of the anchor in the local objective: c = eta lambda",
        )
        c: float | None = Field(
            None, ge=0, le=1e6, description="weight of the anchor in each local step, in place of eta lambda"
        )

    settings: Settings

    def weigh_anchor(self, eta: float) -> float:
        """Return c at a learning rate: eta lambda, unless it is set."""
        return eta * self.settings.lam if self.settings.c is None else self.settings.c

    def list_advice(self) -> list[str]:
        """Return c in units of SPECIAL's lambda, by the client that takes most steps in a round."""
        c, tasks = self.weigh_anchor(self.run.params.optimizer.lr), range(1, len(self.run.splits.tasks))
        if not c or not tasks:
            return []
        steps = max(self.count_local_steps(task) for task in tasks)
        with_lambda = math.expm1(min(steps * math.log1p(c), 99))
        return [
            f"c {c:g}: over the {steps} local steps of a round it holds a client like SPECIAL's lambda of "
            f"{with_lambda:.2g}: none comes further than {1 / c:.3g} steps from the last task's model"
        ]

    def start_task(self, server: Server, task: int) -> Server:
        return anchor_to(super().start_task(server, task), server, self.settings.new_rows)

    def make_payload(self, server: Server) -> Payload:
        return {**super().make_payload(server), **anchor_payload(server)}

    def start_training(self, training: LocalTraining, payload: Payload) -> None:
        training.add(AnchoredParameters(training, payload, self.settings.batch_norm == "blend"))

    @torch.no_grad()
    def finish_step(self, training: LocalTraining) -> None:
        anchored, c = training.find_added(AnchoredParameters), self.weigh_anchor(training.lr)
        if anchored:
            anchored.pull(c / (1 + c))
