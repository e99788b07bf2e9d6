"""Subspaces of layer inputs: residuals, bases that grow, ranks, projection.

A layer's input is seen as columns X [d, n]; a basis O [d, r] has orthonormal columns. A weight acts from the left,
so a step [out, d] leaves W x unchanged for x in span(O) where step O = 0 (GPM; FOT eq. 4; FedProTIP eq. 4).
"""

from collections.abc import Mapping

import torch
from torch import Tensor

from fclmodels.numerics.gram import gram_of
from fclmodels.numerics.products import filled, product

# Of a direction no longer than this share of the longest, only rounding is left outside a span. In float32 the smaller
# singular vectors that clients send are blurred by more than their own precision.
NUMERICAL_RANK = {torch.float32: 1e-4, torch.float64: 1e-5}
# A Gram matrix in float32 blurs singular values below this share of the largest; while all of them are at most this
# share of the sum, that moves the sum by less than 5e-4 and a rank by at most 1 (measured on trained networks).
BLURRED, BLURRED_MASS = 1e-3, 1e-2


def residual(X: Tensor, basis: Tensor) -> Tensor:
    """X* = X - O O^T X: the part of columns [d, n] outside the span (FOT eq. 8, FedProTIP eq. 6)."""
    basis = filled(basis)
    return X - product(basis, product(basis.T, X))


def project(step: Tensor, basis: Tensor) -> Tensor:
    """A step [out, d] without what acts on the span: step - (step O) O^T (FOT eq. 6, FedProTIP eq. 4)."""
    return step - product(product(step, basis), basis.T)


def complement(basis: Tensor) -> Tensor:
    """An orthonormal basis [d, d - r] of all that is orthogonal to the span."""
    d, r = basis.shape
    # Q of the complete QR, of which only the last columns are formed.
    reflectors, scales = torch.geqrf(basis.double())
    last = torch.eye(d, dtype=torch.float64, device=basis.device)[:, r:]
    return torch.ormqr(reflectors, scales, last).to(basis.dtype).contiguous()


def extend(basis: Tensor, directions: Tensor) -> Tensor:
    """The basis [d, r] and after it an orthonormal basis of what directions [d, k] add to its span.

    Its own columns stay bit for bit, so columns r.. are what a task added. At most d columns in all.
    """
    known, given = basis.double(), directions.double()
    room = basis.shape[0] - basis.shape[1]
    longest = given.norm(dim=0).max() if given.numel() else given.new_zeros(())
    if room == 0 or longest == 0:
        return basis
    U, sigma = principal(residual(given, known))
    count = min(int((sigma > NUMERICAL_RANK[directions.dtype] * longest).sum()), room)
    # Twice is enough: the second pass removes what rounding left of the basis in the first one.
    fresh = torch.linalg.qr(residual(U[:, :count], known)).Q
    return torch.cat([basis, fresh.to(basis.dtype)], dim=1)


def union(bases: Mapping[str, Tensor], found: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Each layer's basis with what a client's directions add to its span (FedProTIP eq. 9).

    One client after another gives the sum of all spans (Proposition 1), in whatever order they come.
    """
    return {name: extend(basis, found[name]) if name in found else basis for name, basis in bases.items()}


def principal(X: Tensor) -> tuple[Tensor, Tensor]:
    """Left singular vectors [d, k] and singular values [k] of X [d, n], k = min(d, n), the largest first.

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
    """The same from X X^T [d, d]."""
    try:
        squares, U = torch.linalg.eigh(gram)
    except torch.linalg.LinAlgError:
        # Of a low rank, LAPACK's solver can fail in single precision where it does not in double.
        if gram.dtype == torch.float64:
            raise
        squares, U = (found.to(gram.dtype) for found in torch.linalg.eigh(gram.double()))
    return U.flip(1), squares.flip(0).clamp(min=0).sqrt()


def _principal(X: Tensor) -> tuple[Tensor, Tensor]:
    """By X X^T = U Sigma^2 U^T or X^T X = V Sigma^2 V^T; the values are the lengths of U^T X or X V, not Sigma."""
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


def residual_mass(sigma: Tensor, share: float) -> int:
    """The smallest rank that keeps this share of the residual's singular-value mass (FedProTIP eq. 8)."""
    return _smallest_reaching(sigma.double().cumsum(0), share * float(sigma.double().sum()))


def total_energy(sigma: Tensor, q: float, threshold: float) -> int:
    """The smallest r >= 0 with (1 - q) + q * sum_{i<=r} sigma_i^2 / sum sigma^2 >= threshold (GPM; FOT eq. 12).

    sigma: singular values of the residual X*; q = ||X*||^2 / ||X||^2, so 1 - q is covered already.
    """
    energy = sigma.double().square()
    return _smallest_reaching(energy.cumsum(0), (threshold - (1 - q)) / q * float(energy.sum()) if q > 0 else 0.0)


def release_rank(sigma: Tensor, ratio: float, threshold: float) -> int:
    """The rule of FOT's released code: at least one vector, and energy weighed against a ratio of norms.

    ratio = ||X*|| / ||X||; the smallest r >= 1 with
    sum_{i<=r} sigma_i^2 / sum sigma^2 > (ratio - (1 - threshold)) / ratio.
    """
    energy = sigma.double().square()
    if ratio == 0 or energy.sum() == 0:
        return 0
    wanted = (ratio - (1 - threshold)) / ratio * energy.sum()
    return min(int((energy.cumsum(0) <= wanted).sum()) + 1, len(sigma))


def used_share(basis: Tensor) -> float:
    """The share r / d of a layer's space that is taken (FOT Table 3)."""
    return basis.shape[1] / basis.shape[0]


def _smallest_reaching(cumulative: Tensor, wanted: float) -> int:
    """The smallest r >= 0 whose first r terms sum to at least `wanted`, but for rounding."""
    if wanted <= 0 or not len(cumulative):
        return 0
    reached = cumulative >= wanted * (1 - 1e-12)
    return int(reached.int().argmax()) + 1 if reached.any() else len(cumulative)
