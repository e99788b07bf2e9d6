"""Frames of a comparison: means and deviations over seeds, curves, cells, bytes and ledgers."""

import numpy as np
import polars as pl
import pytest
from run_folders import read_results

from fclmodels.metrics import select_shown
from fclmodels.report.comparison import (
    compare_folders,
    compute_mean_and_std,
    list_accuracy_cells,
    list_accuracy_curves,
    sum_bytes_by_task,
    summarise_ledger,
)
from fclmodels.report.read_runs import group_runs, read_runs


def test_comparison_is_mean_and_sample_deviation_over_seeds(folders):
    table = compare_folders(folders)
    row = table.row(by_predicate=(pl.col("reading") == "task_agnostic") & (pl.col("method") == "fedavg"), named=True)
    fedavg = [result for result in read_results(folders) if result["method"] == "fedavg"]
    for name in ("acc", "ft", "learning_acc", "worst_client_acc"):
        values = [result["metrics"]["task_agnostic"][name] for result in fedavg]
        assert (row[name], row[f"{name}_std"]) == pytest.approx((np.mean(values), np.std(values, ddof=1)))
    assert row["seconds_std"] == pytest.approx(np.std([result["seconds"] for result in fedavg], ddof=1))
    assert row["seeds"] == 3


def test_comparison_has_a_row_for_each_reading_that_a_method_has_and_references_last(folders):
    rows = compare_folders(folders).select("reading", "method").rows()
    assert rows == [
        ("task_aware", "fedavg"),
        ("task_aware", "fedprotip"),
        ("task_aware", "joint"),
        ("task_agnostic", "fedavg"),
        ("task_agnostic", "fedprotip"),
        ("task_agnostic", "joint"),
    ]


def test_what_a_run_does_not_define_is_null(folders):
    joint = compare_folders(folders).filter(pl.col("method") == "joint").row(0, named=True)
    assert joint["acc"] > 0.5
    assert [joint[name] for name in ("learning_acc", "ft", "fgt", "bwt", "af", "pd", "worst_drop")] == [None] * 7


def test_one_seed_has_no_standard_deviation(folders):
    table = compare_folders(folders[3:4])
    assert table["seeds"].to_list() == [1, 1]
    assert not table.select(pl.col("^.*_std$").is_not_null().any()).row(0).count(True)


@pytest.mark.parametrize(
    ("values", "expected"),
    [([0.2, 0.4], (0.3, np.sqrt(0.02))), ([0.2], (0.2, None)), ([0.2, None], (None, None)), ([], (None, None))],
)
def test_spread(values, expected):
    # (0.2 - 0.3)^2 + (0.4 - 0.3)^2 = 0.02, over n - 1 = 1
    assert compute_mean_and_std(values) == (pytest.approx(expected) if None not in expected else expected)


def test_comparison_has_the_task_prediction_where_there_is_one(predicting):
    rows = compare_folders(predicting).select("reading", "method", "tip_acc", "tip_acc_std").rows()
    defined = [row for row in rows if row[2] is not None]
    assert defined == [("task_predicted", "fedprotip", pytest.approx(0.7625), pytest.approx(0.225 / np.sqrt(2)))]
    assert [row[1] for row in rows if row[0] == "task_predicted"] == ["fedprotip"]
    assert ("task_agnostic", "fedavg") in [row[:2] for row in rows]


def test_curves_end_at_acc_and_average_to_avg(folders):
    curves = list_accuracy_curves(folders)
    for result in read_results(folders):
        for reading, expected in select_shown(result["metrics"]).items():
            of = (pl.col("method") == result["method"], pl.col("seed") == result["seed"], pl.col("reading") == reading)
            line = curves.filter(*of)
            assert line["learned"].to_list() == [1, 2, 3]
            assert line["accuracy"][-1] == pytest.approx(expected["acc"])
            if expected["avg"] is not None:
                assert line["accuracy"].mean() == pytest.approx(expected["avg"])


def test_cells_are_the_accuracy_table(folders):
    cells = list_accuracy_cells(folders[3:4]).filter(pl.col("reading") == "task_agnostic")
    table = pl.read_parquet(folders[3] / "accuracy.parquet").filter(
        pl.col("reading") == "task_agnostic", pl.col("client").is_null()
    )
    assert cells.height == 4 * 3
    for after, task, correct, total in table.select("after", "task", "correct", "total").rows():
        cell = cells.filter(pl.col("learned") == after, pl.col("task") == task + 1)
        assert cell["accuracy"].item() == pytest.approx(correct / total)


def test_cells_that_were_not_measured_are_null(folders):
    cells = list_accuracy_cells(folders[:1])
    assert cells.filter(pl.col("learned") < 3)["accuracy"].is_null().all()
    assert cells.filter(pl.col("learned") == 3)["accuracy"].is_not_null().all()


def test_bytes_by_task_add_up_to_the_runs_traffic(folders):
    table = sum_bytes_by_task(folders[3:])
    sums = table.group_by("method", "seed", maintain_order=True).agg(pl.col("bytes_up", "bytes_down").sum())
    for result, sent in zip(read_results(folders[3:]), sums.rows(named=True), strict=True):
        assert (sent["bytes_up"], sent["bytes_down"]) == (result["bytes_up"], result["bytes_down"])
    assert table["task"].unique().sort().to_list() == [1, 2, 3]


def test_ledger_by_hand(folders):
    group = next(group for group in group_runs(read_runs(folders)) if group.label == "fedprotip")
    parts = {row["part"]: row for row in summarise_ledger(group).to_dicts()}
    assert list(parts) == ["update", "basis", "reference", "count", "weights"]  # up by size, then down
    # 4 clients, 3 tasks of 2 rounds; three equal runs
    assert parts["update"]["bytes"] == 4 * 3 * 2 * 102_400
    assert (parts["update"]["least"], parts["update"]["in_rounds"], parts["update"]["at_end"]) == ("sum", True, False)
    assert parts["basis"]["bytes"] == 4 * 3 * 60_000
    assert (parts["basis"]["least"], parts["basis"]["in_rounds"], parts["basis"]["at_end"]) == ("each", False, True)
    assert parts["basis"]["largest"] == 60_000
