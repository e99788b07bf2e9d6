"""Means that some wrong vectors cannot move far: clipped, coordinate-wise median and trimmed mean, Krum, multi-Krum.

Of n vectors x_i up to f = ceil(bad n) may be anything. Coordinate by coordinate the median, or the mean without the f
smallest and the f largest (Yin et al. 2018, Definitions 1 and 2). Krum takes the vector with the least score, the sum
of its squared distances to its n - f - 2 nearest others, which needs n > 2 f + 2; multi-Krum the mean of the n - f
vectors with the least scores (Blanchard et al. 2017, section 4). Clipped: the weighted mean of vectors no longer than
`clip` times their median length (Sun et al. 2019, with the bound that the round gives). The others weigh all
equally.

Vectors are spread over named tensors and come as w_i x_i, with scales 1/w_i. All but the two coordinate-wise means
need only their Gram matrix, and read them in chunks.
"""

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Literal

import torch
from torch import Tensor

from fclmodels.errors import UserError
from fclmodels.numerics.alignment import NUMBERS, Named, align

Aggregation = Literal["mean", "clipped", "median", "trimmed-mean", "krum", "multi-krum"]


def robust_mean(
    kind: Aggregation, bad: float, clip: float, vectors: Sequence[Named], scales: Tensor, weights: Tensor
) -> dict[str, Tensor]:
    """Return the mean of x_i = scales_i vectors_i by a rule; only the clipped mean uses `weights`."""
    n = len(vectors)
    f = math.ceil(bad * n - 1e-9)
    if kind in ("median", "trimmed-mean"):
        cut = (n - 1) // 2 if kind == "median" else f
        if 2 * cut >= n:
            raise UserError(f"federation.robust.bad: {f} of {n} replies cut at both ends leave none. Lower it.")
        return trim_coordinates(vectors, scales, cut)
    if kind == "clipped":
        share: Callable[[Tensor], Tensor] = partial(weigh_by_clipping, weights=weights, clip=clip)
    else:
        if f and n <= 2 * f + 2:
            raise UserError(
                f"federation.robust.bad: {kind} needs more than {2 * f + 2} replies for {f} bad ones, not {n}."
            )
        share = partial(weigh_by_krum, f=f, count=1 if kind == "krum" else n - f)
    return align(vectors, [list(vectors[0])], lambda G: scales * share(scales[:, None] * G * scales))


def trim_coordinates(vectors: Sequence[Named], scales: Tensor, cut: int) -> dict[str, Tensor]:
    """Return the mean without the `cut` smallest and largest of each coordinate; the median if one or two remain."""
    width = max(1, NUMBERS // len(vectors))
    means = {}
    for name, like in vectors[0].items():
        pieces = zip(*(vector[name].flatten().split(width) for vector in vectors), strict=True)
        columns = scales.to(like.dtype)[:, None]
        middles = [(torch.stack(piece) * columns).sort(dim=0).values[cut : len(vectors) - cut] for piece in pieces]
        means[name] = torch.cat([piece.mean(0) for piece in middles]).view_as(like) if middles else like.clone()
    return means


def weigh_by_krum(G: Tensor, f: int, count: int) -> Tensor:
    """Return shares [n] of 1/count for the vectors with the least scores, from G [n, n]; of equal scores the first."""
    n = len(G)
    squares = G.diagonal()
    distances = (squares[:, None] + squares - 2 * G).clamp(min=0).fill_diagonal_(0).sort(dim=1).values
    scores = distances[:, 1 : 1 + max(1, n - f - 2)].sum(1)
    shares = torch.zeros(n, dtype=G.dtype)
    shares[scores.sort(stable=True).indices[:count]] = 1 / count
    return shares


def weigh_by_clipping(G: Tensor, weights: Tensor, clip: float) -> Tensor:
    """Return shares [n] in a weighted mean of vectors clipped at `clip` times their median length."""
    lengths = G.diagonal().clamp(min=0).sqrt()
    bound = clip * lengths.sort().values[(len(G) - 1) // 2]
    return weights / weights.sum() * (bound / lengths).nan_to_num(1.0).clamp(max=1)
