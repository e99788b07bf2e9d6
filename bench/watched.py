"""Rounds of FedAvg on two workers in a process tree of their own, which others watch.

    python bench/watched.py WORK CLIENTS SAMPLES ROUNDS [KEY=VALUE ...]

prints the CPU seconds of each round in all processes as JSON; in the first one the workers start.
"""

import json
import sys
from collections.abc import Sequence
from contextlib import closing
from dataclasses import replace

from measuring import cpu_of_tree, peak_of_tree
from works import WORKS, our_rounds, processes, run_on

from fclmodels.federation import malloc


class Watched:
    """A work with other numbers of clients and samples a client."""

    def __init__(self, name: str, clients: int, samples: int, rounds: int, *overrides: str) -> None:
        self.words = [name, *map(str, (clients, samples, rounds)), *overrides]

    def __str__(self) -> str:
        name, clients, samples, rounds = self.words[:4]
        return f"{name}'s model with {clients} clients of {samples} samples for {rounds} rounds"

    @property
    def command(self) -> list[str]:
        return [sys.executable, __file__, *self.words]


def peak(watched: Watched, kinds: Sequence[str]) -> float:
    """MB."""
    return peak_of_tree(watched.command, kinds)[0]


def main(name: str, clients: str, samples: str, rounds: str, *overrides: str) -> None:
    malloc.tune()
    work = replace(WORKS[name], clients=int(clients), samples=int(samples), tasks=1)
    seconds = []
    with run_on(work, overrides) as run, closing(our_rounds(run, "fedavg", processes, 0)) as ours:
        for _ in range(int(rounds)):
            before = cpu_of_tree()
            next(ours)
            seconds.append(cpu_of_tree() - before)
    print(json.dumps(seconds))


if __name__ == "__main__":
    main(*sys.argv[1:])
