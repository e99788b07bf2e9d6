"""GLFC as FOT compares with it: gradient compensation alone (Bakman et al. 2024, section 5; after Dong et al. 2022).

Exemplars and the normaliser w, on heads of the tasks' own; no distillation, no proxy server. The memory is ER's (FOT,
F.2). Each local step descends the mean of w_i CE_i over a batch and as many stored samples, CE_i the cross entropy in
i's task. g_i = 1 - p(y_i) is the length of its gradient in its own logit, and w_i = g_i over the mean of g among the
samples of earlier tasks, or of the present one; FOT does not say what g is where heads are many (ours). The first task
is FedAvg's.
"""

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from fclmodels.backbones.model.network import Network
from fclmodels.backbones.model.spec import to_local_labels
from fclmodels.data.batches import Batch
from fclmodels.federation.training.local_training import LocalTraining
from fclmodels.methods.parts.replay_memory import Replay, Replaying
from fclmodels.numerics.gradient_compensation import compensate


class GlfcFot(Replaying):
    """Clients let stored samples pull as much as new ones."""

    name = "glfc-fot"
    paper = "Federated Class-Incremental Learning, as adapted in Federated Orthogonal Training"

    def compute_loss(self, training: LocalTraining, batch: Batch) -> Tensor:
        if training.client.task == 0:
            return super().compute_loss(training, batch)
        if replay := training.find_added(Replay):
            batch = Batch.concatenate([batch, replay.draw()])
        losses = self.list_losses(training.network, training.compute_features(batch), batch)
        gaps = 1 - (-losses.detach().float()).exp()
        return (compensate(gaps, batch.tasks < training.client.task) * losses).mean()

    def list_losses(self, network: Network, features: Tensor, batch: Batch) -> Tensor:
        """Return the cross entropy [B] of each sample, over all classes so far or its own task's."""
        if self.loss_is_over_seen(network.spec):
            return cross_entropy(network.compute_logits(features), batch.labels, reduction="none")
        losses = torch.zeros(len(features), device=features.device)
        for task in batch.tasks.unique().tolist():
            mine = (batch.tasks == task).nonzero().flatten()
            labels = to_local_labels(network.spec, task, batch.labels[mine])
            own = cross_entropy(network.compute_logits(features[mine], task), labels, reduction="none")
            losses = losses.index_copy(0, mine, own.to(losses))
        return losses
