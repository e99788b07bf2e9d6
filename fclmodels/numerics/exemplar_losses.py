"""Losses of methods that rehearse exemplars: iCaRL's. Logits are [B, C], labels [B] are columns of them.

A teacher's logits [B, O] are those of the columns `old` [O].
"""

from torch import Tensor
from torch.nn.functional import binary_cross_entropy_with_logits, one_hot


def distil_targets(labels: Tensor, columns: int, old: Tensor, teacher: Tensor | None) -> Tensor:
    """Return targets [B, columns]: one-hot labels, and in the old columns the teacher's s(z) for all samples.

    So an exemplar's own label is the teacher's opinion of it (Rebuffi et al. 2017, Algorithm 3).
    """
    targets = one_hot(labels, columns).float()
    return targets if teacher is None else targets.index_copy(1, old, teacher.sigmoid().float())


def binary_distillation_loss(logits: Tensor, labels: Tensor, old: Tensor, teacher: Tensor | None) -> Tensor:
    """Return the binary cross entropy with `distil_targets`, mean over samples and columns."""
    return binary_cross_entropy_with_logits(logits.float(), distil_targets(labels, logits.shape[1], old, teacher))
