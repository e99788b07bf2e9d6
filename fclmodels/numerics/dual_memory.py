"""DualGPM (Liang and Li 2023; InfLoRA): the span of a layer's inputs of earlier tasks, or of what they leave free.

While the span takes at most half of the dimensions a basis M of it is stored (what is new lies in I - M M^T), beyond
that a basis of its complement (what is new lies in M M^T): never more than d/2 columns. H = sum x x^T [d, d] of a
layer's inputs x stands for them, as in InfLoRA's release: energies are squares of H's singular values, fourth powers of
those of the inputs.
"""

from typing import NamedTuple

import torch
from torch import Tensor

ROUNDING = 1e-6  # of the largest singular value: directions below have no energy


class DualMemory(NamedTuple):
    """Orthonormal columns M [d, k], and whether they span what is free (or else what is taken)."""

    basis: Tensor
    spans_free: bool

    def find_free(self, H: Tensor) -> Tensor:
        """Return the part of H [d, d] that lies in free directions."""
        along = self.basis @ (self.basis.T @ H)
        return along if self.spans_free else H - along


def design_factor(H: Tensor, memory: DualMemory | None, rank: int) -> Tensor:
    """Return A [r, d]: the leading left singular vectors of H's part in free directions, over sqrt(3).

    Directions without energy there get rows of zeros, so that nothing is learned along what is taken.
    """
    U, sigma, _ = torch.linalg.svd(H if memory is None else memory.find_free(H))
    live = (sigma > ROUNDING * torch.linalg.matrix_norm(H, 2)).to(U)
    A = (U * live)[:, :rank].T / 3**0.5
    return torch.cat([A, A.new_zeros(rank - len(A), A.shape[1])])


def extend_memory(H: Tensor, memory: DualMemory | None, threshold: float) -> DualMemory:
    """Return the memory with so many more directions of H that `threshold` of its energy is taken.

    For the first task those whose cumulative shares lie strictly below the threshold, at least one; later GPM's rule.
    """
    total = torch.linalg.svdvals(H).square().sum()
    if memory is None:
        U, sigma, _ = torch.linalg.svd(H)
        below = int((sigma.square().cumsum(0) / total < threshold).sum())
        return _choose_form(DualMemory(U[:, : max(1, below)], False))
    U, sigma, _ = torch.linalg.svd(memory.find_free(H))
    shares = sigma.square() / total
    # The free share before each direction is taken, the strongest first.
    free = shares.sum() - torch.cat([shares.new_zeros(1), shares.cumsum(0)[:-1]])
    missing = free >= 1 - threshold if memory.spans_free else 1 - free < threshold
    count = int(missing.int().cumprod(0).sum())
    if count == 0:
        return memory
    if not memory.spans_free:
        return _choose_form(DualMemory(torch.cat([memory.basis, U[:, :count]], dim=1)[:, : len(H)], False))
    rest = memory.basis - U[:, :count] @ (U[:, :count].T @ memory.basis)
    left = max(memory.basis.shape[1] - count, 0)
    return DualMemory(torch.linalg.svd(rest, full_matrices=False).U[:, :left], True)


def _choose_form(memory: DualMemory) -> DualMemory:
    """Return the memory, of a span beyond half of the dimensions its complement."""
    d, k = memory.basis.shape
    if 2 * k <= d:
        return memory
    U = torch.linalg.svd(memory.basis, full_matrices=True).U
    return DualMemory(U[:, k:], True)
