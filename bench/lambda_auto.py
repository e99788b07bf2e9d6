"""SPECIAL's `lambda: auto` beside fixed lambdas, on the embedded digits: four domains, and five tasks of new classes.

    python bench/lambda_auto.py [domains classes] [--seeds 10 11 12]

A row a lambda, means over seeds: ACC, BWT and accuracy right after learning on test rows, and ACC on val rows, by which
alone a lambda may be chosen; * marks the fixed one that they choose. lambda 0 is FedAvg. New classes are read
task-aware: without the task nearly every answer is one of the last task's classes, whatever lambda is.

The rule and its tolerance were settled on these streams with the seeds 0 and 1, looking at test rows: seeds below 10
are not for comparing. With --set other settings than those can be looked at, such as federation.clients_per_round=4.
"""

import argparse
import tempfile
from pathlib import Path

import numpy as np
from families import OnVal

from fclmodels.data.splits.make_splits import make_splits
from fclmodels.data.splits.split_reader import Splits
from fclmodels.experiment.experiment import Experiment
from fclmodels.federation.evaluation import evaluate
from fclmodels.federation.run_context import Run
from fclmodels.federation.server import Server
from fclmodels.methods.special import Special
from fclmodels.metrics import acc, accuracy_matrix
from fclmodels.settings import load as reading
from fclmodels.settings.schema import Params

PARAMS = Path(__file__).parents[1] / "params.yaml"
STREAMS = {
    "domains": (
        "task_agnostic",
        ["data.source=digits-domains", "stream.kind=domain-incremental", "federation.rounds=20", "optimizer.lr=0.1"],
    ),
    "classes": ("task_aware", []),
}
SHARED = ["federation.local_epochs=5", "federation.executor=serial", "federation.threads=1"]
GRID = ("0", "0.05", "0.1", "0.2", "0.4", "0.8", "1.6", "3.2")
METRICS = ("acc", "bwt", "learning_acc")


def measure(params: Params, seed: int, splits: Splits, by: str) -> list[float]:
    """Return METRICS on test rows, and ACC on val rows."""
    with tempfile.TemporaryDirectory() as home, Experiment(params, "special", seed, splits, Path(home)) as experiment:
        result = experiment.run(Path(home) / "run")
        server = Server.from_tree(experiment.store.get(result["digests"]["state"])["server"])
    on_val = Special(reading.load_method_settings(params, "special"), Run.on(params, OnVal.open(splits.folder), seed))
    final = acc(accuracy_matrix(evaluate(on_val, server).accuracy, by))
    assert final is not None
    return [*(result["metrics"][by][name] for name in METRICS), final]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("streams", nargs="*", default=list(STREAMS), help=f"of {', '.join(STREAMS)}")
    parser.add_argument("--seeds", type=int, nargs="+", default=[10, 11, 12])
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE")
    options = parser.parse_args()
    for name in options.streams:
        by, stream = STREAMS[name]
        settings = [*stream, *SHARED, *options.set]
        with tempfile.TemporaryDirectory() as folder:
            splits, metrics_by_lambda = (
                Splits.open(make_splits(reading.load_params(PARAMS, settings), Path(folder))),
                {},
            )
            for lam in (*GRID, "auto"):
                params = reading.load_params(PARAMS, [*settings, f"methods.special.lambda={lam}"])
                metrics_by_lambda[lam] = 100 * np.array([measure(params, seed, splits, by) for seed in options.seeds])
        best = max(GRID, key=lambda lam: metrics_by_lambda[lam][:, -1].mean())
        print(f"{name}, {by}, seeds {options.seeds}")
        for lam, values in metrics_by_lambda.items():
            means = "  ".join(f"{m} {v:5.1f}" for m, v in zip((*METRICS, "val"), values.mean(0), strict=True))
            print(f"{lam + '*' * (lam == best):>6}  {means}  acc of each seed {np.round(values[:, 0], 1)}", flush=True)


if __name__ == "__main__":
    main()
