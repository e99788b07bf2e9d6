"""The benchmarks' own logic: what becomes of turns, what is kept in files, and how two of these compare."""

import importlib
import itertools
import json
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import polars as pl
import pytest
from typer.testing import CliRunner

from fclmodels import plugins
from fclmodels.errors import UserError
from flows.cli import inspect_commands
from flows.cli.app import app

BENCH = Path(__file__).parents[1] / "bench"


@pytest.fixture
def module(monkeypatch: pytest.MonkeyPatch) -> Any:
    """One of bench/ by name: scripts that find each other in their own folder."""
    monkeypatch.syspath_prepend(str(BENCH))
    return importlib.import_module


@pytest.fixture
def suite(module: Any) -> ModuleType:
    return module("suite")


def a_row(suite: ModuleType, name: str = "one", ours: tuple = (1.0, 2.0, 30.0), limit: float | None = None) -> Any:
    return suite.Row(name, "ours, theirs", ours, (1.0, 1.0, 10.0)[: len(ours)], limit=limit)


def test_a_ratio_is_the_median_of_the_turns(suite: ModuleType) -> None:
    """Not the quotient of the medians, which is 3 / 2 here."""
    row = suite.Row("one", "", (2.0, 8.0, 3.0), (1.0, 2.0, 10.0))
    assert row.ratios == [2.0, 4.0, 0.3]
    assert row.ratio == 2.0
    assert row.spread == (1.15, 3.0)
    assert a_row(suite, ours=(1.5,)).spread == (1.5, 1.5)


def test_a_limit_is_kept_or_missed_or_none(suite: ModuleType) -> None:
    assert [a_row(suite, limit=limit).is_within_limit for limit in (2.0, 1.99, None)] == [True, False, None]


def test_turns_go_back_and_forth_and_the_first_one_warms_up(module: Any) -> None:
    order: list[str] = []
    ticks = itertools.count()
    sides = {name: (lambda name=name: order.append(name)) for name in "abc"}
    seconds = module("measuring").take_turns(sides, 2, lambda: float(next(ticks) ** 2))
    assert "".join(order) == "abccbaabc"
    # Side a runs between ticks 10 and 11, then 12 and 13; what is before is the warm-up.
    assert seconds == {"a": [21.0, 25.0], "b": [17.0, 29.0], "c": [13.0, 33.0]}


def test_memory_of_a_tree_holds_that_of_its_children(module: Any) -> None:
    measuring = module("measuring")
    child = "x = bytearray(80 * 2**20); import time; time.sleep(0.6)"
    parent = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {child!r}])"
    most, _ = measuring.measure_peak_of_tree([sys.executable, "-c", parent], measuring.ANONYMOUS)
    assert 80 < most < 140
    with pytest.raises(RuntimeError, match="ZeroDivisionError"):
        measuring.measure_peak_of_tree([sys.executable, "-c", "1 / 0"], measuring.ALL)


def test_every_benchmark_has_a_name_of_its_own(suite: ModuleType) -> None:
    kinds = [*suite.KINDS, suite.COSTS, suite.PEERS]
    benches = [bench for kind in kinds for bench in importlib.import_module(kind).BENCHES]
    assert len(suite.list_benchmarks(kinds)) == len(benches)
    assert not {bench.name for bench in benches} & set(kinds)


def test_costs_of_methods_are_measured_where_they_are_named(suite: ModuleType) -> None:
    """Each has rows of its own; without a name the whole would take longer than half an hour."""
    benchmarks = suite.list_benchmarks([*suite.KINDS, suite.COSTS])
    named = suite.select_benchmarks([suite.COSTS], benchmarks)
    assert {name.removeprefix("costs-") for name in named} == set(plugins.load_all("method")) - {"fedavg", "joint"}
    assert not set(named) & set(suite.select_benchmarks([], benchmarks))


def test_a_run_goes_on_where_it_stopped(
    suite: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    """What is in the file is not measured again, but what failed is."""
    measured_names: list[str] = []
    fails = {"b"}

    def measured(name: str, kind: str, turns: int | None) -> list[dict[str, Any]]:
        measured_names.append(name)
        row = {"row": name, "problem": "no room"} if name in fails else suite.build_row(a_row(suite, name))
        return suite.build_table([{"benchmark": name, "kind": kind, **row}]).to_dicts()

    benchmarks = {name: ("kind", suite.Bench(name, lambda turns: [], 1)) for name in "abc"}
    monkeypatch.setattr(suite, "run_benchmark", measured)
    monkeypatch.setattr(suite, "list_benchmarks", lambda kinds: benchmarks)
    file = tmp_path / "run.parquet"
    for names in (["a", "b"], ["kind", "--json"]):
        monkeypatch.setattr(sys, "argv", ["suite.py", *names, "--out", str(file)])
        suite.main()
        fails.clear()
    assert measured_names == ["a", "b", "b", "c"]
    output = capsys.readouterr().out
    assert "| b | | | | | | no room |" in output
    assert "| a | 2.000 | 1.500-2.500 |  | 2 | 1 s | ours, theirs |" in output
    table = pl.read_parquet(file)
    assert table.schema == suite.SCHEMA
    assert sorted(table["row"]) == ["a", "b", "c"]
    assert table["problem"].null_count() == 3
    assert json.loads(output.splitlines()[-1])[0]["ours"] == [1.0, 2.0, 30.0]


def test_two_runs_side_by_side(suite: ModuleType, module: Any) -> None:
    compare = module("compare")
    sides = []
    for commit, rows in (("x", {"same": (1.0, 1.1, 10.5), "old": (2.0,)}), ("y", {"same": (3.0, 3.1, 33.0)})):
        output = (suite.build_row(a_row(suite, name, ours)) for name, ours in rows.items())
        sides.append(suite.build_table({**row, "commit": commit, "torch": "2"} for row in output))
    rows = compare.join_runs(*sides).to_dicts()
    assert [row["row"] for row in rows] == ["same", "old"]
    assert rows[0]["change"] == pytest.approx(3.1 / 1.05)
    assert (rows[0]["apart"], rows[1]["apart"], rows[1]["ratio_b"]) == (True, None, None)
    assert compare.list_differing_facts(*sides) == {"commit": ("x", "y")}
    assert "| old | 2.000 (2.000-2.000) |  |  |" in compare.format_markdown(compare.join_runs(*sides))


def test_without_a_checkout_one_line_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(inspect_commands, "ROOT", tmp_path)
    problem = CliRunner().invoke(app, ["bench"]).exception
    assert isinstance(problem, UserError)
    assert "come with a checkout" in str(problem)


@pytest.mark.slow
def test_the_command_measures_and_keeps(tmp_path: Path) -> None:
    file = tmp_path / "run.parquet"
    command = [
        sys.executable,
        "-m",
        "flows.cli.app",
        "bench",
        "w1-fedavg",
        "--turns",
        "1",
        "--json",
        "--out",
        str(file),
    ]
    rows = json.loads(subprocess.run(command, capture_output=True, text=True, check=True).stdout)
    assert [row["row"] for row in rows] == ["w1-fedavg", "w1-fedavg-layers"]
    for row in rows:
        assert row["problem"] is None
        assert row["ratio"] == pytest.approx(row["ours"][0] / row["yardstick"][0])
        assert row["cores"] > 0
        assert row["cpu"] != ""
    assert pl.read_parquet(file).to_dicts() == rows
