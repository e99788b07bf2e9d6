"""iCaRL+FL: exemplars, distillation by class and the nearest mean of exemplars (Rebuffi et al. 2017), under FedAvg.

A client trains on the union of its new samples and its exemplars. The loss is the binary cross entropy of each class,
whose targets are the labels for the task's classes and the last task's model's probabilities for earlier ones
(Algorithm 3). The paper sums over classes; here it is their mean, as in its code, whose learning rate 2 goes with it.
Who answers, and how a federation has it: parts/rehearsal.py.
"""

from typing import ClassVar

from torch import Tensor

from fclmodels.data.batches import Batch
from fclmodels.federation.training.local_training import LocalTraining
from fclmodels.methods.parts.rehearsal import LastModel, Rehearsed, find_targets
from fclmodels.numerics.gradient_compensation import weigh_cross_entropy


class Icarl(Rehearsed):
    """Clients rehearse exemplars, whose mean features by class answer in the head's place."""

    name = "icarl"
    paper = "iCaRL: Incremental Classifier and Representation Learning"
    answers_by_means: ClassVar[bool] = True

    def compute_loss(self, training: LocalTraining, batch: Batch) -> Tensor:
        logits, labels = self.score(training, batch)
        return weigh_cross_entropy(logits, find_targets(training.find_added(LastModel), logits, labels, batch.inputs))
