"""A FedAvg round against the bare loop: on two one-thread processes each, or where it is left to `auto` against the
faster of the bare loop's two processes and two threads."""

import statistics
from collections.abc import Iterator
from contextlib import ExitStack, closing
from functools import partial

import bare
from measuring import Bench, Row, taking_turns
from works import WORKS, executor_by, handed_over, method_on, our_rounds, processes, run_on

from fclmodels.federation.choice import choose

LIMIT = 1.05


def on_two_processes(name: str, turns: int) -> Iterator[Row]:
    work = WORKS[name]
    with run_on(work) as run, ExitStack() as opened:
        loops = {
            "ours": our_rounds(run, "fedavg", processes, 0),
            "bare": bare.processes(handed_over(work, run)),
            "own layers": bare.processes(handed_over(work, run, own_layers=True)),
        }
        sides = {side: partial(next, opened.enter_context(closing(loop))) for side, loop in loops.items()}
        seconds = taking_turns(sides, turns)
    limit = LIMIT if name in ("w1", "w2") else None
    what = "a round, bare loop on two processes"
    yield Row(f"{name}-fedavg", what, seconds["ours"], seconds["bare"], limit=limit)
    if name in ("w1", "w2"):  # those with dropout
        yield Row(f"{name}-fedavg-layers", f"{what}, with our layers", seconds["ours"], seconds["own layers"])


def by_auto(name: str, turns: int) -> Iterator[Row]:
    work = WORKS[name]
    with run_on(work, ["federation.executor=auto"]) as run, ExitStack() as opened:
        assert run.home is not None
        choice = choose(method_on(run, "fedavg"), run.home / "choices", name)
        loops = {
            "ours": our_rounds(run, "fedavg", executor_by(choice), 0),
            "processes": bare.processes(handed_over(work, run)),
            "threads": bare.threads(handed_over(work, run), 2),
        }
        sides = {side: partial(next, opened.enter_context(closing(loop))) for side, loop in loops.items()}
        seconds = taking_turns(sides, turns)
    faster = min(("processes", "threads"), key=lambda side: statistics.median(seconds[side]))
    what = f"a round, {choice.executor} with {choice.threads} threads by auto; bare loop on two {faster}, the faster"
    yield Row(f"{name}-fedavg", what, seconds["ours"], seconds[faster], limit=LIMIT)


def in_bfloat16(name: str, turns: int) -> Iterator[Row]:
    with ExitStack() as opened:
        sides = {}
        for precision in ("bfloat16", "float32"):
            run = opened.enter_context(run_on(WORKS[name], [f"optimizer.precision={precision}"]))
            loop = opened.enter_context(closing(our_rounds(run, "fedavg", processes, 0)))
            sides[precision] = partial(next, loop)
        seconds = taking_turns(sides, turns)
    what = "a round in bfloat16, in float32"
    yield Row(f"{name}-bfloat16-round", what, seconds["bfloat16"], seconds["float32"])


BENCHES = [
    Bench("w1-fedavg", partial(on_two_processes, "w1"), 25),
    Bench("w2-fedavg", partial(on_two_processes, "w2"), 17),
    Bench("w3-fedavg", partial(by_auto, "w3"), 9),
    Bench("w4-fedavg", partial(on_two_processes, "w4"), 3),
    *(
        Bench(f"{name}-bfloat16-round", partial(in_bfloat16, name), turns)
        for name, turns in (("w1", 9), ("w2", 9), ("w3", 5))
    ),
]
