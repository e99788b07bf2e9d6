"""An exchange: one question of the server to clients, declared in one place.

Name, payload, form and answer stand together, and the form decides what leaves a client: of an answer's tensors those
that the form names are sent, as the kinds that it says; a part that it does not name is a mistake. A round of local
training is an exchange like the others, called TRAIN.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from torch import Tensor

from fclmodels.federation.client import Client
from fclmodels.federation.messages import Part, Payload, Reply
from fclmodels.storage.trees import Tree

TRAIN = "train"
EVALUATIONS = {"evaluate": "test", "judge": "val"}  # the engine's own questions about accuracy, and the rows they read

Memory = dict[str, Tree]
Form = dict[str, Part]  # the parts of an answer as outlines: tensors on the device "meta"


class Answer(NamedTuple):
    """A client's answer before it gets its form. `loss` and `samples` are for the log only: no method reads them."""

    tensors: Mapping[str, Mapping[str, Tensor]]  # by part and name
    memory: Memory  # from now on
    loss: float = 0.0
    samples: int = 0


@dataclass(frozen=True)
class Exchange:
    """A question of the server and its answer."""

    name: str
    payload: Callable[..., Payload]  # what clients download with the question
    answer: Callable[[Client, Payload], Answer]  # how a client answers
    form: Callable[[int, int], Form] = field(default=lambda task, round: {})  # of the answer, in a task and a round

    def reply(self, client: Client, payload: Payload) -> tuple[Reply, Memory]:
        """Return a client's reply in the declared form, and its memory from now on."""
        answer = self.answer(client, payload)
        return self.fill(client, answer), answer.memory

    def fill(self, client: Client, answer: Answer) -> Reply:
        """Return an answer in the declared form, as it travels."""
        form = self.form(client.task, client.round)
        if undeclared := sorted(answer.tensors.keys() - form.keys()):
            raise ValueError(f"{self.name}: the form does not declare {', '.join(undeclared)}, which the answer holds")
        parts = {name: fill_outline(outline, answer.tensors[name]) for name, outline in form.items()}
        return Reply(parts, answer.loss, answer.samples, max(client.round, 0))


def fill_outline(outline: Part, tensors: Mapping[str, Tensor]) -> Part:
    """Return the outlined part with the tensors that it names."""
    return replace(outline, tensors={name: tensors[name] for name in outline.tensors})
