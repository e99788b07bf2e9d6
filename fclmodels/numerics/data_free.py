"""Losses of images that are made from a trained network alone, without its data (TARGET, LANDER).

Of logits that stand side by side over several heads, `sizes` are the heads' numbers of columns.
"""

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn.functional import kl_div

Statistics = list[tuple[Tensor, Tensor]]  # mean and variance [channels] of each layer


def oppose(student: Tensor, teacher: Tensor, sizes: Sequence[int]) -> Tensor:
    """Return A = -mean_i [argmax s_i = argmax t_i] KL(t_i || s_i), summed over heads; low where students are wrong."""
    total = teacher.new_zeros(())
    for s, t in zip(student.split(list(sizes), 1), teacher.split(list(sizes), 1), strict=True):
        distance = kl_div(s.log_softmax(1), t.log_softmax(1), reduction="none", log_target=True).sum(1)
        total = total - (distance * (s.argmax(1) == t.argmax(1))).mean()
    return total


def measure_statistics_gap(batch: Statistics, running: Statistics, past: Statistics | None, share: float) -> Tensor:
    """Return sum_l ||mean_l - running mean_l|| + ||var_l - running var_l||, Euclidean and not squared.

    With statistics of past batches a batch's count (1 - share), and those `share`.
    """
    gaps = []
    for layer, (now, right) in enumerate(zip(batch, running, strict=True)):
        for part in range(2):
            value = now[part] if past is None else (1 - share) * now[part] + share * past[layer][part]
            gaps.append((value - right[part]).norm())
    return torch.stack(gaps).sum()


def remember_statistics(batch: Statistics, past: Statistics | None, share: float) -> Statistics:
    """Return share * past + (1 - share) * batch; without a past the batch's."""
    now = [(mean.detach(), variance.detach()) for mean, variance in batch]
    if past is None:
        return now
    pairs = zip(now, past, strict=True)
    return [tuple(share * p + (1 - share) * n for n, p in zip(*pair, strict=True)) for pair in pairs]  # type: ignore[misc]
