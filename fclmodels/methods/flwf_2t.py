"""FLwF-2T: federated learning without forgetting, with two teachers (Usmanova et al. 2021, arXiv 2109.04197; 2022).

The client's own past model teaches what this client has learned, the server's what all clients have; each by the
distillation loss of distillation.py:  L = alpha L_new + beta L_own + (1 - alpha - beta) L_server  (Table 7 of SPECIAL).

The client's own model is made when a task has ended: the final global model, trained for one more round on the client's
samples of that task, as in any round and with the task's teachers. The client stores it until it has had another task;
it never travels. A client without one, which had no earlier task, has the server's teacher alone, with beta's share
too (FLwF: alpha L_new + (1 - alpha) L_server); in the first task there is no teacher, and L = L_new.

The server's model is the previous task's final global model W*_{t-1}, downloaded once a task; or, by setting, the
current one, from which the round starts and which knows the new classes too. Both are our interpretations: the paper's
equations were not at hand.
"""

from dataclasses import replace
from typing import Literal

from pydantic import Field, model_validator

from fclmodels.federation.client import Client
from fclmodels.federation.engine.cohort import Cohort
from fclmodels.federation.exchange import Answer, Exchange
from fclmodels.federation.messages import Payload
from fclmodels.federation.run_context import Run
from fclmodels.federation.server import Server
from fclmodels.methods.parts.distillation import Distilled, Lesson


class Flwf2T(Distilled):
    """Clients learn from two teachers: their own model of the previous task, and the server's."""

    name = "flwf-2t"
    paper = "Federated Continual Learning through distillation in pervasive computing"

    class Settings(Distilled.Settings):
        alpha: float = Field(
            0.5, gt=0, le=1, description="weight of the labels' cross entropy, where there is a teacher"
        )
        beta: float = Field(
            0.25,
            ge=0,
            le=1,
            description="weight of the client's own model's distillation; 1 - alpha - beta: the server's",
        )
        server: Literal["previous", "current"] = Field(
            "previous", description="the server's teacher: the previous task's final model, or the round's own"
        )

        @model_validator(mode="after")
        def _weights_are_shares(self) -> "Flwf2T.Settings":
            if self.alpha + self.beta > 1:
                raise ValueError(
                    f"alpha {self.alpha:g} and beta {self.beta:g} are shares of 1: make one of them smaller."
                )
            return self

    settings: Settings

    def __init__(self, settings: Settings, run: Run) -> None:
        super().__init__(settings, run)
        self.downloads_last_model = settings.server == "previous"
        self.remember_model = self.declare(Exchange("remember", self.make_payload, self.keep_own_model))

    def list_lessons(self, client: Client, payload: Payload) -> list[Lesson]:
        if client.task == 0:
            return []
        alpha, beta = self.settings.alpha, self.settings.beta
        of_server = payload["anchor" if self.downloads_last_model else "weights"].tensors
        if "model" not in client.memory:
            return [Lesson(1 - alpha, of_server)]
        return [Lesson(max(0.0, 1 - alpha - beta), of_server), Lesson(beta, client.memory["model"])]

    def weigh_labels(self, task: int) -> float:
        return self.settings.alpha if task else 1.0

    def finish_task(self, server: Server, cohort: Cohort) -> Server:
        cohort.ask(self.remember_model, server)
        return server

    def keep_own_model(self, client: Client, payload: Payload) -> Answer:
        """Return the memory with the client's own model of the task; the answer itself is empty."""
        one_round_more = replace(client, round=self.run.count_rounds(client.task))
        training = self.prepare_training(one_round_more, payload)
        training.run()
        model = {name: weight.clone() for name, weight in training.network.state_dict().items()}
        return Answer({}, {**client.memory, "model": model})
