"""What rivals with personal models cost: seconds a round and a task's whole against FedAvg's, bytes, client memory.

    python bench/personal_costs.py [--turns 5]

The demo's digits in three tasks on half its clients, three rounds each. Methods take turns; each ratio is the median
over turns of a method's seconds over FedAvg's in the same turn: of a round of the second and third task, and of the
whole run, which has what happens between rounds and the evaluation, of clients' own models too.
"""

import argparse
import tempfile
import time
from pathlib import Path

import numpy as np
import polars as pl
from study import ALONE, make_splits

from fclmodels.data.splits.split_reader import Splits
from fclmodels.experiment.experiment import Experiment
from fclmodels.settings.load import load_params

PARAMS = Path("params.yaml")
SHARED = [
    "partition.clients=5",
    "federation.rounds=3",
    "stream.tasks=3",
    "optimizer.kind=sgd",
    "optimizer.lr=0.02",
    *ALONE,
]
FULL = ["methods.fedl2p-meta.steps=15", "methods.fedl2p-meta.outer=3"]
METHODS = (
    "fedavg",
    "er",
    "re-fed",
    "re-fed-plus",
    "fedssi",
    "sr-fdil",
    "feddbe",
    "fedas",
    "pfeddil",
    "fedl2p-meta",
    "fedweit",
)


def run_once(method: str, folder: Path) -> tuple[float, float, tuple[float, float, float]]:
    """Return the seconds of a later round and of the run, MB a round up and down, and MB of a client's memory."""
    params = load_params(PARAMS, [*SHARED, *FULL], method, 0)
    splits = Splits.open(make_splits(params, folder))
    with tempfile.TemporaryDirectory() as home, Experiment(params, method, 0, splits, Path(home)) as experiment:
        started = time.perf_counter()
        result = experiment.run(Path(home) / "run")
        whole = time.perf_counter() - started
        rounds = pl.read_parquet(Path(home) / "run" / "rounds.parquet")
        ledger = pl.read_parquet(Path(home) / "run" / "ledger.parquet")
    count = len(rounds)
    kept = ledger.filter(direction="kept").group_by("client").agg(pl.col("bytes").last())["bytes"]
    megabytes = result["bytes_up"] / count / 1e6, result["bytes_down"] / count / 1e6, (kept.max() or 0) / 1e6
    return float(rounds.filter(pl.col("task") > 0)["seconds"].median()), whole, megabytes  # type: ignore[arg-type]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--turns", type=int, default=5)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        turns = [{method: run_once(method, Path(name)) for method in METHODS} for _ in range(options.turns)]
    print("| | a round, FedAvg's | the run, FedAvg's | MB up a round | MB down a round | MB kept by a client |")
    print("|---" * 6 + "|")
    for method in METHODS:
        ratios = [np.median([turn[method][i] / turn["fedavg"][i] for turn in turns]) for i in (0, 1)]
        up, down, kept = turns[0][method][2]
        print(f"| `{method}` | {ratios[0]:.2f} | {ratios[1]:.2f} | {up:.2f} | {down:.2f} | {kept:.3g} |")


if __name__ == "__main__":
    main()
