"""Re-Fed beside itself with random scores, on the demo's stream with half its clients: what the choice alone does.

    python bench/refed_random.py [--lr 0.05] [--lambda 0.8]

Prints ACC without the task and its forgetting, mean and deviation over the seeds 0 to 4, of splits too.
"""

import argparse
import tempfile
from pathlib import Path

import numpy as np
import torch
from runs import ALONE, make_splits

from fclmodels.data.splits.split_reader import Splits
from fclmodels.experiment.experiment import Experiment
from fclmodels.methods.re_fed import ReFed
from fclmodels.settings.load import load_params

PARAMS = Path("params.yaml")


def draw_scores(method: ReFed, surrogate: object, samples: object) -> torch.Tensor:
    """Return random numbers in place of scores."""
    return torch.rand(len(samples.labels), generator=surrogate.client.make_generator("random"))  # type: ignore[attr-defined]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lr", type=float, default=0.05)
    parser.add_argument("--lambda", type=float, default=0.8, dest="lam")
    options = parser.parse_args()
    own = [f"optimizer.lr={options.lr}", f"methods.re-fed.lambda={options.lam}"]
    score = ReFed.score
    for label, function in (("by score", score), ("at random", draw_scores)):
        ReFed.score = function  # type: ignore[assignment,method-assign]
        values = []
        for seed in range(5):
            overrides = ["partition.clients=5", "federation.rounds=6", *ALONE, *own]
            params = load_params(PARAMS, overrides, "re-fed", seed)
            with tempfile.TemporaryDirectory() as name:
                splits = Splits.open(make_splits(params, Path(name)))
                with Experiment(params, "re-fed", seed, splits, Path(name) / "home") as experiment:
                    metrics = experiment.run(Path(name) / "run")["metrics"]["task_agnostic"]
            values.append((metrics["acc"], metrics["fgt"]))
        table = 100 * np.array(values)
        for column, title in enumerate(("ACC", "FGT")):
            print(f"{label:10} {title} {table[:, column].mean():5.1f} ± {table[:, column].std(ddof=1):.1f}")


if __name__ == "__main__":
    main()
