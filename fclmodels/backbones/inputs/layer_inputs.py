"""A layer's input over some samples, summed up batch by batch into all that a subspace is computed from."""

from dataclasses import dataclass

import torch
from torch import Tensor

from fclmodels.numerics.products import STEP, add_gram, gram_of, mirror, pad_columns, product
from fclmodels.numerics.sketch import gaussian_sketch, gaussian_sketch_of_gram
from fclmodels.numerics.subspace import WIDE, limit_columns, principal, principal_of_gram, residual

# Columns are folded in by so many, or d where that is more.
LUMP = 1024
# Of float32 inputs in a span, rounding leaves directions up to 3e-7 of ||X|| outside it in columns, and up to 2.5e-4 in
# Gram matrices (measured, d from 9 to 2304): directions below these bounds are rounding.
ROUNDING_OF_COLUMNS, ROUNDING_OF_GRAM = 1e-6, 5e-4


@dataclass
class LayerInputs:
    """A layer's input X over some samples: its columns [d, n] while they are few, else their Gram matrix X X^T.

    Of a wide layer, whose Gram matrix would be too large, fewer columns with nearly the same Gram matrix: again and
    again those seen so far are replaced by their leading directions, each of its length, and the rest is `lost` energy.

    count: n, columns that are observed; total: columns that there are, to which energies and sketches are scaled.
    column_limit: up to so many columns are few, whatever d is. Few ones are padded with columns of zeros to a multiple
    of STEP (products.py).
    """

    width: int
    count: int
    total: int
    column_limit: int = 0
    columns: Tensor | None = None
    gram: Tensor | None = None
    lost: float = 0.0
    _lump: Tensor | None = None
    _filled: int = 0
    _last_residual: tuple[Tensor, Tensor] | None = None

    @property
    def has_few_columns(self) -> bool:
        if self.width > WIDE:
            return self.count == limit_columns(self.count, self.width)
        return self.count < 2 * self.width or self.count <= self.column_limit

    def add(self, X: Tensor) -> None:
        """Add further columns [d, m]."""
        if self._lump is None:
            many = 2 * limit_columns(self.count, self.width) if self.width > WIDE else max(LUMP, self.width)
            length = self.count if self.has_few_columns else many
            self._lump = X.new_zeros(self.width, -(-length // STEP) * STEP)
        while X.shape[1]:
            part, X = X.tensor_split([self._lump.shape[1] - self._filled], dim=1)
            self._lump[:, self._filled : self._filled + part.shape[1]] = part
            self._filled += part.shape[1]
            if not self.has_few_columns and self._filled == self._lump.shape[1]:
                self._fold()

    def finish(self) -> "LayerInputs":
        """Add what is not added yet; return this object."""
        assert self._lump is not None
        if self.has_few_columns:
            self.columns = self._lump
        else:
            self._lump[:, self._filled :] = 0
            self._fold()
            if self.gram is not None:
                mirror(self.gram)
            else:
                self.columns = self._lump[:, : self._filled].contiguous()
        self._lump = None
        return self

    def _fold(self) -> None:
        """Add the collected columns to the Gram matrix, or where the layer is wide replace them by fewer ones."""
        assert self._lump is not None
        if self.width > WIDE:
            self._filled = limit_columns(self.count, self.width)
            V, sigma = principal_of_gram(gram_of(self._lump.T))
            self._lump[:, : self._filled] = product(self._lump, V[:, : self._filled].contiguous())
            self.lost += float(sigma[self._filled :].square().sum(dtype=torch.float64))
        else:
            if self.gram is None:
                self.gram = self._lump.new_zeros(self.width, self.width, dtype=torch.float64)
            add_gram(self.gram, self._lump)
            self._filled = 0

    def measure_energy(self, basis: Tensor | None = None) -> float:
        """Return ||X||^2, or with a basis ||X*||^2, in double precision."""
        if self.columns is not None:
            X = self.columns if basis is None else self._remove_protected(basis)
            energy = float(X.square().sum(dim=0, dtype=torch.float64).sum()) + self.lost
        else:
            assert self.gram is not None
            energy = float(self.gram.trace())
            if basis is not None:
                padded = pad_columns(basis)
                energy -= float((padded * product(self.gram.to(basis.dtype), padded)).sum(dtype=torch.float64))
        return max(energy, 0.0) * self.total / self.count

    def draw_sketch(self, basis: Tensor, width: int, generator: torch.Generator) -> Tensor:
        """Draw a Gaussian sketch [d, width] of X* (FOT eq. 9), from the columns or the Gram matrix."""
        if self.columns is not None:
            sketch = gaussian_sketch(self._remove_protected(basis), width, generator)
        else:
            assert self.gram is not None
            sketch = gaussian_sketch_of_gram(self.gram, basis, width, generator)
        return sketch.mul_((self.total / self.count) ** 0.5)

    def decompose_principal(self, basis: Tensor) -> tuple[Tensor, Tensor]:
        """Return left singular vectors and values of X*'s observed columns (FedProTIP eq. 7), those of rounding 0."""
        if self.columns is not None:
            # There are no more directions than columns.
            U, sigma = (part[..., : self.count] for part in principal(self._remove_protected(basis)))
            least = ROUNDING_OF_COLUMNS
        else:
            assert self.gram is not None
            exact = basis.double()
            outside = residual(residual(self.gram, exact).T, exact)  # P X X^T P
            U, sigma = (part.to(basis.dtype) for part in principal_of_gram(outside))
            least = ROUNDING_OF_GRAM
        length = (self.measure_energy() * self.count / self.total) ** 0.5
        return U, sigma.where(sigma > least * length, 0.0)

    def _remove_protected(self, basis: Tensor) -> Tensor:
        """Return X* of the columns; the last one is stored, since energy, sketch and spectrum need the same."""
        assert self.columns is not None
        if self._last_residual is None or self._last_residual[0] is not basis:
            self._last_residual = (basis, residual(self.columns, basis))
        return self._last_residual[1]
