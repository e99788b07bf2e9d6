"""This machine: memory that is free or was used at most, processes that the kernel killed, and their ends."""

import ctypes
import os
import resource
import signal
import sys
from pathlib import Path

PROC = Path("/proc")
CGROUP = Path("/sys/fs/cgroup")


def read_status(name: str, process: int | str = "self") -> int | None:
    """Return an entry of a process's /proc/PID/status in bytes, such as VmRSS; None where there is none."""
    return _read_kilobytes(PROC / str(process) / "status", name)


def read_available_memory() -> int | None:
    """Return the bytes that new processes can take without swapping, within the container's limit; None: unknown."""
    free = _read_kilobytes(PROC / "meminfo", "MemAvailable")
    limit, used = (_read_number(CGROUP / name) for name in ("memory.max", "memory.current"))
    room = [free, limit - used if limit is not None and used is not None else None]
    return min((bytes for bytes in room if bytes is not None), default=None)


def read_peak_memory() -> int:
    """Return the most bytes of memory that this process has held, since the system began to count."""
    peak = read_status("VmHWM")
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 if peak is None else peak


def forget_peak_memory() -> None:
    """Let `VmHWM` of this process begin anew, where the system can."""
    try:
        (PROC / "self" / "clear_refs").write_text("5")
    except OSError:
        return


def read_peak_memory_of_children() -> int:
    """Return the most bytes of memory that one of this process's children has held, of those that still run.

    The system's own count, getrusage, has the parent's memory in it.
    """
    processes = [_read_entries(folder / "status") for folder in PROC.glob("[0-9]*")]
    own = [entries for entries in processes if entries.get("PPid", "").strip() == str(os.getpid())]
    return max((_parse_kilobytes(entries, "VmHWM") or 0 for entries in own), default=0)


def count_memory_kills() -> int:
    """Return how many processes the kernel has killed since its start because memory ran out; 0 where it is unknown."""
    try:
        lines = (PROC / "vmstat").read_text().splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1]) for line in lines if line.startswith("oom_kill ")), 0)


def offer_to_be_killed_first() -> None:
    """Let the kernel kill this process before others where memory runs out: a worker's client can be run again."""
    try:
        (PROC / "self" / "oom_score_adj").write_text("500")
    except OSError:
        return


def end_with_parent() -> None:
    """Ask Linux for a signal to this process when its parent dies, however it dies."""
    if sys.platform == "linux":
        set_death_signal = 1
        ctypes.CDLL(None).prctl(set_death_signal, signal.SIGTERM)


def _read_kilobytes(file: Path, name: str) -> int | None:
    return _parse_kilobytes(_read_entries(file), name)


def _read_entries(file: Path) -> dict[str, str]:
    """Return the entries of such a file; none where it is missing, as of a process that has just ended."""
    try:
        return dict(line.split(":", 1) for line in file.read_text().splitlines() if ":" in line)
    except OSError:
        return {}


def _parse_kilobytes(entries: dict[str, str], name: str) -> int | None:
    return int(entries[name].split()[0]) * 1024 if name in entries else None


def _read_number(file: Path) -> int | None:
    try:
        return int(file.read_text())
    except (OSError, ValueError):  # no such file, or "max"
        return None
