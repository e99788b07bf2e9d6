"""ER+FL: experience replay in every client by itself, averaged by FedAvg (Chaudhry et al. 2019b; FOT, F.2).

Each local step descends the mean of two losses, of a batch and of as many random samples from the client's memory
(replay_memory.py): (L(B) + L(B_M)) / 2. Both pass the network, and its batch normalisation, as one batch. In FOT
clients store a number of samples of each task (`memory_of: each-task`); by default all tasks share one.
"""

import torch
from torch import Tensor

from fclmodels.backbones.model.network import Network
from fclmodels.data.batches import Batch
from fclmodels.federation.training.local_training import LocalTraining
from fclmodels.methods.parts.replay_memory import Replay, Replaying


class Er(Replaying):
    """Each client trains on its new samples and on stored old ones, with equal weight."""

    name = "er"
    paper = "On Tiny Episodic Memories in Continual Learning"

    def loss(self, training: LocalTraining, batch: Batch) -> Tensor:
        replay, network, task = training.part(Replay), training.network, training.client.task
        if replay is None:
            return self.loss_of_new(network, training.features(batch), batch.labels, task)
        replayed = replay.draw()
        features = network.backbone(torch.cat([batch.inputs, replayed.inputs]))
        new, old = features.split([len(batch.labels), len(replayed.labels)])
        loss = self.loss_of_new(network, new, batch.labels, task)
        return (loss + self.cross_entropy_by_task(network, old, replayed.labels, replayed.tasks)) / 2

    def loss_of_new(self, network: Network, features: Tensor, labels: Tensor, task: int) -> Tensor:
        """Return the loss of the task's own samples."""
        return self.cross_entropy(network, features, labels, task)
