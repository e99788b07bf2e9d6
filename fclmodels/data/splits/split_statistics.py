"""Statistics of splits: samples, classes and label entropy of each client in each task.

The entropy of a share with class fractions p is H = -sum p ln p: 0 for one class, ln k for k equal ones.
"""

from typing import Any

import polars as pl


def tabulate(manifest: pl.DataFrame) -> pl.DataFrame:
    """Return a row for each task, client and split with samples: samples, classes, entropy (nats)."""
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


def summarise(statistics: pl.DataFrame, clients: int) -> dict[str, Any]:
    """Return the numbers that DVC shows as metrics: of all splits, and of each task's train shares."""
    train = statistics.filter(pl.col("split") == "train")
    by_split = dict(statistics.group_by("split").agg(pl.col("samples").sum()).sort("split").iter_rows())
    return {
        "clients": clients,
        "tasks": statistics["task"].n_unique(),
        "samples": {split: by_split.get(split, 0) for split in ("train", "val", "test")},
        "train": _summarise_shares(train),
        "task": {
            str(task): _summarise_shares(part)
            for (task,), part in train.sort("task").group_by("task", maintain_order=True)
        },
    }


def _summarise_shares(shares: pl.DataFrame) -> dict[str, Any]:
    """Return the sizes of train shares, of which the table has a row for each client and task."""
    return {
        "clients": shares["client"].n_unique(),
        "smallest_client": shares["samples"].min(),
        "largest_client": shares["samples"].max(),
        "mean_samples": shares["samples"].mean(),
        "mean_classes": shares["classes"].mean(),
        "mean_entropy": shares["entropy"].mean(),
    }
