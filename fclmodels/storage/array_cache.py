"""Arrays in .npy files that are memory-mapped: new ones with their room reserved, and a cache of computed rows.

A cached file's name is a digest of all that its rows depend on: whoever needs it first makes it, and it is never stale.
"""

import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
from numpy.lib.format import open_memmap
from torch import Tensor

from fclmodels.storage.files import name_in_errors, replace_file, reserve


def create_array(path: Path, dtype: npt.DTypeLike, shape: Sequence[int]) -> np.memmap:
    """Return a new array of zeros, to be written to, in a .npy file."""
    array: np.memmap = open_memmap(path, "w+", dtype, tuple(shape))
    try:
        with name_in_errors(path), open(path, "r+b") as file:
            reserve(file.fileno(), os.fstat(file.fileno()).st_size)
    except OSError:
        path.unlink()
        raise
    return array


def load_or_compute(folder: Path, digest: str, count: int, compute: Callable[[], Iterator[Tensor]]) -> Tensor:
    """Return the float32 tensor of `count` rows that `compute` yields in order, batch by batch."""
    path = folder / f"{digest}.npy"
    if not path.exists():
        with replace_file(path) as temporary:
            _write_rows(temporary, count, compute())
    return torch.from_numpy(np.load(path, mmap_mode="c"))


def _write_rows(path: Path, count: int, batches: Iterator[Tensor]) -> None:
    array, end = None, 0
    for batch in batches:
        if array is None:
            array = create_array(path, np.float32, (count, *batch.shape[1:]))
        start, end = end, end + len(batch)
        array[start:end] = batch.cpu().numpy()
    assert array is not None
    array.flush()
