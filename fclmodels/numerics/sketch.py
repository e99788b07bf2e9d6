"""Gaussian sketches of layer inputs: what a client sends instead of its inputs (FOT eq. 9, FedProTIP eq. 40).

A sketch X* G of width s has independent columns N(0, X* X*^T), and so do sums of sketches over clients. Drawn from
X X^T it is the same in law, at a cost that does not grow with the number of columns.
"""

import torch
from torch import Tensor

from fclmodels.numerics.gram import lower_times_
from fclmodels.numerics.products import product
from fclmodels.numerics.subspace import residual

# The Gram matrix of dependent columns is only semidefinite, and but for rounding: as much is added to its diagonal,
# in shares of the mean, as lets Cholesky succeed.
JITTERS = (1e-10, 1e-7, 1e-6, 1e-5, 1e-4, 1e-3)
PART = 1024


def gaussian_sketch(X: Tensor, width: int, generator: torch.Generator) -> Tensor:
    """X G [d, width] for columns X [d, n]; G has independent standard normal entries."""
    return product(X, _normal(X.shape[1], width, generator, X))


def gaussian_sketch_of_gram(gram: Tensor, basis: Tensor, width: int, generator: torch.Generator) -> Tensor:
    """P F Z [d, width] with P = I - O O^T and F F^T = X X^T [d, d] (+ jitter): in law the sketch of X* = P X."""
    F = _factor(gram).to(basis.dtype)
    drawn = lower_times_(F, _normal(len(gram), width, generator, basis))
    # In parts, since a sketch may be the largest matrix of all.
    for part in drawn.split(PART, dim=1):
        part.copy_(residual(part, basis))
    return drawn


def _factor(gram: Tensor) -> Tensor:
    """The lower triangular F with F F^T = gram + jitter."""
    level = gram.diagonal().mean()
    if level == 0:
        return torch.zeros_like(gram)
    for jitter in JITTERS:
        raised = gram.clone()
        raised.diagonal().add_(jitter * level)
        F, failed = torch.linalg.cholesky_ex(raised)
        if not failed:
            return F
    raise ValueError("a Gram matrix that is far from semidefinite, or not finite")


def _normal(rows: int, columns: int, generator: torch.Generator, like: Tensor) -> Tensor:
    drawn = torch.randn(rows, columns, generator=generator, dtype=like.dtype, device=generator.device)
    return drawn.to(like.device)
