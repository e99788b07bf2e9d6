"""Few samples that stand for a class (STAMP eq. 5 and 6, Algorithm 2): those with a mean embedding near p^l.

Eq. 5 adds the mean of the stored samples to that of the new ones; here the mean of both together is compared with p^l.
Algorithm 2 relaxes the choice to weights a_i and takes the largest. For a new class that says nothing: with all a_i = 1
the weighted mean is p^l itself, so which ones come out largest is the descent's accident (by projected gradient, the
longest vectors, whose mean is farther from p^l than random ones'). Herding chooses one by one instead, and its subsets
are at 0.25 to 0.6 of a random one's distance.
"""

import torch
from torch import Tensor


def running_mean(stored: Tensor, before: int, new: Tensor) -> Tensor:
    """Return p^l [F] of eq. 5: the mean embedding of new samples [n, F] and of earlier ones, from stored ones [m, F].

    before: the number of the earlier samples.
    """
    total = new.double().sum(0)
    if len(stored):
        total = total + before * stored.double().mean(0)
    return total / (len(new) + (before if len(stored) else 0))


def select_by_herding(new: Tensor, k: int, target: Tensor, stored: Tensor) -> Tensor:
    """Return indices [k] into new [n, F], each the one that brings the mean of all selected nearest to the target.

    stored [m, F]: embeddings that count in the mean from the start.
    """
    new, target = new.double(), target.double()
    total, count = stored.double().sum(0), len(stored)
    squares, free = new.square().sum(1), torch.ones(len(new), dtype=torch.bool, device=new.device)
    selected = []
    for _ in range(min(k, len(new))):
        count += 1
        # ||(total + x)/count - target||^2 less what no x changes, times count^2.
        cost = squares + 2 * (new @ (total - count * target))
        best = int(cost.where(free, torch.inf).argmin())
        selected.append(best)
        free[best] = False
        total = total + new[best]
    return torch.tensor(selected, dtype=torch.int64)


def mix_styles(content: Tensor, style: Tensor, share: float) -> Tensor:
    """Move each channel's mean and deviation towards another image's: MixStyle (eq. 6) of uint8 [m, C, H, W].

    share, the paper's lambda: of the content's own statistics; at 1 the images stay the same.
    """
    x, y = content.float(), style.float()
    mean_x, mean_y = (z.mean((2, 3), keepdim=True) for z in (x, y))
    std_x, std_y = (z.var((2, 3), keepdim=True, correction=0).sqrt() for z in (x, y))
    scale = (share * std_x + (1 - share) * std_y) / std_x.clamp(min=1e-6)
    mixed = (x - mean_x) * scale + share * mean_x + (1 - share) * mean_y
    return mixed.round().clamp(0, 255).to(content.dtype)
