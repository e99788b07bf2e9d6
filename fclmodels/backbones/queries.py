"""What frozen layers say of every prepared sample: computed once, then read from a memory-mapped file.

The file's name is a digest of all that it depends on, so that whoever asks first makes it and it is never stale.
"""

import os
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from fclmodels.mapped import new_array


def kept(folder: Path, digest: str, count: int, compute: Callable[[], Iterator[Tensor]]) -> Tensor:
    """The float32 tensor of `count` rows, which `compute` gives in order, batch by batch."""
    file = folder / f"{digest}.npy"
    if not file.exists():
        folder.mkdir(parents=True, exist_ok=True)
        partial = folder / f"{digest}.{os.getpid()}.partial"
        rows, done = None, 0
        for batch in compute():
            if rows is None:
                shape = (count, *batch.shape[1:])
                rows = new_array(partial, np.float32, shape)
            rows[done : done + len(batch)] = batch.cpu().numpy()
            done += len(batch)
        assert rows is not None
        rows.flush()
        os.replace(partial, file)
    return torch.from_numpy(np.load(file, mmap_mode="c"))
