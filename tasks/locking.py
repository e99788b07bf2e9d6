"""A lock between processes that a killed one cannot leave behind."""

import fcntl
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO


@contextmanager
def locked(path: Path, if_taken: Callable[[], None] = lambda: None) -> Iterator[None]:
    """Hold the lock on this file. Where another process holds it, say so and wait."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with open(path, "ab") as lock:
        if not _take(lock):
            if_taken()
            while not _take(lock):  # and not in one call: with Polars loaded, Ctrl-C interrupts no system call
                time.sleep(0.1)
        yield


def held(path: Path) -> bool:
    """Whether a process holds the lock on this file."""
    try:
        with open(path, "rb") as lock:
            fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
        return False
    except FileNotFoundError:
        return False
    except BlockingIOError:
        return True


def _take(lock: IO[bytes]) -> bool:
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
