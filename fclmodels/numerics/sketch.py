"""Gaussian sketches of layer inputs, which a client sends instead of the inputs (FOT eq. 9, FedProTIP eq. 40).

A sketch X* G of width s has independent columns N(0, X* X*^T), and so do sums of sketches over clients. Drawn from
X X^T it has the same law, at a cost that does not grow with the number of columns.
"""

import torch
from torch import Tensor

from fclmodels.numerics.products import multiply_lower_, product
from fclmodels.numerics.subspace import residual

# The Gram matrix of dependent columns is semidefinite up to rounding: the first of these shares of the mean diagonal is
# added to the diagonal that lets Cholesky succeed.
JITTERS = (1e-10, 1e-7, 1e-6, 1e-5, 1e-4, 1e-3)
PART = 1024


def gaussian_sketch(X: Tensor, width: int, generator: torch.Generator) -> Tensor:
    """Draw X G [d, width] for columns X [d, n]; G has independent standard normal entries."""
    return product(X, _draw_normal(X.shape[1], width, generator, X))


def gaussian_sketch_of_gram(gram: Tensor, basis: Tensor, width: int, generator: torch.Generator) -> Tensor:
    """Draw P F Z [d, width], P = I - O O^T, F F^T = X X^T [d, d] (+ jitter), which has the law of X* = P X's sketch."""
    F = _factorise(gram).to(basis.dtype)
    sketch = multiply_lower_(F, _draw_normal(len(gram), width, generator, basis))
    # In parts, since a sketch may be the largest matrix of all.
    for part in sketch.split(PART, dim=1):
        part.copy_(residual(part, basis))
    return sketch


def _factorise(gram: Tensor) -> Tensor:
    """Return the lower triangular F with F F^T = gram + jitter."""
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


def _draw_normal(rows: int, columns: int, generator: torch.Generator, like: Tensor) -> Tensor:
    values = torch.randn(rows, columns, generator=generator, dtype=like.dtype, device=generator.device)
    return values.to(like.device)
