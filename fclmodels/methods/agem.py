"""A-GEM+FL: steps that do not raise the loss of stored samples, averaged by FedAvg (Chaudhry et al. 2019a, Eq. 11).

With g the gradient of a batch and g_ref that of as many samples drawn from the client's memory (replay_memory.py),
where g.g_ref < 0 the optimiser gets  g - (g.g_ref / g_ref.g_ref) g_ref. Both are over all trained parameters, so that
where tasks have heads of their own, those of earlier tasks move with the correction. The paper's memory has equally
many samples of each task; here it is ER's reservoir, so that both methods have the same samples at the same bytes. The
reference batch passes in training mode: it moves running statistics as other batches do.
"""

import torch
from torch import Tensor

from fclmodels.data.batches import Batch
from fclmodels.federation.training.local_training import LocalTraining
from fclmodels.methods.parts.replay_memory import Replay, Replaying

Gradients = dict[str, Tensor]


class Agem(Replaying):
    """Each client bends its gradients so that they do not point against those of stored old samples."""

    name = "agem"
    paper = "Efficient Lifelong Learning with A-GEM"

    def change_gradients(self, training: LocalTraining) -> None:
        if replay := training.find_added(Replay):
            for name, gradient in correct_gradients(
                training.gradients, self.compute_reference(training, replay.draw())
            ).items():
                training.parameters[name].grad = gradient

    def compute_reference(self, training: LocalTraining, replayed: Batch) -> Gradients:
        """Return g_ref, by name; parameters that the replayed samples' loss does not reach have none."""
        network = training.network
        features = network.backbone(replayed.inputs)
        return training.compute_gradients(
            self.compute_cross_entropy_by_task(network, features, replayed.labels, replayed.tasks)
        )


@torch.no_grad()
def correct_gradients(gradients: Gradients, reference: Gradients) -> Gradients:
    """Return eq. 11 over all names together, written over the reference; a name that one side lacks counts as zeros."""
    shared = [name for name in reference if name in gradients]
    along = compute_inner_product([gradients[name] for name in shared], [reference[name] for name in shared])
    squares = compute_inner_product(list(reference.values()), list(reference.values()))
    if not along < 0 < squares:
        return gradients
    torch._foreach_mul_(list(reference.values()), -along / squares)
    torch._foreach_add_([reference[name] for name in shared], [gradients[name] for name in shared])
    return gradients | reference


def compute_inner_product(one: list[Tensor], other: list[Tensor]) -> float:
    """Return the inner product over all tensors together."""
    return float(sum((torch.dot(a.flatten(), b.flatten()) for a, b in zip(one, other, strict=True)), torch.zeros(())))
