"""Runs of params.yaml (the embedded digits) with and without secure aggregation, side by side.

    python bench/secagg_digits.py [fedavg fot special fedprotip] [--set KEY=VALUE ...]

For each method: the largest difference between weights of the two models after the last task, each accuracy, the median
seconds of a round (one process, files of the protocol included), and bytes up. fedprotip runs with sketches and mean
references, in both. A third run, `nudged`, is plain again with the weights of the first model one part in 2^23 larger:
what a last bit comes to in as many steps of training.
"""

import argparse
import tempfile
from pathlib import Path

import polars as pl
from torch import Tensor

from fclmodels.data.splits.make_splits import make_splits
from fclmodels.data.splits.split_reader import Splits
from fclmodels.experiment.experiment import Experiment
from fclmodels.settings import load as reading

DEFAULTS = Path(__file__).parents[1] / "params.yaml"
SUMS = ["methods.fedprotip.exchange=sketch", "methods.fedprotip.tip_reference=mean"]


def run(
    method: str, settings: list[str], splits: Splits, folder: Path, nudge: float = 0.0
) -> tuple[dict[str, Tensor], str]:
    with Experiment(reading.load_params(DEFAULTS, settings), method, 0, splits, folder / "home") as experiment:
        network, draw = experiment.method.network, experiment.method.network.make_initial_weights
        network.make_initial_weights = lambda spec: {n: W * (1 + nudge) for n, W in draw(spec).items()}
        result = experiment.run(folder / "run")
        weights = experiment.store.get(result["digests"]["state"])["server"]["weights"]
    accuracy = ", ".join(f"{reading} {m['acc']:.4f}" for reading, m in result["metrics"].items() if "acc" in m)
    seconds = pl.read_parquet(folder / "run" / "rounds.parquet")["seconds"].median()
    return weights, f"ACC {accuracy}; {seconds:.3f} s a round, {result['bytes_up']} bytes up"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("methods", nargs="*", default=["fedavg", "fot", "special", "fedprotip"])
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE")
    options = parser.parse_args()
    shared = ["federation.executor=serial", *SUMS, *options.set]
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        splits = Splits.open(make_splits(reading.load_params(DEFAULTS, shared), folder))
        for method in options.methods:
            plain, summary = run(method, shared, splits, folder / f"{method}-plain")
            print(f"{method}: plain: {summary}", flush=True)
            for name, settings, nudge in (("secagg", ["federation.secagg.on=true"], 0.0), ("nudged", [], 2**-23)):
                other, summary = run(method, [*shared, *settings], splits, folder / f"{method}-{name}", nudge)
                distance = max(float((plain[part] - W).abs().max()) for part, W in other.items())
                print(f"{method}: {name}: {summary}; weights within {distance:.2g}", flush=True)


if __name__ == "__main__":
    main()
