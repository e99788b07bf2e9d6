"""Memories of EWC, LwF and FLwF-2T: whose they are, how large, that they outlive a run that ends and never travel."""

from collections.abc import Callable
from pathlib import Path

import polars as pl
import pytest

from fclmodels.data.splits.split_reader import Splits
from fclmodels.federation.engine.listener import Listener

METHODS = ["ewc", "lwf", "flwf-2t"]
# Client 0 has a single sample a task, client 1 misses a task, client 2 joins at the third.
UNEVEN = {(0, 0): 1, (1, 0): 1, (2, 0): 1, (0, 1): 9, (2, 1): 5, (2, 2): 7, (3, 2): 4, (1, 3): 6, (0, 3): 3, (3, 0): 1}
HARD = (
    "model.backbone=resnet18",
    "augment.crop_padding=1",
    "optimizer.momentum=0.9",
    "federation.clients_per_round=2",
    "federation.checkpoint_seconds=0",
)
HEADER = 4000  # bytes of names and places that a file begins with


@pytest.fixture
def uneven(splits_of: Callable[..., Splits]) -> Splits:
    return splits_of(tasks=4, train=UNEVEN)


def parameters(tasks: int, inputs: int = 36, hidden: int = 12) -> int:
    """Of the multi-layer perceptron with a row for each of two classes a task."""
    return inputs * hidden + 2 * hidden**2 + 3 * hidden + 2 * tasks * (hidden + 1)


@pytest.mark.parametrize("method", METHODS)
def test_only_the_model_travels_and_what_is_kept_is_counted(
    method: str, experiment_of: Callable, uneven: Splits, tmp_path: Path
) -> None:
    experiment_of("federation.clients_per_round=2", method=method, splits=uneven).run(tmp_path / "run")
    ledger = pl.read_parquet(tmp_path / "run" / "ledger.parquet")
    up, down, kept = (ledger.filter(pl.col("direction") == way) for way in ("up", "down", "kept"))
    assert set(up["part"]) == {"update", "weight"}
    assert set(up["round"]) == {0, 1}
    assert set(down["part"]) == {"weights"} | ({"anchor"} if method != "ewc" else set())
    assert set(down.filter(pl.col("round") < 0)["task"]) == (set(range(4)) if method != "lwf" else set())
    numbers = {"ewc": 2, "lwf": 0, "flwf-2t": 1}[method]
    asked = kept.filter(pl.col("round") < 0).iter_rows(named=True)
    sizes = {(row["task"], row["client"]): row["bytes"] for row in asked}
    assert sizes.keys() == (UNEVEN.keys() if numbers else set())
    for (task, _), size in sizes.items():
        content = 4 * numbers * parameters(task + 1)
        assert content < size < content + HEADER


@pytest.mark.slow
@pytest.mark.parametrize("method", METHODS)
def test_memories_follow_their_clients_wherever_they_run(
    method: str, experiment_of: Callable, uneven: Splits, remains: Callable, tmp_path: Path
) -> None:
    workers = ("federation.executor=processes", "federation.workers=2")
    for name, where in (("serial", ()), ("workers", workers)):
        experiment_of(*HARD[1:], *where, method=method, splits=uneven).run(tmp_path / name)
    assert remains(tmp_path / "serial") == remains(tmp_path / "workers")


class Stop(Listener):
    """Ends a run in the middle of a round."""

    def on_client_done(self, task: int, round: int, done: int, of: int) -> None:
        if (task, round, done) == (2, 1, 1):
            raise KeyboardInterrupt


@pytest.mark.slow
@pytest.mark.parametrize("method", METHODS)
def test_memories_outlive_an_interruption(
    method: str, experiment_of: Callable, uneven: Splits, remains: Callable, tmp_path: Path
) -> None:
    home = tmp_path / "home"
    with (
        pytest.raises(KeyboardInterrupt),
        experiment_of(*HARD, method=method, splits=uneven, home=home, listener=Stop()) as experiment,
    ):
        experiment.run(tmp_path / "resumed")
    experiment_of(*HARD, method=method, splits=uneven, home=home).run(tmp_path / "resumed")
    experiment_of(*HARD, method=method, splits=uneven).run(tmp_path / "whole")
    assert remains(tmp_path / "resumed") == remains(tmp_path / "whole")
