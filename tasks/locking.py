"""A lock between processes that a killed one cannot leave behind."""

import fcntl
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def locked(path: Path) -> Iterator[None]:
    """Hold the lock on this file; whoever else wants it waits."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with open(path, "ab") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield
