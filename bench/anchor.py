"""Cost of SPECIAL's step in a round of FedAvg, with a fixed lambda and with `auto`, which also measures two distances.

The round has all that a run has, its clients one after another; the step is timed by itself. Seconds of the processor,
one thread: a share of a few thousandths is too small to be seen in turns of whole rounds.
"""

import time
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from functools import partial

from measuring import Bench, Row, take_turns
from workloads import WORKS, build_method, open_run, run_rounds, start_serial

from fclmodels.methods.parts.anchor import blend_with_anchor, measure_distance

LIMIT = 1.02


def measure_steps(name: str, turns: int) -> Iterator[Row]:
    with open_run(WORKS[name]) as run, closing(run_rounds(run, "fedavg", start_serial, 0)) as rounds:
        special = build_method(run, "special")
        server = special.start_task(special.create_server(), 0)
        anchor = {key: weights.clone() for key, weights in server.weights.items()}
        anchored = replace(server, knowledge={"anchor": anchor})
        sides = {
            "round": partial(next, rounds),
            "fixed": lambda: blend_with_anchor(anchored, 0.2, statistics=True),
            "distances": lambda: [measure_distance(server.weights, anchor) for _ in range(2)],
        }
        seconds = take_turns(sides, turns, time.process_time)
    kinds = {
        "fixed": seconds["fixed"],
        "auto": [sum(of) for of in zip(seconds["fixed"], seconds["distances"], strict=True)],
    }
    for kind, added in kinds.items():
        with_step = [of_round + step for of_round, step in zip(seconds["round"], added, strict=True)]
        what = f"a round with the anchor's step, lambda {kind}; without"
        yield Row(f"{name}-anchor-{kind}", what, with_step, seconds["round"], "CPU s", LIMIT)


BENCHES = [
    Bench(f"{name}-anchor", partial(measure_steps, name), turns) for name, turns in (("w1", 7), ("w2", 7), ("w3", 5))
]
