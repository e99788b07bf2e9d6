"""Causal effects of old data (DDE: Hu et al. 2021): answers that neighbours share, and a head without its direction."""

import torch
from torch import Tensor
from torch.nn.functional import normalize

SAME = 1e-5  # of 1 - cosine: the sample itself, or a copy of it


def find_neighbours(features: Tensor, others: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Return places [B, k] of the nearest of others [n, F] by cosine, and which of them count [B, k].

    The sample itself does not count; k is count, or as many as there are.
    """
    similarities = normalize(features) @ normalize(others).T
    similarities = similarities.masked_fill(similarities > 1 - SAME, -torch.inf)
    values, places = similarities.topk(min(count, len(others)), dim=1)
    return places, values > -torch.inf


def shared_cross_entropy(probabilities: Tensor, of_neighbours: Tensor, counts: Tensor, labels: Tensor) -> Tensor:
    """Return the mean of -log[(p(x) + mean_k p(x_k)) / 2]_y (eq. 8), from [B, C] and [B, k, C], where `counts` [B, k].

    A sample without neighbours has its own answer alone.
    """
    number = counts.sum(1)[:, None]
    mean = (of_neighbours * counts[..., None]).sum(1) / number.clamp(min=1)
    shared = torch.where(number > 0, (probabilities + mean) / 2, probabilities)
    return -shared.gather(1, labels[:, None])[:, 0].clamp(min=torch.finfo(shared.dtype).tiny).log().mean()


def remove_direction(weight: Tensor, direction: Tensor, share: float) -> Tensor:
    """Return weights W - share (W d) d^T [C, F] for the unit vector d of a direction [F].

    Their logits are z - share cos(x, d) ||x|| W d (eq. 10): of features without a share of what lies along it.
    """
    unit = normalize(direction, dim=0).to(weight)
    return weight - share * torch.outer(weight @ unit, unit)
