"""Labels of readings, and of those that depend on the evaluation batch."""

import polars as pl
import pytest
from run_folders import HtmlTables, change_result, write_run

from fclmodels import metrics
from fclmodels.report import labels
from fclmodels.report.page import render_page
from fclmodels.tables import READINGS


def test_readings_of_whole_batches_name_the_batch(tmp_path):
    folder = write_run(tmp_path / "a", "fedprotip", 0, tasks=2, settings={"evaluation": {"batch_size": 48}})
    accuracy = pl.read_parquet(folder / "accuracy.parquet")
    names = {"task_predicted": "paper_task_predicted", "task_aware": "mixed_batch_task_predicted"}
    more = [accuracy.filter(pl.col("reading") == of).with_columns(reading=pl.lit(name)) for of, name in names.items()]
    accuracy = pl.concat([accuracy, *more])
    accuracy.write_parquet(folder / "accuracy.parquet")
    values = metrics.compute_metrics(accuracy)
    for reading in ("task_predicted", *names.values()):
        values[reading]["tip_acc"] = 0.5
    change_result("metrics", values)(folder)
    heads = [row[0] for row in HtmlTables(render_page([folder])).headed("Avg ↑")[0] if len(row) == 1]
    assert heads == [
        "Task-aware",
        "Task-agnostic",
        "Task predicted",
        "Task predicted, mixed batches (48 a batch)",
        "Task predicted, paper protocol (48 a batch)",
    ]


def test_every_reading_has_a_label():
    assert tuple(labels.READINGS) == READINGS


@pytest.mark.parametrize(
    ("names", "words"),
    [
        (["task_aware", "task_predicted"], []),
        (["task_predicted", "mixed_batch_task_predicted"], ["mixed-batch: ", "others: per sample", "32 samples"]),
        (["paper_task_aware", "mixed_batch_task_predicted"], ["mixed-batch: ", "paper: batches of one task", "32"]),
    ],
)
def test_whole_batches_are_explained_where_they_are_shown(names, words):
    text = labels.explain_batches(names, "32")
    assert (text is None) == (words == [])
    assert all(part in text for part in words)
    assert text is None or ("paper:" in text) == ("paper_task_aware" in names)
