"""ER+FL: experience replay in every client by itself, averaged by FedAvg (Chaudhry et al. 2019b; FOT, F.2).

Each local step descends the mean of two losses, of a batch and of as many random samples from the client's memory
(replay_memory.py): (L(B) + L(B_M)) / 2. Both pass the network, and its batch normalisation, as one batch. In FOT
clients store a number of samples of each task (`memory_of: each-task`); by default all tasks share one.
"""

from torch import Tensor

from fclmodels.data.batches import Batch
from fclmodels.federation.training.local_training import LocalTraining
from fclmodels.methods.parts.replay_memory import Replaying, descend_both


class Er(Replaying):
    """Each client trains on its new samples and on stored old ones, with equal weight."""

    name = "er"
    paper = "On Tiny Episodic Memories in Continual Learning"

    def compute_loss(self, training: LocalTraining, batch: Batch) -> Tensor:
        return descend_both(self, training, batch, self.compute_cross_entropy)
