"""FLwF-2T: federated learning without forgetting, with two teachers (Usmanova et al. 2021, arXiv 2109.04197; 2022).

The client's own model of the past teaches it what it has seen itself, the server's what all have seen; each by the
distillation loss of distilled.py:  L = L_new + alpha L_own + beta L_server.

The client's own model is the one that it gets when a task has ended by training the final global model for one more
round on its samples of that task, as in any round and with the task's teachers. It is kept until the client has had
another task, and never leaves it. A client without one, which had no earlier task, has the server's teacher alone.
The server's is the previous task's final global model W*_{t-1}, downloaded once a task; or, by setting, the current
one, from which the round starts and which knows the new classes too. Both are readings: the paper's own equations were
not at hand, nor how it scales the three losses.
"""

from dataclasses import replace
from typing import Literal

from pydantic import Field, NonNegativeFloat

from fclmodels.federation.client import Client
from fclmodels.federation.cohort import Cohort
from fclmodels.federation.messages import Payload, Reply
from fclmodels.federation.server import Server
from fclmodels.methods.base import Memory
from fclmodels.methods.distilled import Distilled, Weights


class Flwf2T(Distilled):
    """Clients learn from two teachers: their own model of the previous task, and the server's."""

    name = "flwf-2t"
    paper = "Federated Continual Learning through distillation in pervasive computing"

    class Settings(Distilled.Settings):
        alpha: NonNegativeFloat = Field(0.5, le=1e6, description="weight of distillation from the client's own model")
        beta: NonNegativeFloat = Field(0.5, le=1e6, description="weight of distillation from the server's model")
        server: Literal["previous", "current"] = Field(
            "previous", description="the server's teacher: the previous task's final model, or the round's own"
        )

    settings: Settings

    def payload(self, server: Server) -> Payload:
        payload = super().payload(server)
        if self.settings.server == "current":
            payload.pop("anchor", None)
        return payload

    def teachers(self, client: Client, payload: Payload) -> list[tuple[float, Weights]]:
        if client.task == 0:
            return []
        of_server = payload["anchor" if self.settings.server == "previous" else "weights"]
        teachers = [(self.settings.beta, of_server.tensors)]
        if "model" in client.memory:
            teachers.append((self.settings.alpha, client.memory["model"]))
        return teachers

    def finish_task(self, server: Server, cohort: Cohort) -> Server:
        cohort.ask("remember", self.payload(server))
        return server

    def answer(self, client: Client, question: str, payload: Payload) -> tuple[Reply, Memory]:
        """The memory with the client's own model of the task; the answer itself is empty."""
        one_more = replace(client, round=self.run.rounds(client.task))
        training = self.prepared(one_more, payload)
        training.run()
        model = {name: weight.clone() for name, weight in training.network.state_dict().items()}
        return Reply({}), {**client.memory, "model": model}
