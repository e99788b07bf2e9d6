"""Who has how much of what: samples, classes and label entropy of each client in each task.

The entropy of a share with class fractions p is H = -sum p ln p: 0 for one class, ln k for k equal ones.
"""

from typing import Any

import polars as pl


def table(manifest: pl.DataFrame) -> pl.DataFrame:
    """One row for each task, client and split that has samples: samples, classes, entropy (nats)."""
    share = ["task", "client", "split"]
    p = pl.col("len") / pl.col("len").sum()
    return (
        manifest.group_by(*share, "label")
        .len()
        .sort(*share, "label")  # sums of floats depend on their order
        .group_by(*share, maintain_order=True)
        .agg(
            samples=pl.col("len").sum(),
            classes=pl.len(),
            entropy=(-(p * p.log()).sum()).abs(),  # not -0.0
        )
    )


def summary(statistics: pl.DataFrame, clients: int) -> dict[str, Any]:
    """The scalars of the table that DVC shows as metrics: of the whole, and of each task's train shares."""
    train = statistics.filter(pl.col("split") == "train")
    by_split = dict(statistics.group_by("split").agg(pl.col("samples").sum()).sort("split").iter_rows())
    return {
        "clients": clients,
        "tasks": statistics["task"].n_unique(),
        "samples": {split: by_split.get(split, 0) for split in ("train", "val", "test")},
        "train": _of(train),
        "task": {str(task): _of(part) for (task,), part in train.sort("task").group_by("task", maintain_order=True)},
    }


def _of(shares: pl.DataFrame) -> dict[str, Any]:
    """What the train shares [a row for each client and task] look like as a whole."""
    return {
        "clients": shares["client"].n_unique(),
        "smallest_client": shares["samples"].min(),
        "largest_client": shares["samples"].max(),
        "mean_samples": shares["samples"].mean(),
        "mean_classes": shares["classes"].mean(),
        "mean_entropy": shares["entropy"].mean(),
    }
