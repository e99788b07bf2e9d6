"""A classifier of several cosine proxies a class, and its loss (PODNet: Douillard et al. 2020, section 3.3).

The score of a class is the mean of its proxies' similarities, weighed by their softmax. NCA pushes the score of the
label above all others by a margin.
"""

from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn.functional import normalize

MARGIN = 0.6  # delta
Nca = Literal["paper", "release"]


class CosineProxies(nn.Module):
    """Scores [B, C] of features [B, F]: proxies theta [C, K, F], and a scale eta that the loss multiplies scores by."""

    def __init__(self, classes: int, proxies: int, features: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(classes, proxies, features))
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, features: Tensor, frozen: int = 0, classes: int | None = None) -> Tensor:
        """Return the scores of the first so many classes, of which the proxies of the first `frozen` do not train."""
        weight = torch.cat([self.weight[:frozen].detach(), self.weight[frozen:classes]])
        return pool_similarities(torch.einsum("bf,ckf->bck", normalize(features), normalize(weight, dim=2)))


def pool_similarities(similarities: Tensor) -> Tensor:
    """Return sum_k softmax_k(s) s [B, C] of similarities s [B, C, K] (eq. 5)."""
    return (similarities.softmax(2) * similarities).sum(2)


def nca_loss(scores: Tensor, labels: Tensor, scale: Tensor, kind: Nca = "paper") -> Tensor:
    """Return the mean over samples of [-log(exp(eta (z_y - delta)) / sum_{i != y} exp(eta z_i))]_+ (eq. 6).

    release: the margin comes off all scores, the label's place counts as the largest of them, and there is no hinge.
    """
    mine = torch.zeros_like(scores, dtype=torch.bool).scatter(1, labels[:, None], True)
    scaled = scale * scores
    if kind == "release":
        others = scaled.where(~mine, scaled.amax(1, keepdim=True))
        return (others.logsumexp(1) - scaled[mine]).mean()
    others = scaled.masked_fill(mine, -torch.inf)
    return (others.logsumexp(1) - scaled[mine] + scale * MARGIN).relu().mean()


def draw_proxies(means: Tensor, variances: Tensor, proxies: int, generator: torch.Generator) -> Tensor:
    """Draw proxies [C, K, F] of length 1 from normal classes of means and variances [C, F]."""
    noise = torch.randn(len(means), proxies, means.shape[1], generator=generator, dtype=means.dtype)
    return normalize(means[:, None] + noise * variances.sqrt()[:, None], dim=2).float()
