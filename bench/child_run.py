"""Rounds of FedAvg on two workers in a process tree of their own, whose memory and CPU time others measure.

    python bench/child_run.py WORK CLIENTS SAMPLES ROUNDS [KEY=VALUE ...]

prints the CPU seconds of each round in all processes as JSON; in the first one the workers start.
"""

import json
import sys
from collections.abc import Sequence
from contextlib import closing
from dataclasses import replace

from measuring import measure_cpu_of_tree, measure_peak_of_tree
from workloads import WORKS, open_run, run_rounds, start_processes

from fclmodels.federation.executors import glibc_malloc


class ChildRun:
    """A workload with other numbers of clients and samples a client, run as a command."""

    def __init__(self, name: str, clients: int, samples: int, rounds: int, *overrides: str) -> None:
        self.arguments = [name, *map(str, (clients, samples, rounds)), *overrides]

    def __str__(self) -> str:
        name, clients, samples, rounds = self.arguments[:4]
        return f"{name}'s model with {clients} clients of {samples} samples for {rounds} rounds"

    @property
    def command(self) -> list[str]:
        return [sys.executable, __file__, *self.arguments]


def measure_peak(run: ChildRun, kinds: Sequence[str]) -> float:
    """Return the most memory of the run in MB."""
    return measure_peak_of_tree(run.command, kinds)[0]


def main(name: str, clients: str, samples: str, rounds: str, *overrides: str) -> None:
    glibc_malloc.tune()
    work = replace(WORKS[name], clients=int(clients), samples=int(samples), tasks=1)
    seconds = []
    with open_run(work, overrides) as run, closing(run_rounds(run, "fedavg", start_processes, 0)) as ours:
        for _ in range(int(rounds)):
            before = measure_cpu_of_tree()
            next(ours)
            seconds.append(measure_cpu_of_tree() - before)
    print(json.dumps(seconds))


if __name__ == "__main__":
    main(*sys.argv[1:])
