"""A FedAvg round against the bare loop: on two one-thread processes each, or where it is left to `auto` against the
faster of the bare loop's two processes and two threads."""

import statistics
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, closing
from functools import partial

import bare
from measuring import Bench, Row, take_turns
from workloads import WORKS, build_method, executor_for, open_run, run_rounds, start_processes, write_work_folder

from fclmodels.federation.executors.auto_choice import Choice, choose
from fclmodels.federation.run_context import Run

LIMIT = 1.05
AUTO = ("w3",)  # five clients leave one of two processes idle


def list_settings(name: str) -> Sequence[str]:
    if name in AUTO:
        return ["federation.executor=auto", "federation.threads=auto"]
    return ["federation.executor=processes", "federation.workers=2"]


def open_loops(name: str, run: Run) -> tuple[Choice, dict[str, Iterator[None]]]:
    """Return how our clients are trained, and the loops: ours, and the bare ones that may be its yardstick."""
    assert run.home is not None
    choice = choose(build_method(run, "fedavg"), run.home / "choices", name)
    folder = write_work_folder(WORKS[name], run)
    loops = {"ours": run_rounds(run, "fedavg", executor_for(choice), 0), "two processes": bare.processes(folder)}
    if name in AUTO:
        loops["two threads"] = bare.threads(folder, 2)
    return choice, loops


def find_faster_loop(seconds: Mapping[str, Sequence[float]]) -> str:
    """Return the name of the faster bare loop."""
    return min((side for side in seconds if side.startswith("two")), key=lambda side: statistics.median(seconds[side]))


def against_bare(name: str, turns: int) -> Iterator[Row]:
    work = WORKS[name]
    with open_run(work, list_settings(name)) as run, ExitStack() as opened:
        choice, loops = open_loops(name, run)
        if name in ("w1", "w2"):  # those with layers of our own
            loops["own layers"] = bare.processes(write_work_folder(work, run, own_layers=True))
        sides = {side: partial(next, opened.enter_context(closing(loop))) for side, loop in loops.items()}
        seconds = take_turns(sides, turns)
    faster = find_faster_loop(seconds)
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
            run = opened.enter_context(open_run(WORKS[name], [f"optimizer.precision={precision}"]))
            loop = opened.enter_context(closing(run_rounds(run, "fedavg", start_processes, 0)))
            sides[precision] = partial(next, loop)
        seconds = take_turns(sides, turns)
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
