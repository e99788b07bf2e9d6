"""The columns of all heads of which some client has samples: what a generator is asked to draw.

Before a task's first round every client tells, for each class of the task, whether it has samples of it. The server
needs the sum alone.

knowledge: `columns` {past, now}, columns [n] that clients had samples of in earlier tasks, and so far.
"""

from dataclasses import replace

import torch
from torch import Tensor

from fclmodels.federation.client import Client
from fclmodels.federation.engine.cohort import Cohort
from fclmodels.federation.exchange import Answer, Exchange, Form
from fclmodels.federation.messages import Part, Payload, make_outline
from fclmodels.federation.run_context import Run
from fclmodels.federation.server import Server
from fclmodels.methods.parts.joined_heads import list_task_columns


class LabelSets:
    """Asks clients which classes of a task they have, and tells all of them which there are."""

    def __init__(self, run: Run) -> None:
        self.run = run
        self.exchange = Exchange("labels", lambda: {}, self.count_labels, self.make_form)

    # On the server.

    def start_task(self, server: Server) -> Server:
        """Return the server whose clients may have all of the task's classes."""
        past = server.knowledge.get("columns", {}).get("now", torch.zeros(0, dtype=torch.int64))
        return self.note(server, past, list_task_columns(server.spec, torch.device("cpu"))[server.task])

    def ask(self, server: Server, cohort: Cohort) -> Server:
        """Return the server that knows which of the task's classes its clients have."""
        counts = cohort.ask(self.exchange).sum("labels")["count"].cpu()
        columns = list_task_columns(server.spec, torch.device("cpu"))[server.task]
        return self.note(server, server.knowledge["columns"]["past"], columns[counts > 0])

    def note(self, server: Server, past: Tensor, of_task: Tensor) -> Server:
        columns = {"past": past, "now": torch.cat([past, of_task]).unique()}
        return replace(server, knowledge={**server.knowledge, "columns": columns})

    def make_payload(self, server: Server) -> Payload:
        """Return the part with both sets, which clients download once a task."""
        if server.task < 0:
            return {}
        return {"columns": Part("count", dict(server.knowledge["columns"]), once=True)}

    # On a client.

    def make_form(self, task: int, round: int) -> Form:
        """Return the outline of a number for each class of a task."""
        classes = len(self.run.make_spec(task + 1).tasks[task])
        return {"labels": make_outline("count", {"count": (classes,)}, torch.float64)}

    def count_labels(self, client: Client, payload: Payload) -> Answer:
        """Return 1 for each class of the task of which the client has samples, else 0."""
        classes = self.run.make_spec(client.task + 1).tasks[client.task]
        present = torch.tensor([bool((client.rows.labels == label).any()) for label in classes], dtype=torch.float64)
        return Answer({"labels": {"count": present}}, client.memory)


def draw_uniformly(columns: Tensor, count: int) -> Tensor:
    """Return so many of these columns, with torch's generator."""
    return columns[torch.randint(len(columns), (count,), device=columns.device)]
