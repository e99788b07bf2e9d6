"""The most memory that a run's processes take together, shared pages counted once (PSS).

Against the bare loop's; and against our own with fewer registered clients, answers, samples or rounds, on which it must
not depend: there without pages of files, which the system takes back when it needs them.
"""

import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path

from measuring import ANONYMOUS, WHOLE, Bench, Row, peak_of_tree
from watched import Watched, peak
from works import WORKS, handed_over, run_on

LIMIT, SAME = 1.2, 1.1
ROUNDS = 4
SAMPLED = 100  # clients of a round, of many more
BARE = Path(__file__).with_name("bare.py")


def against_bare(name: str, turns: int) -> Iterator[Row]:
    work = WORKS[name]
    with run_on(work) as run:
        theirs = [sys.executable, str(BARE), str(handed_over(work, run)), str(ROUNDS)]
        watched = Watched(name, work.clients, work.samples, ROUNDS)
        pairs = [(peak(watched, WHOLE), peak_of_tree(theirs, WHOLE)[0]) for _ in range(turns)]
    ours, others = zip(*pairs, strict=True)
    yield Row(f"{name}-memory", "peak of a few rounds, the bare loop's", ours, others, "MB", LIMIT)


def independent(what: str, more: Watched, fewer: Watched, turns: int) -> Iterator[Row]:
    many, few = ([peak(watched, ANONYMOUS) for _ in range(turns)] for watched in (more, fewer))
    yield Row(f"memory-{what}", f"{more}, {fewer}", many, few, "MB", SAME)


sampled = f"federation.clients_per_round={SAMPLED}"
PAIRS = {
    "registered": (Watched("w3", 10_000, 5, 2, sampled), Watched("w3", SAMPLED, 5, 2, sampled)),
    "answering": (Watched("w2", 100, 5, 2), Watched("w2", 10, 5, 2)),
    "samples": (Watched("w2", 4, 1_000, 2), Watched("w2", 4, 100, 2)),
    "rounds": (Watched("w2", 4, 50, 40), Watched("w2", 4, 50, 4)),
}
BENCHES = [
    *(Bench(f"{name}-memory", partial(against_bare, name), 3) for name in ("w1", "w2", "w3")),
    *(Bench(f"memory-{what}", partial(independent, what, *pair), 1) for what, pair in PAIRS.items()),
]
