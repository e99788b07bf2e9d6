"""What SPECIAL's step adds to a round of FedAvg, with a fixed lambda and with `auto`, which measures two distances too.

The round has all that a run has, its clients one after another; the step is timed by itself. Seconds of the processor,
one thread: a share of a few thousandths is below what turns of whole rounds tell.
"""

import time
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from functools import partial

from measuring import Bench, Row, taking_turns
from works import WORKS, method_on, our_rounds, run_on, serial

from fclmodels.methods.anchored import distance
from fclmodels.methods.special import Special

LIMIT = 1.02


def steps(name: str, turns: int) -> Iterator[Row]:
    with run_on(WORKS[name]) as run, closing(our_rounds(run, "fedavg", serial, 0)) as rounds:
        special = method_on(run, "special")
        assert isinstance(special, Special)
        server = special.start_task(special.setup(), 0)
        anchor = {key: weights.clone() for key, weights in server.weights.items()}
        anchored = replace(server, knowledge={"anchor": anchor})
        sides = {
            "round": partial(next, rounds),
            "fixed": lambda: special.blended(anchored, 0.2),
            "distances": lambda: [distance(server.weights, anchor) for _ in range(2)],
        }
        seconds = taking_turns(sides, turns, time.process_time)
    kinds = {
        "fixed": seconds["fixed"],
        "auto": [sum(of) for of in zip(seconds["fixed"], seconds["distances"], strict=True)],
    }
    for kind, taken in kinds.items():
        with_step = [of_round + step for of_round, step in zip(seconds["round"], taken, strict=True)]
        what = f"a round with the anchor's step, lambda {kind}; without"
        yield Row(f"{name}-anchor-{kind}", what, with_step, seconds["round"], "CPU s", LIMIT)


BENCHES = [Bench(f"{name}-anchor", partial(steps, name), turns) for name, turns in (("w1", 7), ("w2", 7), ("w3", 5))]
