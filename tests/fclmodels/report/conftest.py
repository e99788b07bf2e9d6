"""Run folders of three methods with three seeds each, and the page of them."""

import sys
from pathlib import Path

import polars as pl
import pytest

from fclmodels import metrics
from fclmodels.report.page import render_page

sys.path.insert(0, str(Path(__file__).parent))

from run_folders import change_result, write_confusion, write_run


@pytest.fixture(scope="session")
def folders(tmp_path_factory):
    root = tmp_path_factory.mktemp("runs")
    return [
        write_run(root / f"{m}-{s}", m, s, tasks=3, rounds=2)
        for m in ("joint", "fedavg", "fedprotip")
        for s in (0, 1, 2)
    ]


@pytest.fixture(scope="session")
def text(folders):
    return render_page(folders)


@pytest.fixture
def predicting(tmp_path):
    """Two seeds of a method that predicts tasks, and one that does not."""
    confusions = ([[8, 2], [5, 5]], [[3, 1], [0, 4]])
    folders = [write_run(tmp_path / f"{s}", "fedprotip", s, tasks=2, rounds=1) for s in range(2)]
    for folder, counts in zip(folders, confusions, strict=True):
        write_confusion(folder, counts)
        accuracy, confusion = (pl.read_parquet(folder / f"{name}.parquet") for name in ("accuracy", "confusion"))
        change_result("metrics", metrics.compute_metrics(accuracy, confusion))(folder)
    return [*folders, write_run(tmp_path / "fedavg", "fedavg", 0, tasks=2, rounds=1)]
