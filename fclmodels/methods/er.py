"""ER+FL: experience replay in every client by itself, averaged by FedAvg (Chaudhry et al. 2019b; FOT, F.2).

Each local step goes down the mean of two losses, of a batch and of as many samples drawn from the client's memory
(episodic.py): (L(B) + L(B_M)) / 2. Both pass the network as one batch, which is what batch normalisation sees.
FOT has clients store a number of points of each task; here one budget is shared by all tasks, as in a reservoir.
"""

import torch
from torch import Tensor

from fclmodels.data.batches import Batch
from fclmodels.federation.local import LocalTraining
from fclmodels.methods.episodic import Episodic, EpisodicTraining


class Er(Episodic):
    """Each client trains on its new samples and on stored old ones, with equal weight."""

    name = "er"
    paper = "On Tiny Episodic Memories in Continual Learning"

    def loss(self, training: LocalTraining, batch: Batch) -> Tensor:
        if not isinstance(training, EpisodicTraining):
            return super().loss(training, batch)
        network, replayed = training.network, training.replayed()
        features = network.backbone(torch.cat([batch.inputs, replayed.inputs]))
        new, old = features.split([len(batch.labels), len(replayed.labels)])
        loss = self.cross_entropy(network, new, batch.labels, training.client.task)
        return (loss + self.cross_entropy_by_task(network, old, replayed.labels, replayed.tasks)) / 2
