"""A server-side moving average of the tasks' final models: SPECIAL's anchor, once a task instead of every round.

Training is FedAvg's. When task t >= 2 ends, W_t <- (1 - share) W + share W_{t-1}, so that the model of task s stands in
that of task t with weight (1 - share) share^(t-s). No paper proposes it: it is what SPECIAL has to be measured by.
"""

from pydantic import Field

from fclmodels.federation.cohort import Cohort
from fclmodels.federation.server import Server
from fclmodels.methods.anchored import AnchoredOnServer


class Ema(AnchoredOnServer):
    """FedAvg whose server averages its model with the last task's at the end of each task."""

    name = "ema"
    paper = "none: a rival of SPECIAL"

    class Settings(AnchoredOnServer.Settings):
        share: float = Field(0.5, ge=0, le=1, description="share of the last task's model in the average")

    settings: Settings

    def finish_task(self, server: Server, cohort: Cohort) -> Server:
        return self.blended(super().finish_task(server, cohort), self.settings.share)
