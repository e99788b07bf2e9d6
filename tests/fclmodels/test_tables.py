"""Tables that a run writes have the declared columns and types."""

from collections.abc import Callable
from pathlib import Path

import polars as pl

from fclmodels import tables


def test_a_run_writes_these_columns(experiment_of: Callable, tmp_path: Path) -> None:
    experiment_of("monitors.accuracy=true", "monitors.every=1").run(tmp_path / "run")
    schemas = {
        "accuracy": tables.ACCURACY,
        "rounds": tables.ROUNDS,
        "ledger": tables.LEDGER,
        "monitors": tables.MONITORS,
    }
    for name, schema in schemas.items():
        assert pl.read_parquet(tmp_path / "run" / f"{name}.parquet").schema == schema


def test_readings_are_named_once() -> None:
    assert len(set(tables.READINGS)) == len(tables.READINGS) == 9
