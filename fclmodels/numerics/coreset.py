"""Few samples that stand for a class (STAMP eq. 5 and 6, Algorithm 2): chosen so that their mean embedding is near p^l.

Eq. 5 adds the mean of what is stored to the mean of what is new; what is compared with p^l here is the mean of both
together. Both ways of choosing are deterministic, and herding comes nearer: its subsets are at 0.25 to 0.6 of a random
one's distance, while of a class that is new the relaxed weights choose no better than chance.
"""

import torch
from torch import Tensor

RELAXED_STEPS = 200


def running_mean(held: Tensor, before: int, new: Tensor) -> Tensor:
    """p^l [F] of eq. 5: the mean embedding of new samples [n, F] and of earlier ones, by what is held of them [m, F].

    before: how many the earlier ones were.
    """
    total = new.double().sum(0)
    if len(held):
        total = total + before * held.double().mean(0)
    return total / (len(new) + (before if len(held) else 0))


def herded(new: Tensor, k: int, target: Tensor, held: Tensor) -> Tensor:
    """Indices [k] into new [n, F], one at a time the one that brings the mean of all chosen nearest to the target.

    held [m, F]: embeddings that count in the mean from the start.
    """
    new, target = new.double(), target.double()
    total, count = held.double().sum(0), len(held)
    squares, free = new.square().sum(1), torch.ones(len(new), dtype=torch.bool, device=new.device)
    chosen = []
    for _ in range(min(k, len(new))):
        count += 1
        # ||(total + x)/count - target||^2 less what no x changes, times count^2.
        cost = squares + 2 * (new @ (total - count * target))
        best = int(cost.where(free, torch.inf).argmin())
        chosen.append(best)
        free[best] = False
        total = total + new[best]
    return torch.tensor(chosen, dtype=torch.int64)


def relaxed(new: Tensor, k: int, target: Tensor, held: Tensor) -> Tensor:
    """Indices [k] of the largest a_i in [0, 1] that bring (sum_held x + sum_i a_i x_i) / (m + k) nearest to the target.

    By projected gradient from 0, near the 1/n of Algorithm 2; of equal a_i the first. Equal weights solve the problem
    of a class that is new, so where it ends depends on where it starts.
    """
    X, count = new.double(), len(held) + min(k, len(new))
    wanted = count * target.double() - held.double().sum(0)
    gram, slope = X @ X.T, X @ wanted
    a = X.new_zeros(len(X))
    step = 1 / max(float(torch.linalg.matrix_norm(gram, 2)), 1e-12)
    for _ in range(RELAXED_STEPS):
        a = (a - step * (gram @ a - slope)).clamp(0, 1)
    return a.sort(descending=True, stable=True).indices[: min(k, len(X))].cpu()


def mix_styles(content: Tensor, style: Tensor, share: float) -> Tensor:
    """MixStyle (eq. 6) of images [m, C, H, W] in uint8: each channel's mean and deviation is moved towards another's.

    share, the paper's lambda: of the content's own statistics; at 1 the images stay as they are.
    """
    x, y = content.float(), style.float()
    mean_x, mean_y = (z.mean((2, 3), keepdim=True) for z in (x, y))
    std_x, std_y = (z.var((2, 3), keepdim=True, correction=0).sqrt() for z in (x, y))
    scale = (share * std_x + (1 - share) * std_y) / std_x.clamp(min=1e-6)
    mixed = (x - mean_x) * scale + share * mean_x + (1 - share) * mean_y
    return mixed.round().clamp(0, 255).to(content.dtype)
