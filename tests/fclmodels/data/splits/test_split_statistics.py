"""Statistics of a manifest, against SciPy and numbers worked out by hand."""

import math

import numpy as np
import polars as pl
import scipy.stats
from hypothesis import given
from hypothesis import strategies as st
from numpy.testing import assert_allclose

from fclmodels.data.splits.split_statistics import summarise, tabulate

ROWS = [  # task, client, split, label
    *[(0, 0, "train", 0)] * 3,
    (0, 0, "train", 1),
    (0, 0, "val", 1),
    *[(0, 1, "train", 1)] * 2,
    *[(0, 0, "test", 0)] * 5,
    (1, 1, "train", 2),
    (1, 1, "train", 3),
]


def manifest(rows: list[tuple]) -> pl.DataFrame:
    return pl.DataFrame(rows, schema=["task", "client", "split", "label"], orient="row")


def test_a_share_has_samples_classes_and_the_entropy_of_its_labels() -> None:
    table = tabulate(manifest(ROWS))
    assert table.columns == ["task", "client", "split", "samples", "classes", "entropy"]
    quarter = -(0.75 * math.log(0.75) + 0.25 * math.log(0.25))
    assert [row[:5] for row in table.rows()] == [
        (0, 0, "test", 5, 1),
        (0, 0, "train", 4, 2),
        (0, 0, "val", 1, 1),
        (0, 1, "train", 2, 1),
        (1, 1, "train", 2, 2),
    ]
    assert_allclose(table["entropy"], [0, quarter, 0, 0, math.log(2)], atol=1e-12)
    assert math.copysign(1, table["entropy"][0]) == 1


@given(st.lists(st.integers(0, 6), min_size=1, max_size=80))
def test_entropy_is_scipys(labels: list[int]) -> None:
    table = tabulate(manifest([(0, 0, "train", label) for label in labels]))
    assert_allclose(table["entropy"][0], scipy.stats.entropy(np.bincount(labels)), atol=1e-9)


def test_the_summary_is_of_the_train_shares() -> None:
    scalars = summarise(tabulate(manifest(ROWS)), clients=3)
    assert scalars["clients"] == 3
    assert scalars["tasks"] == 2
    assert scalars["samples"] == {"train": 8, "val": 1, "test": 5}
    assert scalars["train"]["smallest_client"] == 2
    assert scalars["train"]["largest_client"] == 4
    assert scalars["task"]["0"] == {
        "clients": 2,
        "smallest_client": 2,
        "largest_client": 4,
        "mean_samples": 3.0,
        "mean_classes": 1.5,
        "mean_entropy": scipy.stats.entropy([3, 1]) / 2,
    }
    assert scalars["task"]["1"]["clients"] == 1
