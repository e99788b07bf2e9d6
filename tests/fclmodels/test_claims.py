"""What the methods claim, on the embedded digits in four domains, one after another: means over the seeds 0 to 4.

Both sides share the rounds; each has the learning rate and the threshold that bench/tune.py finds best on val rows
with the seeds 100 to 102, in grids of 0.05, 0.1, 0.2 and of 0.85, 0.9, 0.95 (fot), 0.2, 0.3, 0.5 (fedprotip).
"""

import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fclmodels import params as reading
from fclmodels.data.prepare import prepare
from fclmodels.data.split import split
from fclmodels.data.splits import Splits
from fclmodels.experiment import Experiment
from fclmodels.plugins import find

REPOSITORY = Path(__file__).parents[2]
SEEDS = range(5)
STREAM = ["data.source=digits-domains", "stream.kind=domain-incremental", "federation.executor=serial"]
TUNED = {
    "fedavg": ["optimizer.lr=0.05"],
    "fot": ["optimizer.lr=0.1", "methods.fot.threshold=0.9"],
    "fedprotip": ["optimizer.lr=0.1", "methods.fedprotip.threshold=0.2", "model.head=growing"],
}

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


@pytest.fixture(scope="module")
def digits(tmp_path_factory: pytest.TempPathFactory) -> Splits:
    folder = tmp_path_factory.mktemp("digits")
    params = reading.load(REPOSITORY / "params.yaml", STREAM)
    prepare(find("source", params.data.source)(params.data), folder / "prepared")
    stream = find("stream", params.stream.kind)(params.stream)
    partition = find("partition", params.partition.kind)(params.partition)
    split(folder / "prepared", stream, partition, folder / "splits")
    return Splits.open(folder / "splits")


@pytest.fixture(scope="module")
def measured(digits: Splits, tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, np.ndarray]]:
    """The task-aware metrics of each method, one value a seed."""
    return {method: task_aware(method, digits, tmp_path_factory.mktemp(method)) for method in TUNED}


def task_aware(method: str, splits: Splits, folder: Path) -> dict[str, np.ndarray]:
    params = reading.load(REPOSITORY / "params.yaml", [*STREAM, *TUNED[method]])
    found: list[dict[str, Any]] = []
    for seed in SEEDS:
        with Experiment(params, method, seed, splits, folder) as experiment:
            found.append(experiment.run(folder / f"run-{seed}")["metrics"]["task_aware"])
    values = {name: np.array([metrics[name] for metrics in found]) for name in ("acc", "fgt", "learning_acc")}
    for name, of_seeds in values.items():
        line = f"{method:9} {name:12} mean {100 * of_seeds.mean():5.1f}  seeds {np.round(100 * of_seeds, 1)}\n"
        sys.stdout.write(line)
    return values


@pytest.mark.parametrize("method", ["fot", "fedprotip"])
def test_it_forgets_less_than_half_of_what_fedavg_does(method: str, measured: dict[str, Any]) -> None:
    ours, fedavg = (measured[name]["fgt"].mean() for name in (method, "fedavg"))
    assert fedavg > 0.01
    assert ours < fedavg / 2


@pytest.mark.parametrize("method", ["fot", "fedprotip"])
def test_it_learns_as_well_within_3_points(method: str, measured: dict[str, Any]) -> None:
    assert measured[method]["learning_acc"].mean() > measured["fedavg"]["learning_acc"].mean() - 0.03


@pytest.mark.parametrize("method", ["fot", "fedprotip"])
def test_its_final_accuracy_is_higher(method: str, measured: dict[str, Any]) -> None:
    assert measured[method]["acc"].mean() > measured["fedavg"]["acc"].mean()
