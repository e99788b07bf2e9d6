"""A-GEM+FL: steps that do not raise the loss of stored samples, averaged by FedAvg (Chaudhry et al. 2019a, Eq. 11).

With g the gradient of a batch and g_ref that of as many samples drawn from the client's memory (episodic.py), where
g.g_ref < 0 the optimiser is given  g - (g.g_ref / g_ref.g_ref) g_ref. Both are over all that is trained, so that where
tasks have heads of their own, those of earlier tasks move with the correction. The paper's memory has as many samples
of each task; here it is ER's reservoir, so that both methods have the same samples at the same bytes.
The reference batch passes in training mode: it moves running statistics as another batch does.
"""

import torch
from torch import Tensor

from fclmodels.federation.local import LocalTraining
from fclmodels.methods.episodic import Episodic, EpisodicTraining

Gradients = dict[str, Tensor]


class Agem(Episodic):
    """Each client bends its gradients so that they do not point against those of stored old samples."""

    name = "agem"
    paper = "Efficient Lifelong Learning with A-GEM"

    def gradient(self, training: LocalTraining) -> None:
        if not isinstance(training, EpisodicTraining):
            return
        for name, gradient in corrected(training.gradients, self.reference(training)).items():
            training.parameters[name].grad = gradient

    def reference(self, training: EpisodicTraining) -> Gradients:
        """g_ref, by name; what the drawn samples' loss does not reach has none."""
        network, replayed = training.network, training.replayed()
        features = network.backbone(replayed.inputs)
        return training.gradients_of(self.cross_entropy_by_task(network, features, replayed.labels, replayed.tasks))


@torch.no_grad()
def corrected(gradients: Gradients, reference: Gradients) -> Gradients:
    """Eq. 11 over all names together; what one side lacks counts as zeros. Written over the reference."""
    shared = [name for name in reference if name in gradients]
    along = inner([gradients[name] for name in shared], [reference[name] for name in shared])
    squares = inner(list(reference.values()), list(reference.values()))
    if not along < 0 < squares:
        return gradients
    torch._foreach_mul_(list(reference.values()), -along / squares)
    torch._foreach_add_([reference[name] for name in shared], [gradients[name] for name in shared])
    return gradients | reference


def inner(one: list[Tensor], other: list[Tensor]) -> float:
    """Of all tensors together."""
    return float(sum((torch.dot(a.flatten(), b.flatten()) for a, b in zip(one, other, strict=True)), torch.zeros(())))
