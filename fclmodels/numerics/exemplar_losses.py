"""Losses of methods that rehearse exemplars: iCaRL's, SS-IL's, BiC's.

Logits are [B, C] and labels [B] columns of them. A teacher's logits [B, O] are those of the columns `old` [O].
"""

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy, one_hot

from fclmodels.numerics.distillation import distillation_loss


def distil_targets(labels: Tensor, columns: int, old: Tensor, teacher: Tensor | None) -> Tensor:
    """Return targets [B, columns]: one-hot labels, and in the old columns the teacher's s(z) for all samples.

    So an exemplar's own label is the teacher's opinion of it (Rebuffi et al. 2017, Algorithm 3).
    """
    targets = one_hot(labels, columns).float()
    return targets if teacher is None else targets.index_copy(1, old, teacher.sigmoid().float())


def separated_cross_entropy(logits: Tensor, labels: Tensor, new: Tensor) -> Tensor:
    """Return the cross entropy of each sample over the columns on its side: new ones, or all others (Ahn et al.)."""
    is_new = torch.zeros(logits.shape[1], dtype=torch.bool, device=logits.device).index_fill(0, new, True)
    other_side = is_new[labels][:, None] != is_new
    return cross_entropy(logits.masked_fill(other_side, -torch.inf), labels)


def distil_by_task(logits: Tensor, teacher: Tensor, groups: Sequence[Tensor], temperature: float) -> Tensor:
    """Return the sum over tasks of T^2 KL(teacher || student), each softmax over one group of columns."""
    losses = [distillation_loss(logits[:, group], teacher[:, group], temperature) for group in groups]
    return temperature**2 * sum(losses, start=logits.new_zeros(()))


def soft_cross_entropy(logits: Tensor, teacher: Tensor, temperature: float) -> Tensor:
    """Return the cross entropy of softmax(logits / T) with softmax(teacher / T), mean over samples; no factor T^2."""
    return cross_entropy(logits / temperature, (teacher / temperature).softmax(1))


def correct_logits(logits: Tensor, new: Tensor, scale: Tensor, shift: Tensor) -> Tensor:
    """Return logits with scale z + shift in the new columns (Wu et al. 2019, eq. 4)."""
    return logits.index_copy(1, new, scale * logits[:, new] + shift)


def fit_correction(logits: Tensor, labels: Tensor, new: Tensor, steps: int, lr: float) -> tuple[Tensor, Tensor]:
    """Return scale and shift of least cross entropy of corrected logits, by steps of Adam from (1, 0), in float64."""
    logits = logits.double()
    scale, shift = (torch.tensor(value, dtype=torch.float64, requires_grad=True) for value in (1.0, 0.0))
    optimiser = torch.optim.Adam([scale, shift], lr)
    for _ in range(steps):
        optimiser.zero_grad()
        cross_entropy(correct_logits(logits, new, scale, shift), labels).backward()
        optimiser.step()
    return scale.detach(), shift.detach()
