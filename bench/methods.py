"""A round of each method against one of FedAvg, both on two processes, in the second task.

Bases are random and fill 20 % of each layer's input, STAMP's clients have their coreset of the first task. Under
`temporal: step` STAMP's yardstick is a bare loop with as many passes: one over the batch and one over samples of the
first task in each step; under its default it is FedAvg's round.
"""

from collections.abc import Iterator, Mapping
from contextlib import ExitStack, closing
from functools import partial

import bare
from measuring import Bench, Row, take_turns
from workloads import C2, WORKS, open_run, run_rounds, start_processes, write_work_folder

STAMP_PASSES = 1.15
STAMP_ROUND = 9.1 / 3.3  # seconds a round of STAMP and of FedAvg, Table 1


def measure_over_fedavg(name: str, limits: Mapping[str, float | None], turns: int) -> Iterator[Row]:
    with open_run(WORKS[name]) as run, ExitStack() as opened:
        loops = {method: run_rounds(run, method, start_processes, 1) for method in ("fedavg", *limits)}
        sides = {side: partial(next, opened.enter_context(closing(loop))) for side, loop in loops.items()}
        seconds = take_turns(sides, turns)
    for method, limit in limits.items():
        yield Row(f"{name}-{method}", "a round, FedAvg's", seconds[method], seconds["fedavg"], limit=limit)


def measure_stamp(name: str, turns: int) -> Iterator[Row]:
    work = WORKS[name]
    with open_run(work) as run, open_run(work, ["methods.stamp.temporal=step"]) as stamp, ExitStack() as opened:
        # A coreset of 20 samples a class holds all samples of these clients.
        loops = {
            "stamp": run_rounds(stamp, "stamp", start_processes, 1),
            "passes": bare.processes(write_work_folder(work, run, 1), past=work.samples),
        }
        sides = {side: partial(next, opened.enter_context(closing(loop))) for side, loop in loops.items()}
        seconds = take_turns(sides, turns)
    what = "a round, bare loop's passes over as many batches"
    yield Row(f"{name}-stamp", what, seconds["stamp"], seconds["passes"], limit=STAMP_PASSES)


def measure_algorithm1(turns: int) -> Iterator[Row]:
    """Measure a round of STAMP's Algorithm 1 in the paper's five local epochs, which Table 1 measures too."""
    with open_run(C2, ["federation.local_epochs=5"]) as run, ExitStack() as opened:
        loops = {method: run_rounds(run, method, start_processes, C2.tasks - 1) for method in ("stamp", "fedavg")}
        sides = {side: partial(next, opened.enter_context(closing(loop))) for side, loop in loops.items()}
        seconds = take_turns(sides, turns)
    yield Row("c2-stamp", "a round, FedAvg's", seconds["stamp"], seconds["fedavg"], limit=STAMP_ROUND)


def measure_frozen_activations(name: str, turns: int) -> Iterator[Row]:
    """Measure FedProTIP with the first blocks frozen, as in its presets, with their activations stored and without."""
    work = WORKS[name]
    freeze = "model.freeze=[conv1,bn1,layer1,layer2]"
    with ExitStack() as opened:
        sides = {}
        for side in ("true", "false"):
            run = opened.enter_context(open_run(work, [freeze, f"model.keep_frozen={side}"]))
            loop = opened.enter_context(closing(run_rounds(run, "fedprotip", start_processes, 1)))
            sides[side] = partial(next, loop)
        seconds = take_turns(sides, turns)
    what = "a round of fedprotip with stored activations of frozen blocks, without"
    yield Row(f"{name}-kept", what, seconds["true"], seconds["false"])


BENCHES = [
    Bench("w1-methods", partial(measure_over_fedavg, "w1", {"special": 1.02, "fot": 1.05}), 19),
    Bench("w2-methods", partial(measure_over_fedavg, "w2", {"special": 1.02, "fot": 1.05, "fedprotip": 1.10}), 13),
    Bench("w3-methods", partial(measure_over_fedavg, "w3", {"fedprotip": 1.35}), 7),
    Bench("w4-methods", partial(measure_over_fedavg, "w4", {"fed-dualp": None, "pip-dualp": None}), 3),
    Bench("w2-stamp", partial(measure_stamp, "w2"), 9),
    Bench("c2-stamp", measure_algorithm1, 3),
    Bench("w3-kept", partial(measure_frozen_activations, "w3"), 7),
]
