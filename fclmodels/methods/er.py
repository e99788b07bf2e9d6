"""ER+FL: experience replay in every client by itself, averaged by FedAvg (Chaudhry et al. 2019b; FOT, F.2).

Each local step descends the mean of two losses, of a batch and of as many random samples from the client's memory
(replay_memory.py): (L(B) + L(B_M)) / 2. Both pass the network, and its batch normalisation, as one batch. In FOT
clients store a number of samples of each task (`memory_of: each-task`); by default all tasks share one.
"""

import torch
from torch import Tensor

from fclmodels.data.batches import Batch
from fclmodels.federation.training.local_training import LocalTraining
from fclmodels.methods.parts.replay_memory import Replay, Replaying


class Er(Replaying):
    """Each client trains on its new samples and on stored old ones, with equal weight."""

    name = "er"
    paper = "On Tiny Episodic Memories in Continual Learning"

    def loss(self, training: LocalTraining, batch: Batch) -> Tensor:
        replay = training.part(Replay)
        if replay is None:
            return super().loss(training, batch)
        network, replayed = training.network, replay.draw()
        features = network.backbone(torch.cat([batch.inputs, replayed.inputs]))
        new, old = features.split([len(batch.labels), len(replayed.labels)])
        loss = self.cross_entropy(network, new, batch.labels, training.client.task)
        return (loss + self.cross_entropy_by_task(network, old, replayed.labels, replayed.tasks)) / 2
