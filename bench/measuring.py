"""Parts of every benchmark here: sides that take turns, their seconds or memory, and rows of ratios."""

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

from fclmodels.federation.executors import glibc_malloc

# Lines of /proc/PID/smaps_rollup: all pages, and those that no file backs.
ALL, ANONYMOUS = ("Pss:",), ("Pss_Anon:", "Pss_Shmem:")


@dataclass(frozen=True)
class Row:
    """One ratio of a benchmark: measurements of ours and of its yardstick, turn by turn, and its limit."""

    name: str
    what: str
    ours: Sequence[float]
    yardstick: Sequence[float]
    unit: str = "s"
    limit: float | None = None

    @property
    def ratios(self) -> list[float]:
        """Ratio of each turn."""
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
    def is_within_limit(self) -> bool | None:
        """Return whether the ratio is within its limit; None where it has none."""
        return None if self.limit is None else self.ratio <= self.limit


@dataclass(frozen=True)
class Bench:
    """A benchmark: its rows over so many turns. It runs in a process of its own, with one torch thread and malloc tuned
    unless it sets these itself."""

    name: str
    measure: Callable[[int], Iterable[Row]]
    turns: int


def take_turns(
    sides: Mapping[str, Callable[[], object]], turns: int, clock: Callable[[], float] = time.perf_counter
) -> dict[str, list[float]]:
    """Return seconds of each side in each turn.

    A first turn warms up; the order goes back and forth, so that no side always runs after the same other one.
    """
    seconds: dict[str, list[float]] = {side: [] for side in sides}
    for turn in range(1 + turns):
        for side in list(sides)[:: -1 if turn % 2 else 1]:
            started = clock()
            sides[side]()
            seconds[side].append(clock() - started)
    return {side: times[1:] for side, times in seconds.items()}


def run_alone(work: Callable[..., Any], *arguments: Any) -> Any:
    """Return the result of a function in a process of its own, so that none finds another's memory."""
    with mp.get_context("spawn").Pool(1, glibc_malloc.tune) as pool:
        return pool.apply(work, arguments)


class Peak:
    """Context that measures the most memory in MB, by `read`, since its entry."""

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
        """Most MB above those at entry."""
        return round(self.most - self.start)


def measure_anonymous() -> float:
    """Return the MB of this process that no file backs."""
    return _read_kilobytes("/proc/self/status", "RssAnon:") / 1024


def measure_tree(root: int, kinds: Sequence[str]) -> float:
    """Return the MB of a process and all below it, shared pages counted once."""
    total = 0.0
    for process in [root, *_list_descendants(root)]:
        with contextlib.suppress(OSError, StopIteration):  # it has ended
            total += sum(_read_kilobytes(f"/proc/{process}/smaps_rollup", kind) for kind in kinds) / 1024
    return total


def measure_cpu_of_tree() -> float:
    """Return CPU seconds of this process and of all below it that still run."""
    files = (Path(f"/proc/{process}/schedstat") for process in [os.getpid(), *_list_descendants(os.getpid())])
    return sum(int(file.read_text().split()[0]) for file in files) / 1e9


def measure_peak_of_tree(command: Sequence[str], kinds: Sequence[str]) -> tuple[float, str]:
    """Return the most MB that a command and all that it starts take together, and its output."""
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    with process, Peak(lambda: measure_tree(process.pid, kinds), 0.1) as peak:
        output, problem = process.communicate()
    if process.returncode:
        last = (problem.strip().splitlines() or [f"it ended with {process.returncode}"])[-1]
        raise RuntimeError(f"{' '.join(command)}: {last}")
    return peak.most, output


def _list_descendants(root: int) -> list[int]:
    processes = []
    try:
        children = Path(f"/proc/{root}/task/{root}/children").read_text().split()
    except OSError:
        return []
    for child in map(int, children):
        processes += [child, *_list_descendants(child)]
    return processes


def _read_kilobytes(file: str, name: str) -> float:
    with open(file) as lines:
        return next(int(line.split()[1]) for line in lines if line.startswith(name))


def describe_machine() -> dict[str, str | int]:
    """Return facts that a run's figures depend on."""
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
