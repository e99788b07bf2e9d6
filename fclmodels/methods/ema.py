"""A server-side moving average of the tasks' final models: SPECIAL's anchor, once a task instead of every round.

Training is FedAvg's. When task t >= 2 ends, W_t <- (1 - share) W + share W_{t-1}, so that the model of task s stands in
that of task t with weight (1 - share) share^(t-s). No paper proposes it: it is a baseline for SPECIAL.
"""

from pydantic import Field

from fclmodels.federation.engine.cohort import Cohort
from fclmodels.federation.server import Server
from fclmodels.methods.fedavg import FedAvg
from fclmodels.methods.parts.anchor import AnchorSettings, anchor_to, blend_with_anchor


class Ema(FedAvg):
    """FedAvg whose server averages its model with the last task's at the end of each task."""

    name = "ema"
    paper = "none: a rival of SPECIAL"

    class Settings(AnchorSettings):
        share: float = Field(0.5, ge=0, le=1, description="share of the last task's model in the average")

    settings: Settings

    def start_task(self, server: Server, task: int) -> Server:
        return anchor_to(super().start_task(server, task), server, self.settings.new_rows)

    def finish_task(self, server: Server, cohort: Cohort) -> Server:
        return blend_with_anchor(server, self.settings.share, self.settings.batch_norm == "blend")
