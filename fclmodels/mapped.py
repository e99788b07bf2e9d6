"""Files that are written through memory maps. Their room is taken first: a map onto a full disk ends the process by a
signal, where a person needs an error.
"""

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import numpy.typing as npt
from numpy.lib.format import open_memmap


def reserve(descriptor: int, size: int) -> None:
    """Make a file at least so long; OSError where there is no room for it."""
    if hasattr(os, "posix_fallocate"):
        os.posix_fallocate(descriptor, 0, size)
    elif os.fstat(descriptor).st_size < size:
        os.ftruncate(descriptor, size)


@contextmanager
def naming(path: Path) -> Iterator[None]:
    """An error tells the file's name, which a descriptor does not know."""
    try:
        yield
    except OSError as problem:
        problem.filename = str(path)
        raise


def new_array(path: Path, dtype: npt.DTypeLike, shape: Sequence[int]) -> np.memmap:
    """A new .npy file of zeros, to be written to."""
    array: np.memmap = open_memmap(path, "w+", dtype, tuple(shape))
    try:
        with naming(path), open(path, "r+b") as file:
            reserve(file.fileno(), os.fstat(file.fileno()).st_size)
    except OSError:
        path.unlink()
        raise
    return array
