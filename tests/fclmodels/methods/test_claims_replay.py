"""What LODE, SCR, PEC and the approximation of RGO claim, on the embedded digits: means over five seeds.

Each seed has an order of classes and a partition of its own. Three rounds of two epochs; settings as
bench/studies/replay.yaml finds them on val rows, at a third of its rounds.
"""

import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from fclmodels.data.splits.split_reader import Splits
from fclmodels.experiment.experiment import Experiment
from fclmodels.settings import load as reading

DEFAULTS = Path(__file__).parents[3] / "params.yaml"
SHARED = ["federation.rounds=3", "federation.local_epochs=2", "federation.executor=serial", "optimizer.lr=0.1"]
ADAM = ["optimizer.kind=adam", "optimizer.lr=0.01", "methods.pec.teacher=10"]
OWN = {"fedavg": [], "lode": ["methods.lode.rho=0.3"], "scr": [], "pec": ADAM}
OWN |= {"rgo-approx": ["methods.rgo-approx.share=1", "methods.rgo-approx.damping=0.03"]}
SEEDS = range(5)

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]


@pytest.fixture(scope="module")
def measured(
    split_of: Callable[[list[str]], Splits], tmp_path_factory: pytest.TempPathFactory
) -> dict[str, dict[str, np.ndarray]]:
    """Each method's ACC without the task, and its forgetting with it, one value a seed; printed."""
    folder = tmp_path_factory.mktemp("seeds")
    of_seeds: dict[str, list[tuple[float, float]]] = {method: [] for method in OWN}
    for seed in SEEDS:
        splits = split_of([f"stream.seed={seed}", f"partition.seed={seed}"])
        for method, own in OWN.items():
            params = reading.load_params(DEFAULTS, [*SHARED, *own], method, seed)
            with Experiment(params, method, seed, splits, folder) as experiment:
                metrics = experiment.run(folder / f"{method}-{seed}")["metrics"]
            of_seeds[method].append((metrics["task_agnostic"]["acc"], metrics["task_aware"]["fgt"]))
    values = {method: dict(zip(("acc", "fgt"), np.array(rows).T, strict=True)) for method, rows in of_seeds.items()}
    for method, row in values.items():
        sys.stdout.write(f"{method:10} {' '.join(f'{name} {100 * of.mean():5.1f}' for name, of in row.items())}\n")
    return values


@pytest.mark.parametrize("method", ["lode", "scr", "pec"])
def test_it_remembers_without_the_task_where_fedavg_knows_the_last_classes_alone(
    method: str, measured: dict[str, dict[str, np.ndarray]]
) -> None:
    assert measured["fedavg"]["acc"].mean() < 0.25
    assert measured[method]["acc"].mean() > 0.5


def test_pec_forgets_nothing_with_the_task(measured: dict[str, dict[str, np.ndarray]]) -> None:
    assert not measured["pec"]["fgt"].any()


def test_the_approximation_of_rgo_forgets_less_with_the_task(measured: dict[str, dict[str, np.ndarray]]) -> None:
    assert measured["rgo-approx"]["fgt"].mean() < measured["fedavg"]["fgt"].mean()
