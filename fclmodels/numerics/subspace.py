"""Subspaces of layer inputs: residuals, bases that grow, ranks, projection.

A layer's input is seen as columns X [d, n]; a basis O [d, r] has orthonormal columns. A weight acts from the left,
so a step [out, d] leaves W x unchanged for x in span(O) where step O = 0 (GPM; FOT eq. 4; FedProTIP eq. 4).
"""

from collections.abc import Mapping

import torch
from torch import Tensor

from fclmodels.numerics.products import gram_of, pad_columns, product

# Directions no longer than this share of the longest are rounding outside a span. In float32 the smaller
# singular vectors that clients send are blurred by more than their own precision.
NUMERICAL_RANK = {torch.float32: 1e-4, torch.float64: 1e-5}
# A Gram matrix in float32 blurs singular values below this share of the largest; while all of them are at most this
# share of the sum, that moves the sum by less than 5e-4 and a rank by at most 1 (measured on trained networks).
BLURRED, BLURRED_MASS = 1e-3, 1e-2
# Up to this width a layer's matrices may be d x d (ResNet-18's widest layer has 4608 inputs); of wider layers no basis
# and no sketch has more numbers than LARGEST, so that memory stays the same whatever the width.
WIDE, LARGEST = 5000, 3 * 2**22
PART = 2**22  # numbers of a matrix that are worked on at once


def limit_columns(columns: int, d: int) -> int:
    """Return how many of these columns a matrix of a layer of width d may have: all, or fewer of a wide layer."""
    return columns if d <= WIDE else min(columns, max(1, LARGEST // d))


def residual(X: Tensor, basis: Tensor) -> Tensor:
    """Return X* = X - O O^T X, the part of columns [d, n] outside the span (FOT eq. 8, FedProTIP eq. 6)."""
    basis = pad_columns(basis)
    rest = torch.empty_like(X)
    # In parts, since beside a large matrix there may be no room for another one.
    parts = max(1, PART // len(X))
    for part, columns in zip(rest.split(parts, dim=1), X.split(parts, dim=1), strict=True):
        torch.sub(columns, product(basis, product(basis.T, columns)), out=part)
    return rest


def project(step: Tensor, basis: Tensor) -> Tensor:
    """Return a step [out, d] without its part on the span: step - (step O) O^T (FOT eq. 6, FedProTIP eq. 4)."""
    return step - product(product(step, basis), basis.T)


def complement(basis: Tensor) -> Tensor:
    """Return an orthonormal basis [d, d - r] of the span's orthogonal complement."""
    d, r = basis.shape
    # Q of the complete QR, of which only the last columns are formed.
    reflectors, scales = torch.geqrf(basis.double())
    last = torch.eye(d, dtype=torch.float64, device=basis.device)[:, r:]
    return torch.ormqr(reflectors, scales, last).to(basis.dtype).contiguous()


def extend(basis: Tensor, directions: Tensor) -> Tensor:
    """Append to a basis [d, r] an orthonormal basis of what directions [d, k] add to its span.

    Its own columns stay bit for bit, so columns r.. are those that a task added. Where the layer has no room for all,
    the longest directions come first.
    """
    old = basis.double()
    room = limit_columns(basis.shape[0], basis.shape[0]) - basis.shape[1]
    longest = directions.double().norm(dim=0).max() if directions.numel() else old.new_zeros(())
    if room == 0 or longest == 0:
        return basis
    U, sigma = principal(residual(directions.double(), old))
    count = min(int((sigma > NUMERICAL_RANK[directions.dtype] * longest).sum()), room)
    # Twice is enough: the second pass removes the first one's rounding within the basis.
    fresh = torch.linalg.qr(residual(U[:, :count], old)).Q
    return torch.cat([basis, fresh.to(basis.dtype)], dim=1)


def union(bases: Mapping[str, Tensor], directions: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Extend each layer's basis by what a client's directions add to its span (FedProTIP eq. 9).

    One client after another gives the sum of all spans (Proposition 1), in any order.
    """
    return {name: extend(basis, directions[name]) if name in directions else basis for name, basis in bases.items()}


def principal(X: Tensor) -> tuple[Tensor, Tensor]:
    """Return left singular vectors [d, k] and singular values [k] of X [d, n], k = min(d, n), the largest first.

    By the smaller Gram matrix, several times cheaper than an SVD. Squaring blurs what is small: in float32, where
    values below a thousandth of the largest matter, it is done again in double precision.
    """
    U, sigma = _principal(X)
    blurred = sigma[sigma < BLURRED * sigma.max()] if len(sigma) else sigma
    if X.dtype == torch.float64 or blurred.sum() <= BLURRED_MASS * sigma.sum():
        return U, sigma
    U, sigma = _principal(X.double())
    return U.to(X.dtype), sigma.to(X.dtype)


def principal_of_gram(gram: Tensor) -> tuple[Tensor, Tensor]:
    """Return left singular vectors and values of X from X X^T [d, d]."""
    try:
        squares, U = torch.linalg.eigh(gram)
    except torch.linalg.LinAlgError:
        # For a low rank LAPACK's solver may fail in single precision and succeed in double.
        if gram.dtype == torch.float64:
            raise
        squares, U = (part.to(gram.dtype) for part in torch.linalg.eigh(gram.double()))
    return U.flip(1), squares.flip(0).clamp(min=0).sqrt()


def _principal(X: Tensor) -> tuple[Tensor, Tensor]:
    """Return them by X X^T = U Sigma^2 U^T or X^T X = V Sigma^2 V^T; values are lengths of U^T X or X V, not Sigma."""
    scale = X.abs().max() if X.numel() else X.new_zeros(())
    if scale == 0:
        rank = min(X.shape)
        return torch.eye(len(X), rank, dtype=X.dtype, device=X.device), X.new_zeros(rank)
    X = X / scale
    if X.shape[0] <= X.shape[1]:
        U, _ = principal_of_gram(gram_of(X))
        sigma = product(U.T, X).norm(dim=1)
    else:
        V, _ = principal_of_gram(gram_of(X.T))
        U = product(X, V)
        sigma = U.norm(dim=0)
        U /= sigma.clamp(min=torch.finfo(X.dtype).tiny)
    # Lengths are more exact than the roots that the order comes from.
    sigma, order = sigma.sort(descending=True, stable=True)
    return U[:, order], sigma * scale


def rank_by_mass(sigma: Tensor, share: float) -> int:
    """Return the smallest rank that keeps this share of the residual's singular-value mass (FedProTIP eq. 8)."""
    return find_smallest_rank(sigma.double().cumsum(0), share * float(sigma.double().sum()))


def rank_by_energy(sigma: Tensor, q: float, threshold: float) -> int:
    """Return the smallest r >= 0 with (1 - q) + q * sum_{i<=r} sigma_i^2 / sum sigma^2 >= threshold (GPM; FOT eq. 12).

    sigma: singular values of the residual X*; q = ||X*||^2 / ||X||^2, so 1 - q is covered already.
    """
    energy = sigma.double().square()
    return find_smallest_rank(energy.cumsum(0), (threshold - (1 - q)) / q * float(energy.sum()) if q > 0 else 0.0)


def rank_as_released(sigma: Tensor, ratio: float, threshold: float) -> int:
    """Return the rank by FOT's released code: at least one vector, and energy compared with a ratio of norms.

    ratio = ||X*|| / ||X||; the smallest r >= 1 with
    sum_{i<=r} sigma_i^2 / sum sigma^2 > (ratio - (1 - threshold)) / ratio.
    """
    energy = sigma.double().square()
    if ratio == 0 or energy.sum() == 0:
        return 0
    target = (ratio - (1 - threshold)) / ratio * energy.sum()
    return min(int((energy.cumsum(0) <= target).sum()) + 1, len(sigma))


def rank_as_printed(sigma: Tensor, ratio: float, threshold: float) -> int:
    """Return the smallest r >= 0 with sqrt(sum_{i<=r} sigma_i^2 / sum sigma^2) + (1 - ratio) > threshold (FOT eq. 12).

    ratio = ||X*|| / ||X||. Norms are added as printed, though squares add up. As printed the second term is the ratio
    itself, which its text calls the part already covered: in a first task it is 1, and no vector would ever be added.
    """
    energy = sigma.double().square()
    least = max(threshold - (1 - ratio), 0.0) ** 2 * float(energy.sum())
    return find_smallest_rank(energy.cumsum(0), least)


def used_share(basis: Tensor) -> float:
    """Return the share r / d of a layer's space that a basis uses (FOT Table 3)."""
    return basis.shape[1] / basis.shape[0]


def find_smallest_rank(cumulative: Tensor, target: float) -> int:
    """Return the smallest r >= 0 whose first r terms sum to at least `target`, up to rounding."""
    if target <= 0 or not len(cumulative) or not cumulative[-1]:
        return 0
    reached = cumulative >= target * (1 - 1e-12)
    return int(reached.int().argmax()) + 1 if reached.any() else len(cumulative)
