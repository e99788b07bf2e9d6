"""Grid search on val rows for the settings of a comparison. Test rows are never read.

    python bench/tune.py fot --splits data/splits/0 --seeds 100 101 102 --grid optimizer.lr=0.02,0.05,0.1 \\
        --grid methods.fot.threshold=0.9,0.95,0.98 [--params params.yaml] [--set federation.rounds=5]

Prints every point of the grid, the best first: mean over seeds of ACC, forgetting and accuracy right after learning;
last and without figures where a run ended early, as one that diverges does.
"""

import argparse
import itertools
import math
import sys
import tempfile
from pathlib import Path

import numpy as np

from fclmodels.data.splits.split_reader import Rows, Splits
from fclmodels.errors import UserError
from fclmodels.experiment.experiment import Experiment
from fclmodels.settings import load as reading

METRICS = ("acc", "ft", "learning_acc")


class OnVal(Splits):
    """Splits whose evaluation reads val rows."""

    def select_test_rows(self, task: int, client: int | None = None) -> Rows:
        return self.select_rows(task, "val", client)


def evaluate_point(params: Path, overrides: list[str], method: str, seed: int, splits: Splits, by: str) -> list[float]:
    with tempfile.TemporaryDirectory() as home:
        settings = reading.load_params(params, overrides)
        try:
            with Experiment(settings, method, seed, splits, Path(home)) as experiment:
                metrics = experiment.run(Path(home) / "run")["metrics"][by]
        except UserError as problem:
            print(problem, file=sys.stderr)
            return [math.nan] * len(METRICS)
    return [metrics[name] for name in METRICS]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("method")
    parser.add_argument("--splits", type=Path, default=Path("data/splits/0"))
    parser.add_argument("--params", type=Path, default=Path("params.yaml"))
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE")
    parser.add_argument("--grid", action="append", default=[], metavar="KEY=VALUE,VALUE")
    parser.add_argument("--seeds", type=int, nargs="+", default=[100, 101, 102])
    parser.add_argument("--by", default="task_aware")
    options = parser.parse_args()
    axes = [
        [f"{key}={value}" for value in values.split(",")] for key, values in (g.split("=", 1) for g in options.grid)
    ]
    splits = OnVal.open(options.splits)
    means = []
    for point in itertools.product(*axes):
        overrides = [*options.set, *point]
        runs = [
            evaluate_point(options.params, overrides, options.method, seed, splits, options.by)
            for seed in options.seeds
        ]
        means.append((np.mean(runs, axis=0), point))
    for mean, point in sorted(means, key=lambda one: -np.nan_to_num(one[0][0], nan=-1)):
        print("  ".join(f"{name} {100 * value:5.1f}" for name, value in zip(METRICS, mean, strict=True)), *point)


if __name__ == "__main__":
    main()
