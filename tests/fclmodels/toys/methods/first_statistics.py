"""An exchange before a task's first round, with all clients of the run, and weights by what clients have just trained.

knowledge: `counts` [C], how many samples of each class the present task has; `answers`, how many clients have counted.
"""

from dataclasses import replace

import torch
from torch import Tensor

from fclmodels.data.batches import Batch
from fclmodels.federation.client import Client
from fclmodels.federation.engine.cohort import Cohort
from fclmodels.federation.exchange import Answer, Exchange, Form
from fclmodels.federation.messages import Part, Payload, make_outline
from fclmodels.federation.run_context import Run
from fclmodels.federation.server import Server
from fclmodels.federation.training.local_training import LocalTraining
from fclmodels.methods.fedavg import FedAvg


class Frequencies:
    """How frequent each class of the task is, in one training."""

    def __init__(self, counts: Tensor) -> None:
        self.logarithms = counts.clamp(min=1).log().float()


class FirstStatistics(FedAvg):
    """FedAvg with logits adjusted by how frequent classes are, and clients weighed by how far they have moved."""

    name = "first-statistics"
    paper = "none"

    def __init__(self, settings: FedAvg.Settings, run: Run) -> None:
        super().__init__(settings, run)
        self.count = self.declare(Exchange("count", lambda: {}, self.count_classes, self.count_form))

    def begin_task(self, server: Server, cohort: Cohort) -> Server:
        replies = cohort.ask(self.count, clients=cohort.everyone)
        return replace(server, knowledge={"counts": replies.sum("counts")["counts"], "answers": len(replies.clients)})

    def count_form(self, task: int, round: int) -> Form:
        return {"counts": make_outline("count", {"counts": (self.run.splits.count_classes(task + 1),)}, torch.float64)}

    def count_classes(self, client: Client, payload: Payload) -> Answer:
        classes = self.run.splits.count_classes(client.task + 1)
        counts = torch.bincount(torch.from_numpy(client.rows.labels), minlength=classes).double()
        return Answer({"counts": {"counts": counts}}, {**client.memory, "last": client.task})

    def make_payload(self, server: Server) -> Payload:
        counts = server.knowledge.get("counts", torch.zeros(server.spec.label_count, dtype=torch.float64))
        return {**super().make_payload(server), "counts": Part("count", {"counts": counts})}

    def start_training(self, training: LocalTraining, payload: Payload) -> None:
        training.add(Frequencies(payload["counts"].tensors["counts"]))

    def compute_loss(self, training: LocalTraining, batch: Batch) -> Tensor:
        logits, frequencies = (
            training.network.compute_logits(training.compute_features(batch)),
            training.find_added(Frequencies),
        )
        shift = 0.0 if frequencies is None else frequencies.logarithms
        return torch.nn.functional.cross_entropy(logits + shift, batch.labels)

    def compute_client_weight(self, training: LocalTraining) -> float:
        moved = training.measure_movement(training.start)
        return 1.0 + float(torch.stack([change.norm() for change in moved.values()]).norm())

    def bound_client_weight(self, task: int) -> float:
        return 1e3
