"""iCaRL+FL: exemplars, distillation by class and the nearest mean of exemplars (Rebuffi et al. 2017), under FedAvg.

A client trains on the union of its new samples and its exemplars. The loss is the binary cross entropy of each class,
whose targets are the labels for the task's classes and the last task's model's probabilities for earlier ones
(Algorithm 3). The paper sums over classes; here it is their mean, as in its code, whose learning rate 2 goes with it.

Answers are those of the nearest mean of exemplars, of features of length 1 on the final model (Algorithm 1). After a
task all clients of the run, also those without data of it, send the sum of these features and their number by class;
the server scales each class's sum to length 1. That all of them speak is our choice.

knowledge: `anchor`; `means` {weight [C, F], bias [C]} as a head: the nearest of unit vectors has the largest product.
"""

from dataclasses import replace
from typing import Literal

import torch
from pydantic import Field
from torch import Tensor
from torch.nn.functional import normalize

from fclmodels.data.batches import Batch
from fclmodels.federation.client import Client
from fclmodels.federation.engine.cohort import Cohort
from fclmodels.federation.exchange import Answer, Form
from fclmodels.federation.messages import Payload, make_outline
from fclmodels.federation.prediction import FittedHead
from fclmodels.federation.server import Server
from fclmodels.federation.training.local_training import LocalTraining
from fclmodels.methods.parts.coreset_memory import embed
from fclmodels.methods.parts.rehearsal import LastModel, Rehearsed, count_columns, find_columns
from fclmodels.methods.parts.replay_memory import unpack_samples
from fclmodels.numerics.exemplar_losses import binary_distillation_loss
from fclmodels.numerics.fitted_heads import NEVER
from fclmodels.numerics.prototypes import LEAST


class Icarl(Rehearsed):
    """Clients rehearse exemplars, whose mean features by class answer in the head's place."""

    name = "icarl"
    paper = "iCaRL: Incremental Classifier and Representation Learning"

    class Settings(Rehearsed.Settings):
        answers: Literal["nearest-mean", "head"] = Field(
            "nearest-mean", description="who answers: the nearest mean of exemplars (the paper's), or the head"
        )

    settings: Settings

    def start_task(self, server: Server, task: int) -> Server:
        started = super().start_task(server, task)
        return replace(started, knowledge={n: k for n, k in started.knowledge.items() if n != "means"})

    def finish_task(self, server: Server, cohort: Cohort) -> Server:
        replies = cohort.ask(self.select, server, clients=cohort.everyone)
        if self.settings.answers == "head":
            return server
        sums, noise = replies.sum("means"), replies.noise("means")
        present = sums["weight"] > LEAST * noise
        directions = normalize(sums["sum"]).where(present[:, None], 0.0).float()
        bias = torch.zeros(len(present)).masked_fill(~present, NEVER)
        return replace(server, knowledge={**server.knowledge, "means": {"weight": directions, "bias": bias}})

    def fitted_head(self, server: Server) -> FittedHead | None:
        """Return the means of exemplars; None while a task is learned."""
        return FittedHead(**server.knowledge["means"]) if "means" in server.knowledge else None

    def select_form(self, task: int, round: int) -> Form:
        if self.settings.answers == "head":
            return {}
        network = self.networks.of(self.run.spec(task + 1))
        columns, most = count_columns(network.spec), self.memory.limit(network.spec)
        shapes = {"weight": (columns,), "sum": (columns, network.backbone.features)}
        # Of m features of length 1, counts and sums are each m long at most.
        return {"means": make_outline("prototype", shapes, torch.float64, bound=2**0.5 * most)}

    @torch.no_grad()
    def select_exemplars(self, client: Client, payload: Payload) -> Answer:
        """Return the memory with exemplars of the task, and their sums and numbers by class."""
        network = self.load_final(client, payload)
        memory = self.memory.add_task(client, network)
        if self.settings.answers == "head":
            return Answer({}, memory)
        columns, samples = count_columns(network.spec), unpack_samples(memory)
        weight = torch.zeros(columns, dtype=torch.float64)
        total = torch.zeros(columns, network.backbone.features, dtype=torch.float64)
        if samples is not None:
            places = find_columns(network.spec, samples.labels, samples.tasks).cpu()
            weight = places.bincount(minlength=columns).double()
            total = total.index_add(0, places, normalize(embed(client, network, samples).double()))
        return Answer({"means": {"weight": weight, "sum": total}}, memory)

    def loss(self, training: LocalTraining, batch: Batch) -> Tensor:
        teacher, (logits, labels) = training.part(LastModel), self.score(training, batch)
        if teacher is None:
            return binary_distillation_loss(logits, labels, labels[:0], None)
        answers = teacher.answer(batch.inputs)[1][:, teacher.old]
        return binary_distillation_loss(logits, labels, teacher.old, answers)
