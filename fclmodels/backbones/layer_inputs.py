"""What a layer's input was over some samples: all that a subspace is found from, folded in batch by batch."""

from dataclasses import dataclass, field

import torch
from torch import Tensor

from fclmodels.numerics.gram import add_gram, mirror
from fclmodels.numerics.products import product
from fclmodels.numerics.sketch import gaussian_sketch, gaussian_sketch_of_gram
from fclmodels.numerics.subspace import principal, principal_of_gram, residual

# Of float32 inputs that lie in a span, rounding leaves directions up to 3e-7 of ||X|| in columns, and up to 2.5e-4
# in Gram matrices (measured, d from 9 to 2304): what is below this is no direction.
ROUNDING_OF_COLUMNS, ROUNDING_OF_GRAM = 1e-6, 5e-4


@dataclass
class LayerInputs:
    """A layer's input X over some samples: its columns [d, n] while they are few, else their Gram matrix X X^T.

    seen: how many columns are taken; total: how many there are. Energies and sketches stand for all of them.
    """

    width: int
    seen: int
    total: int
    columns: Tensor | None = None
    gram: Tensor | None = None
    _parts: list[Tensor] = field(default_factory=list)
    _outside: tuple[Tensor, Tensor] | None = None

    def add(self, X: Tensor) -> None:
        """Fold in further columns [d, m]."""
        if self.seen < 2 * self.width:
            self._parts.append(X.clone())
        else:
            if self.gram is None:
                self.gram = X.new_zeros(self.width, self.width, dtype=torch.float64)
            add_gram(self.gram, X)

    def finish(self) -> "LayerInputs":
        if self._parts:
            self.columns, self._parts = torch.cat(self._parts, dim=1), []
        elif self.gram is not None:
            mirror(self.gram)
        return self

    def energy(self, basis: Tensor | None = None) -> float:
        """||X||^2, or with a basis ||X*||^2, in double precision."""
        if self.columns is not None:
            X = self.columns if basis is None else self._residual(basis)
            energy = float(X.square().sum(dim=0, dtype=torch.float64).sum())
        else:
            assert self.gram is not None
            energy = float(self.gram.trace())
            if basis is not None:
                energy -= float((basis * product(self.gram.to(basis.dtype), basis)).sum(dtype=torch.float64))
        return max(energy, 0.0) * self.total / self.seen

    def sketch(self, basis: Tensor, width: int, generator: torch.Generator) -> Tensor:
        """A Gaussian sketch [d, width] of X* (FOT eq. 9), by whichever way costs less."""
        if self.columns is not None:
            drawn = gaussian_sketch(self._residual(basis), width, generator)
        else:
            assert self.gram is not None
            drawn = gaussian_sketch_of_gram(self.gram, basis, width, generator)
        return drawn * (self.total / self.seen) ** 0.5

    def principal(self, basis: Tensor) -> tuple[Tensor, Tensor]:
        """Left singular vectors and values of the columns taken of X* (FedProTIP eq. 7); those of rounding are 0."""
        if self.columns is not None:
            U, sigma = principal(self._residual(basis))
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
