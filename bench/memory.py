"""The most memory that a run's processes take together, shared pages counted once (PSS).

Against the bare loop's; and against our own with fewer registered clients, answers, samples or rounds, on which it must
not depend: there without pages of files, which the system takes back when it needs them.
"""

import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path

from child_run import ChildRun, measure_peak
from measuring import ALL, ANONYMOUS, Bench, Row, measure_peak_of_tree
from workloads import WORKS, open_run, write_work_folder

LIMIT, SAME = 1.2, 1.1
ROUNDS = 4
SAMPLED = 100  # clients of a round, of many more
BARE = Path(__file__).with_name("bare.py")


def against_bare(name: str, turns: int) -> Iterator[Row]:
    work = WORKS[name]
    with open_run(work) as run:
        theirs = [sys.executable, str(BARE), str(write_work_folder(work, run)), str(ROUNDS)]
        ours_run = ChildRun(name, work.clients, work.samples, ROUNDS)
        pairs = [(measure_peak(ours_run, ALL), measure_peak_of_tree(theirs, ALL)[0]) for _ in range(turns)]
    ours, others = zip(*pairs, strict=True)
    yield Row(f"{name}-memory", "peak of a few rounds, the bare loop's", ours, others, "MB", LIMIT)


def independent(what: str, more: ChildRun, fewer: ChildRun, turns: int) -> Iterator[Row]:
    many, few = ([measure_peak(run, ANONYMOUS) for _ in range(turns)] for run in (more, fewer))
    yield Row(f"memory-{what}", f"{more}, {fewer}", many, few, "MB", SAME)


sampled = f"federation.clients_per_round={SAMPLED}"
PAIRS = {
    "registered": (ChildRun("w3", 10_000, 5, 2, sampled), ChildRun("w3", SAMPLED, 5, 2, sampled)),
    "answering": (ChildRun("w2", 100, 5, 2), ChildRun("w2", 10, 5, 2)),
    "samples": (ChildRun("w2", 4, 1_000, 2), ChildRun("w2", 4, 100, 2)),
    "rounds": (ChildRun("w2", 4, 50, 40), ChildRun("w2", 4, 50, 4)),
}
BENCHES = [
    *(Bench(f"{name}-memory", partial(against_bare, name), 3) for name in ("w1", "w2", "w3")),
    *(Bench(f"memory-{what}", partial(independent, what, *pair), 1) for what, pair in PAIRS.items()),
]
