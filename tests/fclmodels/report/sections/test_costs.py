"""Costs on the page: against accuracy, of clients that fail, of a round."""

import json

import numpy as np
import polars as pl
import pytest
from run_folders import HtmlTables, write_run

from fclmodels.report.comparison import (
    compare_folders,
)
from fclmodels.report.page import render_page
from fclmodels.report.read_runs import group_runs, read_runs
from fclmodels.report.sections.costs import draw_accuracy_against_costs


def test_accuracy_is_drawn_against_what_it_costs(folders):
    result_by_folder = {folder: json.loads((folder / "result.json").read_text()) for folder in folders}
    by_bytes, by_seconds, *_ = draw_accuracy_against_costs(group_runs(read_runs(folders)))
    assert [spot.index for spot in by_bytes.spots] == [0, 1]  # joint sends nothing
    assert by_bytes.runs == tuple(folders[3:])
    assert by_seconds.runs == (*folders[3:], *folders[:3])
    fedavg = [result_by_folder[folder] for folder in folders[3:6]]
    acc = 100 * np.mean([result["metrics"]["task_aware"]["acc"] for result in fedavg])
    seconds = np.mean([result["seconds"] for result in fedavg])
    assert by_seconds.spots[0].text == f"fedavg: ACC {acc:.1f} %, {seconds:.1f} s"
    assert len(by_seconds.spots[0].near) == 3
    assert draw_accuracy_against_costs(group_runs(read_runs(folders[3:6]))) == []  # nothing to compare


def test_what_became_of_clients_is_told_where_they_could_fail(tmp_path, text):
    counts = {"clients": 60, "missing": 7, "lost": 1, "late": 5, "refused": 2, "dropped": 3, "answers": 47}
    folders = [
        write_run(tmp_path / "fedavg-0", "fedavg", 0, tasks=2, faults=counts),
        write_run(tmp_path / "fedavg-1", "fedavg", 1, tasks=2, faults=counts | {"missing": 9, "answers": 45}),
        write_run(tmp_path / "joint-0", "joint", 0, tasks=2),
    ]
    (table,) = HtmlTables(render_page(folders)).headed("Missing")
    assert table == [
        ["Method", "Sampled", "Missing", "Lost", "Late", "Refused", "Dropped", "Counted"],
        ["fedavg", "60± 0", "8± 1.41", "1± 0", "5± 0", "2± 0", "3± 0", "46± 1.41"],
    ]
    assert HtmlTables(text).headed("Missing") == []


def test_costs_tell_seconds_a_round_and_rounds_to_best_where_they_are_known(tmp_path, folders):
    watched = write_run(tmp_path / "fot-0", "fot", 0, tasks=3, rounds_to_best=11)
    table = compare_folders([*folders[3:6], watched])
    rows = {row["method"]: row for row in table.filter(pl.col("reading") == "task_aware").to_dicts()}
    assert (rows["fot"]["rounds_to_best"], rows["fedavg"]["rounds_to_best"]) == (11, None)
    means = [pl.read_parquet(folder / "rounds.parquet")["seconds"].mean() for folder in folders[3:6]]
    assert rows["fedavg"]["seconds_per_round"] == pytest.approx(np.mean(means))
    (costs,) = HtmlTables(render_page([*folders[3:6], watched])).headed("To best")
    place = costs[0].index("To best")
    assert {cells[0]: cells[place] for cells in costs[1:]} == {"fedavg": "–", "fot": "11"}
    assert "To best" not in render_page(folders[3:6])
