"""LwF+FL: learning without forgetting (Li and Hoiem 2017) on every client, averaged by FedAvg.

The teacher is the global model with which the previous task ended, which a client downloads once a task. The loss is
L_new + weight * L_old (Fig. 3; their weight lambda_o is 1), L_old the distillation loss of distillation.py on the
client's new samples. Their warm-up, in which the new rows alone train, is left out: averaging begins at once.
"""

from pydantic import Field, NonNegativeFloat

from fclmodels.federation.client import Client
from fclmodels.federation.messages import Payload
from fclmodels.methods.parts.distillation import Distilled, Lesson


class Lwf(Distilled):
    """Clients learn new samples while they go on answering for old classes as the previous task's model did."""

    name = "lwf"
    paper = "Learning without Forgetting"

    class Settings(Distilled.Settings):
        weight: NonNegativeFloat = Field(1.0, le=1e6, description="weight of the distillation loss (lambda_o)")

    settings: Settings

    def list_lessons(self, client: Client, payload: Payload) -> list[Lesson]:
        return [Lesson(self.settings.weight, payload["anchor"].tensors)] if "anchor" in payload else []
