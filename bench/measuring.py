"""What every benchmark here is made of: sides that take turns, their seconds or memory, and the rows of that."""

import contextlib
import multiprocessing as mp
import os
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fclmodels.federation import malloc

# Lines of /proc/PID/smaps_rollup: all pages, and those that no file holds.
WHOLE, ANONYMOUS = ("Pss:",), ("Pss_Anon:", "Pss_Shmem:")


@dataclass(frozen=True)
class Row:
    """One ratio: what was measured of ours and of its yardstick, turn by turn, and the ratio that is allowed."""

    name: str
    what: str
    ours: Sequence[float]
    yardstick: Sequence[float]
    unit: str = "s"
    limit: float | None = None

    @property
    def ratios(self) -> list[float]:
        """Of each turn."""
        return [ours / other for ours, other in zip(self.ours, self.yardstick, strict=True)]

    @property
    def ratio(self) -> float:
        return statistics.median(self.ratios)

    @property
    def spread(self) -> tuple[float, float]:
        """The quartiles of the ratios."""
        ratios = self.ratios
        if len(ratios) == 1:
            return ratios[0], ratios[0]
        low, _, high = statistics.quantiles(ratios, n=4, method="inclusive")
        return low, high

    @property
    def kept(self) -> bool | None:
        """Whether the limit is kept; None: there is none."""
        return None if self.limit is None else self.ratio <= self.limit


@dataclass(frozen=True)
class Bench:
    """A benchmark: its rows over so many turns. It runs in a process of its own, with one torch thread and malloc tuned
    unless it sets these itself."""

    name: str
    measure: Callable[[int], Iterable[Row]]
    turns: int


def taking_turns(
    sides: Mapping[str, Callable[[], object]], turns: int, clock: Callable[[], float] = time.perf_counter
) -> dict[str, list[float]]:
    """Seconds of each side in each turn. A first turn warms up; the order goes back and forth, so that no side always
    finds the cache as the same other one left it."""
    seconds: dict[str, list[float]] = {side: [] for side in sides}
    for turn in range(1 + turns):
        for side in list(sides)[:: -1 if turn % 2 else 1]:
            started = clock()
            sides[side]()
            seconds[side].append(clock() - started)
    return {side: taken[1:] for side, taken in seconds.items()}


def alone(work: Callable[..., Any], *arguments: Any) -> Any:
    """What a function returns in a process of its own, so that none finds another's memory."""
    with mp.get_context("spawn").Pool(1, malloc.tune) as pool:
        return pool.apply(work, arguments)


class Peak:
    """The most memory in MB, by `read`, since it was entered."""

    def __init__(self, read: Callable[[], float], seconds: float = 0.002) -> None:
        self.read = read
        self.seconds = seconds

    def __enter__(self) -> "Peak":
        self.start = self.most = self.read()
        self._done = threading.Event()
        self._watching = threading.Thread(target=self._watch)
        self._watching.start()
        return self

    def _watch(self) -> None:
        while not self._done.wait(self.seconds):
            self.most = max(self.most, self.read())

    def __exit__(self, *_: object) -> None:
        self._done.set()
        self._watching.join()
        self.most = max(self.most, self.read())

    @property
    def above(self) -> int:
        """What was there when it was entered is not in this."""
        return round(self.most - self.start)


def anonymous() -> float:
    """MB of this process that no file holds."""
    return _told_by("/proc/self/status", "RssAnon:") / 1024


def of_tree(root: int, kinds: Sequence[str]) -> float:
    """MB of a process and all below it, shared pages counted once."""
    total = 0.0
    for process in [root, *_below(root)]:
        with contextlib.suppress(OSError, StopIteration):  # it has ended
            total += sum(_told_by(f"/proc/{process}/smaps_rollup", kind) for kind in kinds) / 1024
    return total


def cpu_of_tree() -> float:
    """Seconds that this process and all below it, which still are there, have had of the processor."""
    files = (Path(f"/proc/{process}/schedstat") for process in [os.getpid(), *_below(os.getpid())])
    return sum(int(file.read_text().split()[0]) for file in files) / 1e9


def peak_of_tree(command: Sequence[str], kinds: Sequence[str]) -> tuple[float, str]:
    """The most MB that a command and all that it starts take together, and what it prints."""
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    with process, Peak(lambda: of_tree(process.pid, kinds), 0.1) as peak:
        told, problem = process.communicate()
    if process.returncode:
        last = (problem.strip().splitlines() or [f"it ended with {process.returncode}"])[-1]
        raise RuntimeError(f"{' '.join(command)}: {last}")
    return peak.most, told


def _below(root: int) -> list[int]:
    found = []
    try:
        children = Path(f"/proc/{root}/task/{root}/children").read_text().split()
    except OSError:
        return []
    for child in map(int, children):
        found += [child, *_below(child)]
    return found


def _told_by(file: str, name: str) -> float:
    with open(file) as lines:
        return next(int(line.split()[1]) for line in lines if line.startswith(name))


def machine() -> dict[str, str | int]:
    """Facts that a run's figures depend on."""
    import torch

    cpu = next((line for line in Path("/proc/cpuinfo").read_text().splitlines() if line.startswith("model name")), ":")
    git = ["git", "-C", str(Path(__file__).parent)]
    commit = subprocess.run([*git, "describe", "--always", "--dirty"], capture_output=True, text=True, check=False)
    return {
        "cpu": cpu.partition(":")[2].strip() or "unknown",
        "cores": len(os.sched_getaffinity(0)),
        "torch": torch.__version__,
        "python": sys.version.partition(" ")[0],
        "commit": commit.stdout.strip() or "unknown",
    }
