"""Vectors over the same named tensors, one a row: few in memory, more in a file without a name.

So memory does not grow with their number, and gradient alignment, which reads rows in chunks of columns (once for the
Gram matrix, once for the weighted sum), computes the same bits from either.
"""

import tempfile
from collections.abc import Iterable, Iterator, Mapping
from math import prod
from pathlib import Path

import torch
from torch import Tensor

from fclmodels.storage.array_cache import create_array

IN_MEMORY = 2**28  # bytes of a table; a larger one is in a file


class VectorTable:
    """A table [rows, P] of float32 numbers, P those of the named tensors."""

    def __init__(self, like: Mapping[str, Tensor], rows: int, folder: Path | None) -> None:
        """like: tensors of these names and shapes; folder: the file's, or the system's for temporary files."""
        self.shapes = {name: tensor.shape for name, tensor in like.items()}
        device = next(iter(like.values())).device
        size = sum(prod(shape) for shape in self.shapes.values())
        if rows * size * 4 <= IN_MEMORY:
            self.table = torch.empty(rows, size, device=device)
            return
        with tempfile.TemporaryDirectory(prefix="fcl-vectors-", dir=folder) as place:
            self.table = torch.from_numpy(create_array(Path(place) / "vectors.npy", "float32", (rows, size)))

    def fill(self, vectors: Iterable[Mapping[str, Tensor]]) -> list[dict[str, Tensor]]:
        """Write vectors, one at a time, over the first rows; return them as views, of the names that some of them has.

        A name that one vector lacks counts as zeros there.
        """
        reached: dict[str, None] = {}
        count = 0
        for vector in vectors:
            reached |= dict.fromkeys(vector)
            for name, place in self._yield_views(count):
                if name in vector:
                    place.copy_(vector[name])
                else:
                    place.zero_()
            count += 1
        return [{name: view for name, view in self._yield_views(row) if name in reached} for row in range(count)]

    def _yield_views(self, row: int) -> Iterator[tuple[str, Tensor]]:
        start = 0
        for name, shape in self.shapes.items():
            end = start + prod(shape)
            yield name, self.table[row, start:end].view(shape)
            start = end
