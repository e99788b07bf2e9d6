"""Accuracy against epsilon: FedAvg on the embedded digits, updates clipped and with noise (federation.privacy).

    python bench/privacy.py [--seeds 3] [--set KEY=VALUE ...]

Fifty clients with like shares of five tasks of two digits, four rounds a task, all clients in each, a small MLP: few
weights and many clients, as noise wants it. Prints the accuracy after the last task, the task given, over the seeds
(their noise too), and epsilon at delta 1e-3 over all 20 rounds. Test rows are read once, in the evaluation.
"""

import argparse
import statistics
import tempfile
from pathlib import Path

from fclmodels import params as reading
from fclmodels.data.split import splits_of
from fclmodels.data.splits import Splits
from fclmodels.experiment import Experiment

DEFAULTS = Path(__file__).parents[1] / "params.yaml"
SHARED = [
    *("partition.kind=iid", "partition.clients=50", "model.backbone=mlp", "model.hidden=16", "model.dropout=[0,0]"),
    *("federation.rounds=4", "federation.local_epochs=5", "federation.batch_size=8", "federation.weighting=uniform"),
    *("federation.executor=serial", "optimizer.lr=0.1", "model.loss_over=task"),
]
CLIP = ["federation.privacy.clip=0.5", "federation.privacy.delta=1e-3"]
NOISE = {"central": (1.0, 2.0, 4.0, 8.0), "local": (0.5,)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE")
    given = parser.parse_args()
    shared = [*SHARED, *given.set]
    runs = {"no clipping": [], "clipping alone": [*CLIP, "federation.privacy.noise_multiplier=1e-9"]}
    for kind, multipliers in NOISE.items():
        for z in multipliers:
            own = [f"federation.privacy.kind={kind}", f"federation.privacy.noise_multiplier={z}"]
            runs[f"{kind}, z = {z:g}"] = [*CLIP, *own]
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        splits = Splits.open(splits_of(reading.load(DEFAULTS, shared), folder))
        for name, settings in runs.items():
            found = []
            for seed in range(given.seeds):
                params = reading.load(DEFAULTS, [*shared, *settings])
                with Experiment(params, "fedavg", seed, splits, folder / "home") as experiment:
                    found.append(experiment.run(folder / f"{name}-{seed}"))
            accuracies = [100 * result["metrics"]["task_aware"]["acc"] for result in found]
            spread = statistics.stdev(accuracies) if len(accuracies) > 1 else 0.0
            worth = found[0].get("privacy", {}).get("epsilon", float("inf"))
            told = f"epsilon {worth:.3g}" if worth < 1e6 else "no epsilon"
            print(f"{name}: {told}, ACC {statistics.mean(accuracies):.1f} ± {spread:.1f}", flush=True)


if __name__ == "__main__":
    main()
