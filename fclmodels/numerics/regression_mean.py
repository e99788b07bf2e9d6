"""RegMean (Jin et al. 2023): the linear map whose outputs are nearest to those of several maps, each on its own inputs.

W minimises sum_k sum_x ||W x - W_k x||^2: W = (sum_k W_k G_k) (sum_k G_k)^+ with G_k = sum x x^T [d, d]. A G_k of which
the diagonal alone is given, [d], stands for a diagonal matrix. All in double precision.
"""

import torch
from torch import Tensor

# Of the largest eigenvalue: far below lies the fixed point of masked sums (some 1e-9 a number), and the rounding of
# float32, in directions that no input has, such as (1, .., 1) after a layer norm.
LEAST = 1e-6


def damp(gram: Tensor, share: float) -> Tensor:
    """Return G with its off-diagonal numbers times a share; for a share of 0 the diagonal [d]."""
    if gram.ndim == 1 or share == 0:
        return gram if gram.ndim == 1 else gram.diagonal().clone()
    return share * gram + (1 - share) * torch.diag(gram.diagonal())


def multiply(weight: Tensor, gram: Tensor) -> Tensor:
    """Return W G, for G [d, d] or its diagonal [d]."""
    return weight.double() * gram if gram.ndim == 1 else weight.double() @ gram


def solve(products: Tensor, gram: Tensor) -> Tensor:
    """Return P G^+, for G [d, d] or its diagonal [d]: 0 along directions that hardly an input has, by LEAST."""
    if gram.ndim == 1:
        return products * torch.where(gram > LEAST * gram.max(), 1 / gram, torch.zeros_like(gram))
    return products @ torch.linalg.pinv(gram, rtol=LEAST, hermitian=True)


def sandwich(A: Tensor, gram: Tensor) -> Tensor:
    """Return A G A^T [r, r]."""
    return multiply(A, gram) @ A.double().T
