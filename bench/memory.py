"""The most memory that a run's processes take together, shared pages counted once (PSS).

Against the bare loop's; and against our own with fewer registered clients, samples or rounds, on which it must not
depend: there without pages of files, which the system takes back when it needs them.

    python bench/memory.py WORK CLIENTS SAMPLES ROUNDS [KEY=VALUE ...]

is the process tree that is watched: rounds of FedAvg on two workers.
"""

import sys
from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import replace
from functools import partial
from pathlib import Path

from measuring import ANONYMOUS, WHOLE, Bench, Row, peak_of_tree
from works import WORKS, handed_over, our_rounds, processes, run_on

LIMIT, SAME = 1.2, 1.1
HERE = Path(__file__).parent
ROUNDS = 4
SAMPLED = 100  # clients of a round, of many more


def ours(name: str, clients: int, samples: int, rounds: int, *overrides: str, of: Sequence[str] = WHOLE) -> float:
    words = [HERE / "memory.py", name, clients, samples, rounds, *overrides]
    return peak_of_tree([sys.executable, *map(str, words)], of)


def against_bare(name: str, turns: int) -> Iterator[Row]:
    work = WORKS[name]
    with run_on(work) as run:
        folder = handed_over(work, run)
        theirs = [sys.executable, str(HERE / "bare.py"), str(folder), str(ROUNDS)]
        pairs = [(ours(name, work.clients, work.samples, ROUNDS), peak_of_tree(theirs, WHOLE)) for _ in range(turns)]
    mine, others = zip(*pairs, strict=True)
    yield Row(f"{name}-memory", "peak of a few rounds, the bare loop's", mine, others, "MB", LIMIT)


def independent(what: str, name: str, more: Sequence, fewer: Sequence, turns: int) -> Iterator[Row]:
    """The same with more of something."""
    many = [ours(name, *more, of=ANONYMOUS) for _ in range(turns)]
    few = [ours(name, *fewer, of=ANONYMOUS) for _ in range(turns)]
    yield Row(f"memory-{what}", f"{name}: {more[:3]} clients, samples, rounds; {fewer[:3]}", many, few, "MB", SAME)


def main(name: str, clients: str, samples: str, rounds: str, *overrides: str) -> None:
    work = replace(WORKS[name], clients=int(clients), samples=int(samples), tasks=1)
    with run_on(work, overrides) as run, closing(our_rounds(run, "fedavg", processes, 0)) as ours:
        for _, _ in zip(range(int(rounds)), ours, strict=False):
            pass


sampled = f"federation.clients_per_round={SAMPLED}"
BENCHES = [
    *(Bench(f"{name}-memory", partial(against_bare, name), 3) for name in ("w1", "w2", "w3")),
    *(
        Bench(f"memory-{what}", partial(independent, what, name, more, fewer), 1)
        for what, name, more, fewer in (
            ("registered", "w3", (10_000, 5, 2, sampled), (SAMPLED, 5, 2, sampled)),
            ("answering", "w2", (100, 5, 2), (10, 5, 2)),
            ("samples", "w2", (4, 1_000, 2), (4, 100, 2)),
            ("rounds", "w2", (4, 50, 40), (4, 50, 4)),
        )
    ),
]

if __name__ == "__main__":
    main(*sys.argv[1:])
