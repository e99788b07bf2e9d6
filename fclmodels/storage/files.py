"""Files on disk: atomic replacement, room reserved ahead, and locks that a killed process cannot leave behind."""

import fcntl
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO


@contextmanager
def replace_file(path: Path) -> Iterator[Path]:
    """Yield a temporary path beside `path`; move it there, synced, when the block ends well, delete it otherwise."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    os.close(handle)
    temporary = Path(name)
    try:
        yield temporary
        temporary.chmod(0o644)
        move_synced(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


@contextmanager
def replace_folder(folder: Path, beside: Path | None = None) -> Iterator[Path]:
    """Yield an empty folder beside `folder`, or beside another one; move it to `folder`, its files synced, when the
    block ends well. No folder can be replaced in one step: the old one steps aside and goes when the new one is there.
    """
    folder = folder.resolve()  # a link to another disk stays a link
    old = folder.with_name(f".{folder.name}.old")
    shutil.rmtree(old, ignore_errors=True)  # of a run that was killed
    with make_temporary_folder(beside or folder) as temporary:
        yield temporary
        for file in temporary.rglob("*"):
            if file.is_file():
                _sync(file)
        folder.parent.mkdir(parents=True, exist_ok=True)
        if folder.exists():
            os.replace(folder, old)
        os.replace(temporary, folder)
    shutil.rmtree(old, ignore_errors=True)


@contextmanager
def make_temporary_folder(beside: Path) -> Iterator[Path]:
    """Yield an empty folder beside this path; delete it, unless it was moved away, when the block ends."""
    beside = beside.resolve()
    folder = beside.with_name(f".{beside.name}.partial")
    shutil.rmtree(folder, ignore_errors=True)  # of a run that was killed
    folder.mkdir(parents=True)
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def move_synced(file: Path, path: Path) -> None:
    """Put a file in the place of another once its bytes are on the disk."""
    _sync(file)
    os.replace(file, path)


def _sync(file: Path) -> None:
    with open(file, "rb") as opened:
        os.fsync(opened.fileno())


def reserve(descriptor: int, size: int) -> None:
    """Make a file at least `size` bytes long; OSError where the disk has no room for it.

    To be called before a file is memory-mapped: a map onto a full disk ends the process by a signal, where a person
    needs an error.
    """
    if hasattr(os, "posix_fallocate"):
        os.posix_fallocate(descriptor, 0, size)
    elif os.fstat(descriptor).st_size < size:
        os.ftruncate(descriptor, size)


@contextmanager
def name_in_errors(path: Path) -> Iterator[None]:
    """Add the file's name, which a descriptor does not know, to an OSError of the block."""
    try:
        yield
    except OSError as problem:
        problem.filename = str(path)
        raise


@contextmanager
def lock_file(path: Path, on_wait: Callable[[], None] = lambda: None) -> Iterator[None]:
    """Hold the lock on this file. Where another process holds it, call `on_wait` and wait."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with open(path, "ab") as lock:
        if not _try_lock(lock):
            on_wait()
            while not _try_lock(lock):  # and not in one call: with Polars loaded, Ctrl-C interrupts no system call
                time.sleep(0.1)
        yield


def is_locked(path: Path) -> bool:
    """Return whether a process holds the lock on this file."""
    try:
        with open(path, "rb") as lock:
            fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
        return False
    except FileNotFoundError:
        return False
    except BlockingIOError:
        return True


def _try_lock(lock: IO[bytes]) -> bool:
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def find_existing(path: Path) -> Path:
    """Return the path, or its nearest parent that exists."""
    return next(parent for parent in [path, *path.absolute().parents] if parent.exists())
