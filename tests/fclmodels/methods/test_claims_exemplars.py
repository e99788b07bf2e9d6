"""What rehearsal claims, over five seeds of tiny splits, each with samples and shares of its own: it remembers.

Without being told the task, the final accuracy over three tasks of two classes is on average 10 points above FedAvg's.
docs/results/exemplars.md has figures on the digits, with rates that val rows choose, and what does not hold there.
"""

from collections.abc import Callable

import pytest

from fclmodels.data.splits.split_reader import Splits
from fclmodels.experiment.experiment import Experiment

SEEDS = range(5)
SHARED = ("federation.rounds=4", "federation.local_epochs=3")
RATES = {
    **dict.fromkeys(("icarl", "glfc", "lga"), 0.5),
    **dict.fromkeys(("ss-il", "bic", "geodl-icarl", "dde-icarl", "glfc-fot", "podnet", "afc"), 0.1),
}
WITHOUT_PROXY = ("methods.glfc.proxy=false", "methods.lga.proxy=false")

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


@pytest.fixture(scope="module")
def accuracy(
    new_experiment: Callable[..., Experiment],
    splits_of: Callable[..., Splits],
    tmp_path_factory: pytest.TempPathFactory,
) -> Callable[..., list[float]]:
    """The final accuracy of a method on each seed's splits: clients have 8, 14 or 20 samples of a task, or none."""

    def measure(method: str, *settings: str) -> list[float]:
        values = []
        for seed in SEEDS:
            sizes = {(t, c): 8 + 6 * ((t + c + seed) % 3) for t in range(3) for c in range(4) if (t + seed) % 4 != c}
            splits, folder = splits_of(tasks=3, train=sizes, noise=60, seed=seed), tmp_path_factory.mktemp(method)
            with new_experiment(*SHARED, *settings, method=method, seed=seed, splits=splits, home=folder) as experiment:
                values.append(experiment.run(folder / "run")["metrics"]["task_agnostic"]["acc"])
        return values

    return measure


@pytest.fixture(scope="module")
def fedavg(accuracy: Callable[..., list[float]]) -> list[float]:
    return accuracy("fedavg")


@pytest.mark.parametrize("method", RATES)
def test_it_ends_above_fedavg(method: str, accuracy: Callable[..., list[float]], fedavg: list[float]) -> None:
    mine = accuracy(method, f"optimizer.lr={RATES[method]}", *WITHOUT_PROXY)
    assert sum(mine) / len(mine) > sum(fedavg) / len(fedavg) + 0.1, (mine, fedavg)
