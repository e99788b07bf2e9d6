"""Gradient alignment GA(g), STAMP eq. 2 (FedOMG; Liu et al. 2021, CAGrad), from the vectors' Gram matrix alone.

Vectors g_1 .. g_n of P numbers are the rows of V [n, P], G = V V^T [n, n], and their mean is V^T 1/n. Then

    GA(g) = mean + kappa ||mean|| / ||V^T p|| V^T p,
    p = argmin over the simplex of f(p) = p^T G 1/n + kappa ||mean|| sqrt(p^T G p),

so GA(g) = V^T w with w = 1/n + kappa ||mean|| / sqrt(p^T G p) p: all but the last product needs G only. GA(g) points
nowhere against a vector only where kappa >= 1; for less it is a compromise. For equal vectors it is (1 + kappa) times
one of them: hence `rescale`.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from fclmodels.numerics.products import add_gram, mirror, pad_columns

Rescale = Literal["none", "1/(1+kappa)", "1/(1+kappa^2)"]
Named = Mapping[str, Tensor]

# Columns of a chunk, and numbers in it: within one products are summed in float32, over chunks in double precision.
COLUMNS, NUMBERS = 2**16, 2**23

# The exact solver ends where the duality gap, an upper bound of f(p) - min f, is this share of the scale of f.
GAP, ITERATIONS = 1e-9, 5_000


def align(
    vectors: Sequence[Named], groups: Iterable[Sequence[str]], weigh: Callable[[Tensor], Tensor]
) -> dict[str, Tensor]:
    """Return GA of vectors that are spread over named tensors, one problem for each group of names.

    weigh: from a Gram matrix [n, n] to the weights [n] of the vectors.
    """
    result: dict[str, Tensor] = {}
    for names in groups:
        weights = weigh(gram(iterate_columns(vectors, names)).cpu()).tolist()
        result |= {name: combine([vector[name] for vector in vectors], weights) for name in names}
    return result


def iterate_columns(vectors: Sequence[Named], names: Iterable[str]) -> Iterator[Tensor]:
    """Yield V in column chunks [n, c]; the tensors may be memory-mapped files."""
    width = min(COLUMNS, max(1, NUMBERS // len(vectors)))
    for name in names:
        for chunk in zip(*(vector[name].flatten().split(width) for vector in vectors), strict=True):
            yield torch.stack(chunk)


def combine(tensors: Sequence[Tensor], weights: Sequence[float]) -> Tensor:
    """Return the weighted sum of tensors, computed in chunks that fit the cache."""
    total = torch.empty_like(tensors[0], memory_format=torch.contiguous_format)
    pieces = (tensor.flatten().split(COLUMNS) for tensor in tensors)
    for chunk, first, *others in zip(total.view(-1).split(COLUMNS), *pieces, strict=True):
        torch.mul(first, weights[0], out=chunk)
        for piece, weight in zip(others, weights[1:], strict=True):
            chunk.add_(piece, alpha=weight)
    return total


def gram(chunks: Iterable[Tensor]) -> Tensor:
    """Return V V^T [n, n] in double precision, from column chunks [n, c] of V.

    A single float32 product over 11 million columns is wrong by up to 2e-3; sums of chunks' products are not.
    """
    total: Tensor | None = None
    for chunk in chunks:
        total = chunk.new_zeros(len(chunk), len(chunk), dtype=torch.float64) if total is None else total
        add_gram(total, pad_columns(chunk))
    assert total is not None
    mirror(total)
    return total


def equalise_norms(G: Tensor) -> Tensor:
    """Return factors [n] that bring all vectors to their mean norm; 0 where a vector is 0."""
    norms = G.diagonal().clamp(min=0).sqrt()
    return torch.where(norms > 0, norms.mean() / norms, 0.0)


def alignment(G: Tensor, p: Tensor, kappa: float, rescale: Rescale = "none") -> Tensor:
    """Return the weights w [n] of GA(g), for the minimiser p of f; where V^T p is 0, those of the mean."""
    weights = torch.full_like(p, 1 / len(G))
    square = float(p @ G @ p)
    if square > 0:
        weights = weights + kappa * (max(float(G.mean()), 0.0) / square) ** 0.5 * p
    return weights / {"none": 1.0, "1/(1+kappa)": 1 + kappa, "1/(1+kappa^2)": 1 + kappa**2}[rescale]


def objective(G: Tensor, p: Tensor, kappa: float) -> float:
    """Return f(p)."""
    return float(p @ G.mean(dim=1)) + kappa * float(G.mean().clamp(min=0) * (p @ G @ p).clamp(min=0)) ** 0.5


def solve_exactly(G: Tensor, kappa: float) -> Tensor:
    """Return the minimiser p [n] of f on the simplex, by accelerated projected gradient (Beck and Teboulle 2009).

    f is convex, so grad f(p) . p - min_i grad_i f(p) bounds how far f(p) is from its minimum, which ends the iteration.
    """
    scale = float(G.diagonal().mean())
    if scale <= 0:
        return torch.full((len(G),), 1 / len(G), dtype=torch.float64)
    A = G.double().numpy() / scale
    b, c = A.mean(axis=1), kappa * max(A.mean(), 0.0) ** 0.5

    def value(p: np.ndarray) -> tuple[float, np.ndarray]:
        Ap = A @ p
        length = max(p @ Ap, 1e-24) ** 0.5
        return b @ p + c * length, b + c / length * Ap

    p = y = np.full(len(A), 1 / len(A))
    best, least = p, np.inf
    step, momentum = 1.0, 1.0
    for _ in range(ITERATIONS):
        f_y, slope = value(y)
        while True:
            moved = _project_on_simplex(y - step * slope)
            f, slope_moved = value(moved)
            change = moved - y
            if f <= f_y + slope @ change + change @ change / (2 * step) + 1e-15 or step < 1e-12:
                break
            step /= 2
        if f < least:
            best, least = moved, f
        if slope_moved @ moved - slope_moved.min() <= GAP:
            break
        if (y - moved) @ (moved - p) > 0:  # uphill: restart the acceleration
            momentum = 1.0
        following = (1 + (1 + 4 * momentum**2) ** 0.5) / 2
        y = moved + (momentum - 1) / following * (moved - p)
        p, momentum, step = moved, following, step * 1.3
    return torch.from_numpy(best)


def solve_by_descent(
    G: Tensor, kappa: float, rounds: int, lr: float, momentum: float, step_size: int, decay: float = 0.5
) -> Tensor:
    """Return the best p of gradient descent with momentum on x from 0, p = softmax(x): the papers' solver.

    The learning rate falls by `decay` every step_size rounds, and the descent continues from the best x: at the papers'
    rate of 25 the softmax can saturate at a wrong corner with hardly any gradient. So it may end a little above the
    minimum after any number of steps. G is scaled to a mean norm of 1 first, so that the learning rate has a meaning.
    """
    root = G.diagonal().clamp(min=0).sqrt().mean()
    A = G.double() / root.square() if root > 0 else G.double()
    b, c = A.mean(dim=1), kappa * float(A.mean().clamp(min=0)) ** 0.5
    x = torch.zeros(len(A), dtype=torch.float64)
    best, least = x, float("inf")
    for round in range(rounds + 1):
        if round % step_size == 0:
            x, velocity = best, torch.zeros_like(x)
        p = torch.softmax(x, 0)
        Ap = A @ p
        length = (p @ Ap).clamp(min=1e-24).sqrt()
        f = float(b @ p + c * length)
        if f < least:
            best, least = x, f
        slope = b + c / length * Ap
        velocity = momentum * velocity + p * (slope - p @ slope)
        x = x - lr * decay ** (round // step_size) * velocity
    return torch.softmax(best, 0)


def _project_on_simplex(x: np.ndarray) -> np.ndarray:
    """Return the nearest point of the simplex (Duchi et al. 2008)."""
    falling = np.sort(x)[::-1]
    excess = (falling.cumsum() - 1) / np.arange(1, len(x) + 1)
    return np.maximum(x - excess[np.count_nonzero(falling > excess) - 1], 0.0)
