"""A FedAvg round against the bare loop: on two one-thread processes each, or where it is left to `auto` against the
faster of the bare loop's two processes and two threads."""

import statistics
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, closing
from functools import partial

import bare
from measuring import Bench, Row, taking_turns
from works import WORKS, executor_by, handed_over, method_on, our_rounds, processes, run_on

from fclmodels.federation.choice import Choice, choose
from fclmodels.federation.run import Run

LIMIT = 1.05
AUTO = ("w3",)  # five clients leave one of two processes idle


def settings_of(name: str) -> Sequence[str]:
    if name in AUTO:
        return ["federation.executor=auto", "federation.threads=auto"]
    return ["federation.executor=processes", "federation.workers=2"]


def ours_and_bare(name: str, run: Run) -> tuple[Choice, dict[str, Iterator[None]]]:
    """How our clients are trained; ours, and the bare loops that may be its yardstick."""
    assert run.home is not None
    choice = choose(method_on(run, "fedavg"), run.home / "choices", name)
    folder = handed_over(WORKS[name], run)
    loops = {"ours": our_rounds(run, "fedavg", executor_by(choice), 0), "two processes": bare.processes(folder)}
    if name in AUTO:
        loops["two threads"] = bare.threads(folder, 2)
    return choice, loops


def yardstick(seconds: Mapping[str, Sequence[float]]) -> str:
    """The faster bare loop."""
    return min((side for side in seconds if side.startswith("two")), key=lambda side: statistics.median(seconds[side]))


def against_bare(name: str, turns: int) -> Iterator[Row]:
    work = WORKS[name]
    with run_on(work, settings_of(name)) as run, ExitStack() as opened:
        choice, loops = ours_and_bare(name, run)
        if name in ("w1", "w2"):  # those with layers of our own
            loops["own layers"] = bare.processes(handed_over(work, run, own_layers=True))
        sides = {side: partial(next, opened.enter_context(closing(loop))) for side, loop in loops.items()}
        seconds = taking_turns(sides, turns)
    faster = yardstick(seconds)
    what = f"a round, {choice.executor} with {choice.threads} threads; bare loop on {faster}"
    limit = None if name == "w4" else LIMIT
    yield Row(f"{name}-fedavg", what, seconds["ours"], seconds[faster], limit=limit)
    if "own layers" in seconds:
        what = "a round, bare loop on two processes with our layers"
        yield Row(f"{name}-fedavg-layers", what, seconds["ours"], seconds["own layers"])


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
    *(
        Bench(f"{name}-fedavg", partial(against_bare, name), turns)
        for name, turns in (("w1", 25), ("w2", 17), ("w3", 9), ("w4", 3))
    ),
    *(
        Bench(f"{name}-bfloat16-round", partial(in_bfloat16, name), turns)
        for name, turns in (("w1", 9), ("w2", 9), ("w3", 5))
    ),
]
