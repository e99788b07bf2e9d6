"""Means that some wrong vectors cannot move far: clipped, coordinate-wise median and trimmed mean, Krum, multi-Krum.

Of n vectors x_i up to f = ceil(bad n) may be anything. Coordinate by coordinate the median, or the mean without the f
smallest and the f largest (Yin et al. 2018, Definitions 1 and 2). Krum takes the vector with the least score, the sum
of its squared distances to its n - f - 2 nearest others, which needs n > 2 f + 2; multi-Krum the mean of the n - f
vectors with the least scores (Blanchard et al. 2017, section 4). Clipped: the weighted mean of vectors no longer than
`clip` times their median length (Sun et al. 2019, with the bound that the round gives). The others weigh all alike.

Vectors are spread over named tensors and come as w_i x_i, with scales 1/w_i. All but the coordinate-wise two need their
Gram matrix only, and pass through memory in chunks.
"""

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Literal

import torch
from torch import Tensor

from fclmodels.errors import UserError
from fclmodels.numerics.alignment import NUMBERS, Named, aligned

Aggregation = Literal["mean", "clipped", "median", "trimmed-mean", "krum", "multi-krum"]


def robust_mean(
    kind: Aggregation, bad: float, clip: float, vectors: Sequence[Named], scales: Tensor, weights: Tensor
) -> dict[str, Tensor]:
    """The mean of x_i = scales_i vectors_i by a rule; `weights` are for the clipped one alone."""
    n = len(vectors)
    f = math.ceil(bad * n - 1e-9)
    if kind in ("median", "trimmed-mean"):
        cut = (n - 1) // 2 if kind == "median" else f
        if 2 * cut >= n:
            raise UserError(f"federation.robust.bad: {f} of {n} replies cut at both ends leave none. Lower it.")
        return coordinatewise(vectors, scales, cut)
    if kind == "clipped":
        share: Callable[[Tensor], Tensor] = partial(clipped_shares, weights=weights, clip=clip)
    else:
        if f and n <= 2 * f + 2:
            raise UserError(
                f"federation.robust.bad: {kind} needs more than {2 * f + 2} replies for {f} bad ones, not {n}."
            )
        share = partial(krum_shares, f=f, taken=1 if kind == "krum" else n - f)
    return aligned(vectors, [list(vectors[0])], lambda G: scales * share(scales[:, None] * G * scales))


def coordinatewise(vectors: Sequence[Named], scales: Tensor, cut: int) -> dict[str, Tensor]:
    """The mean without the `cut` smallest and largest of each coordinate; with all but one or two cut, the median."""
    width = max(1, NUMBERS // len(vectors))
    found = {}
    for name, like in vectors[0].items():
        pieces = zip(*(vector[name].flatten().split(width) for vector in vectors), strict=True)
        columns = scales.to(like.dtype)[:, None]
        kept = [(torch.stack(piece) * columns).sort(dim=0).values[cut : len(vectors) - cut] for piece in pieces]
        found[name] = torch.cat([piece.mean(0) for piece in kept]).view_as(like) if kept else like.clone()
    return found


def krum_shares(G: Tensor, f: int, taken: int) -> Tensor:
    """1/taken for the vectors with the least scores, from the Gram matrix; of equal scores the first."""
    n = len(G)
    squares = G.diagonal()
    distances = (squares[:, None] + squares - 2 * G).clamp(min=0).fill_diagonal_(0).sort(dim=1).values
    scores = distances[:, 1 : 1 + max(1, n - f - 2)].sum(1)
    shares = torch.zeros(n, dtype=G.dtype)
    shares[scores.sort(stable=True).indices[:taken]] = 1 / taken
    return shares


def clipped_shares(G: Tensor, weights: Tensor, clip: float) -> Tensor:
    lengths = G.diagonal().clamp(min=0).sqrt()
    bound = clip * lengths.sort().values[(len(G) - 1) // 2]
    return weights / weights.sum() * (bound / lengths).nan_to_num(1.0).clamp(max=1)
