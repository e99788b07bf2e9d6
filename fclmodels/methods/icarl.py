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

from torch import Tensor

from fclmodels.data.batches import Batch
from fclmodels.federation.client import Client
from fclmodels.federation.engine.cohort import Cohort
from fclmodels.federation.exchange import Answer, Form
from fclmodels.federation.messages import Payload
from fclmodels.federation.prediction import FittedHead
from fclmodels.federation.server import Server
from fclmodels.federation.training.local_training import LocalTraining
from fclmodels.methods.parts.rehearsal import LastModel, Rehearsed
from fclmodels.methods.parts.stored_means import fit_directions, outline_sums, sum_features
from fclmodels.numerics.exemplar_losses import binary_distillation_loss


class Icarl(Rehearsed):
    """Clients rehearse exemplars, whose mean features by class answer in the head's place."""

    name = "icarl"
    paper = "iCaRL: Incremental Classifier and Representation Learning"

    def start_task(self, server: Server, task: int) -> Server:
        started = super().start_task(server, task)
        return replace(started, knowledge={n: k for n, k in started.knowledge.items() if n != "means"})

    def finish_task(self, server: Server, cohort: Cohort) -> Server:
        replies = cohort.ask(self.select, server, clients=cohort.everyone)
        means = fit_directions(replies.sum("means"), replies.noise("means"))
        return replace(server, knowledge={**server.knowledge, "means": means})

    def fitted_head(self, server: Server) -> FittedHead | None:
        """Return the means of exemplars; None while a task is learned."""
        return FittedHead(**server.knowledge["means"]) if "means" in server.knowledge else None

    def select_form(self, task: int, round: int) -> Form:
        network = self.networks.of(self.run.spec(task + 1))
        return {"means": outline_sums(network, self.memory.limit(network.spec))}

    def select_exemplars(self, client: Client, payload: Payload) -> Answer:
        """Return the memory with exemplars of the task, and their sums and numbers by class."""
        network = self.load_final(client, payload)
        memory = self.memory.add_task(client, network)
        return Answer({"means": sum_features(client, network, memory)}, memory)

    def loss(self, training: LocalTraining, batch: Batch) -> Tensor:
        teacher, (logits, labels) = training.part(LastModel), self.score(training, batch)
        if teacher is None:
            return binary_distillation_loss(logits, labels, labels[:0], None)
        answers = teacher.answer(batch.inputs)[1][:, teacher.old]
        return binary_distillation_loss(logits, labels, teacher.old, answers)
