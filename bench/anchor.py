"""What SPECIAL's step costs the server, as a share of a round of FedAvg on the works of local_loop.py.

    python bench/anchor.py [mlp alexnet resnet18] [--repeats 9]

The round has all that a run has, its clients one after another; the step is timed by itself, with a fixed lambda and
with `auto`, which measures two distances too. One thread; medians of the repeats, in seconds of the processor, which
other work on the machine changes less than those of the clock.
"""

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import torch
from local_loop import LR, WORKS, make_splits, our_rounds

from fclmodels import params
from fclmodels.federation import malloc
from fclmodels.federation.executor import Serial
from fclmodels.federation.run import Run
from fclmodels.methods.anchored import distance
from fclmodels.methods.special import Special
from fclmodels.state import write_json


def median_seconds(work: Callable[[], object], repeats: int) -> float:
    seconds = []
    for _ in range(repeats + 1):
        started = time.process_time()
        work()
        seconds.append(time.process_time() - started)
    return statistics.median(seconds[1:])


def measure(name: str, repeats: int) -> str:
    work = WORKS[name]
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        settings = {
            "model": work.model,
            "federation": {"batch_size": work.batch, "executor": "serial"},
            "optimizer": {"lr": LR},
        }
        write_json(folder / "params.yaml", settings)
        run = Run.on(params.load(folder / "params.yaml"), make_splits(work, folder), seed=0)
        rounds = our_rounds(run, lambda method: Serial(method, 1), folder / "rounds")
        of_round = median_seconds(lambda: next(rounds), repeats)
        rounds.close()
    special = Special(Special.Settings(), run)
    server = special.start_task(special.setup(), 0)
    anchor = {name: weights.clone() for name, weights in server.weights.items()}
    anchored = replace(server, knowledge={"anchor": anchor})
    fixed = median_seconds(lambda: special.blended(anchored, 0.2), repeats)
    distances = median_seconds(lambda: [distance(server.weights, anchor) for _ in range(2)], repeats)
    shares = {"fixed": fixed / of_round, "auto": (fixed + distances) / of_round}
    told = ", ".join(f"{kind} {seconds:.2%}" for kind, seconds in shares.items())
    return f"{name}: a round {of_round:.3f} s, the step {1000 * fixed:.2f} ms; of a round: {told}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("works", nargs="*", default=list(WORKS), help=f"of {', '.join(WORKS)}")
    parser.add_argument("--repeats", type=int, default=9)
    given = parser.parse_args()
    malloc.tune()
    torch.set_num_threads(1)
    for name in given.works:
        print(measure(name, given.repeats), flush=True)


if __name__ == "__main__":
    main()
