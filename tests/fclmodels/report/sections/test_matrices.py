"""Matrices of the page: predicted tasks, and methods side by side on each task."""

import re

import numpy as np
import polars as pl
import pytest
from run_folders import HtmlTables

from fclmodels.report.formatting import format_percent
from fclmodels.report.page import render_page
from fclmodels.report.paired_differences import estimate_interval


def test_page_shows_which_task_was_taken_for_which(predicting):
    text = render_page(predicting)
    section = text[text.index('<section id="predicted">') : text.index('<section id="cost">')]
    (matrix,) = HtmlTables(section).tables
    # seed 0: 80 and 20 of a task's hundred, 50 and 50; seed 1: 75 and 25, 0 and 100
    assert matrix == [["", "1", "2"], ["1", "78", "22"], ["2", "25", "75"]]
    # seed 0: (80 + 50) / 2 = 65 predicted right, seed 1: 87.5; their mean and deviation 22.5 / sqrt(2)
    caption = " ".join(re.sub("<.*?>", " ", re.search("<caption>(.*?)</caption>", section)[1]).split())
    assert caption == "Task predicted 76.2 ± 15.9 % right, n = 2"
    assert re.findall(r"<h3>.*?<span>(.*?)</span>", section) == ["fedprotip"]
    assert "fedavg" not in section


def test_a_page_without_predicted_tasks_has_no_place_for_them(text):
    assert "Predicted tasks" not in text


def test_methods_stand_side_by_side_on_each_task_with_their_differences_seed_by_seed(folders, text):
    shown = next(rows for rows in HtmlTables(text).tables if rows[0] == ["Method", "1", "2", "3"])
    ends = {"fedavg": [], "fedprotip": [], "joint": []}
    for folder in folders:
        table = pl.read_parquet(folder / "accuracy.parquet")
        last = table.filter(pl.col("reading") == "task_aware", pl.col("after") == 3, pl.col("client").is_null())
        ends[folder.name[:-2]].append(
            last.sort("task").select(pl.col("correct") / pl.col("total")).to_series().to_numpy()
        )
    means = {method: np.mean(of_seeds, axis=0) for method, of_seeds in ends.items()}
    assert [cells[0] for cells in shown[1:]] == ["fedavg", "fedprotip", "joint", "less fedavg", "fedprotip", "joint"]
    differences = [means[method] - means["fedavg"] for method in ("fedprotip", "joint")]
    for cells, expected in zip(shown[1:4] + shown[5:], [*means.values(), *differences], strict=True):
        assert [int(cell.replace("−", "-")) for cell in cells[1:]] == pytest.approx(100 * expected, abs=0.501)
    seeds = np.array(ends["joint"])[:, 0] - np.array(ends["fedavg"])[:, 0]
    low, high = estimate_interval(seeds)
    title = (
        f"joint, task 1: {format_percent(seeds.mean())}, {format_percent(low)} to {format_percent(high)} points, n = 3"
    )
    assert re.search(rf'class="(better|worse)( clear)?"[^>]*title="{re.escape(title)}"', text)[2] == (
        " clear" if low > 0 or high < 0 else None
    )
