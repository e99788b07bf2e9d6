"""Bytes of one client in each task, from ledgers whose sums are done by hand."""

from pathlib import Path
from typing import Any

import polars as pl
import pytest

from fclmodels.errors import UserError
from fclmodels.report.traffic import measure_traffic
from fclmodels.tables import LEDGER

Row = tuple[int, int, int, str, str, int]  # task, round, client, direction, kind, bytes


def write(folder: Path, rows: list[Row]) -> Path:
    folder.mkdir(parents=True)
    full = [(t, r, c, direction, f"a {kind}", kind, "sum", size, None) for t, r, c, direction, kind, size in rows]
    pl.DataFrame(full, LEDGER, orient="row").write_parquet(folder / "ledger.parquet")
    return folder


def cells(table: pl.DataFrame, **which: Any) -> list[tuple[int, int, float, float, float]]:
    selected = table.filter(*(pl.col(name) == value for name, value in which.items()))
    return selected.select("task", "clients", "times", "bytes_each", "bytes_per_client").rows()


def test_exchanges_at_the_end_are_apart_from_rounds_and_added_up_for_a_client(tmp_path: Path) -> None:
    run = write(
        tmp_path / "a",
        [
            (0, 0, 1, "up", "update", 40),
            (0, 0, 2, "up", "update", 40),
            (0, 1, 1, "up", "update", 40),
            (0, -1, 1, "up", "basis", 100),
            (0, -1, 2, "up", "basis", 300),
            (0, -2, 1, "up", "basis", 20),
            (0, -2, 2, "up", "basis", 20),
            (1, -1, 2, "up", "basis", 7),
        ],
    )
    table = measure_traffic([run])
    assert cells(table, when="rounds") == [(1, 2, 1.5, 40, 60)]
    assert cells(table, when="end of task") == [(1, 2, 2, 110, 220), (2, 1, 1, 7, 7)]


def test_parts_of_one_kind_in_one_message_are_one(tmp_path: Path) -> None:
    """Bases and their complements travel together."""
    run = write(tmp_path / "a", [(0, 0, 1, "down", "basis", 8), (0, 0, 1, "down", "basis", 4)])
    assert cells(measure_traffic([run])) == [(1, 1, 1, 12, 12)]


def test_of_what_is_kept_the_last_counts(tmp_path: Path) -> None:
    memories = [(0, 0, 1, 10), (0, 1, 1, 20), (0, 0, 2, 50), (0, -1, 1, 30), (1, 0, 1, 5)]
    run = write(tmp_path / "a", [(t, r, c, "kept", "memory", size) for t, r, c, size in memories])
    assert cells(measure_traffic([run]), when="kept") == [(1, 2, 1, 40, 40), (2, 1, 1, 5, 5)]


def test_runs_stand_side_by_side_in_the_order_given(tmp_path: Path) -> None:
    rows: list[Row] = [(0, -1, 1, "up", "sketch", 6), (0, -1, 1, "up", "count", 1), (0, -1, 1, "down", "basis", 2)]
    folders = [write(tmp_path / name, rows) for name in ("b", "a")]
    order = measure_traffic(folders).select("direction", "kind", "run").rows()
    b, a = map(str, folders)
    assert order == [
        *(("up", "count", b), ("up", "count", a), ("up", "sketch", b), ("up", "sketch", a)),
        *(("down", "basis", b), ("down", "basis", a)),
    ]


def test_a_folder_without_a_ledger_is_named(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no such run folder"):
        measure_traffic([tmp_path / "none"])
    (tmp_path / "empty").mkdir()
    with pytest.raises(UserError, match=r"no ledger\.parquet"):
        measure_traffic([tmp_path / "empty"])
