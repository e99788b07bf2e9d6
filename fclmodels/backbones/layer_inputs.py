"""What a layer's input was over some samples: all that a subspace is found from, folded in batch by batch."""

from dataclasses import dataclass

import torch
from torch import Tensor

from fclmodels.numerics.gram import add_gram, mirror
from fclmodels.numerics.products import STEP, filled, product
from fclmodels.numerics.sketch import gaussian_sketch, gaussian_sketch_of_gram
from fclmodels.numerics.subspace import principal, principal_of_gram, residual

# Columns are folded in by so many, or d where that is more.
LUMP = 1024
# Of float32 inputs that lie in a span, rounding leaves directions up to 3e-7 of ||X|| in columns, and up to 2.5e-4
# in Gram matrices (measured, d from 9 to 2304): what is below this is no direction.
ROUNDING_OF_COLUMNS, ROUNDING_OF_GRAM = 1e-6, 5e-4


@dataclass
class LayerInputs:
    """A layer's input X over some samples: its columns [d, n] while they are few, else their Gram matrix X X^T.

    seen: n, how many columns are taken; total: how many there are, for which energies and sketches stand.
    kept: up to so many are few, whatever d is.
    Columns of zeros fill few ones up to a multiple of STEP (products.py).
    """

    width: int
    seen: int
    total: int
    kept: int = 0
    columns: Tensor | None = None
    gram: Tensor | None = None
    _lump: Tensor | None = None
    _filled: int = 0
    _outside: tuple[Tensor, Tensor] | None = None

    @property
    def few(self) -> bool:
        return self.seen < 2 * self.width or self.seen <= self.kept

    def add(self, X: Tensor) -> None:
        """Take in further columns [d, m]."""
        if self._lump is None:
            length = self.seen if self.few else max(LUMP, self.width)
            self._lump = X.new_zeros(self.width, -(-length // STEP) * STEP)
        while X.shape[1]:
            now, X = X.tensor_split([self._lump.shape[1] - self._filled], dim=1)
            self._lump[:, self._filled : self._filled + now.shape[1]] = now
            self._filled += now.shape[1]
            if not self.few and self._filled == self._lump.shape[1]:
                self._fold()

    def finish(self) -> "LayerInputs":
        assert self._lump is not None
        if self.few:
            self.columns = self._lump
        else:
            self._lump[:, self._filled :] = 0
            self._fold()
            assert self.gram is not None
            mirror(self.gram)
        self._lump = None
        return self

    def _fold(self) -> None:
        assert self._lump is not None
        if self.gram is None:
            self.gram = self._lump.new_zeros(self.width, self.width, dtype=torch.float64)
        add_gram(self.gram, self._lump)
        self._filled = 0

    def energy(self, basis: Tensor | None = None) -> float:
        """||X||^2, or with a basis ||X*||^2, in double precision."""
        if self.columns is not None:
            X = self.columns if basis is None else self._residual(basis)
            energy = float(X.square().sum(dim=0, dtype=torch.float64).sum())
        else:
            assert self.gram is not None
            energy = float(self.gram.trace())
            if basis is not None:
                known = filled(basis)
                energy -= float((known * product(self.gram.to(basis.dtype), known)).sum(dtype=torch.float64))
        return max(energy, 0.0) * self.total / self.seen

    def sketch(self, basis: Tensor, width: int, generator: torch.Generator) -> Tensor:
        """A Gaussian sketch [d, width] of X* (FOT eq. 9), by whichever way costs less."""
        if self.columns is not None:
            drawn = gaussian_sketch(self._residual(basis), width, generator)
        else:
            assert self.gram is not None
            drawn = gaussian_sketch_of_gram(self.gram, basis, width, generator)
        return drawn.mul_((self.total / self.seen) ** 0.5)

    def principal(self, basis: Tensor) -> tuple[Tensor, Tensor]:
        """Left singular vectors and values of the columns taken of X* (FedProTIP eq. 7); those of rounding are 0."""
        if self.columns is not None:
            # Of more directions than columns there is nothing but rounding.
            U, sigma = (found[..., : self.seen] for found in principal(self._residual(basis)))
            least = ROUNDING_OF_COLUMNS
        else:
            assert self.gram is not None
            exact = basis.double()
            outside = residual(residual(self.gram, exact).T, exact)  # P X X^T P
            U, sigma = (part.to(basis.dtype) for part in principal_of_gram(outside))
            least = ROUNDING_OF_GRAM
        length = (self.energy() * self.seen / self.total) ** 0.5
        return U, sigma.where(sigma > least * length, 0.0)

    def _residual(self, basis: Tensor) -> Tensor:
        """X* of the columns; the last one is kept, since energy, sketch and spectrum ask for the same."""
        assert self.columns is not None
        if self._outside is None or self._outside[0] is not basis:
            self._outside = (basis, residual(self.columns, basis))
        return self._outside[1]
