"""An excerpt of splits: the first tasks, a few clients, a few rows of each, on the same samples."""

import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import polars as pl

from fclmodels.data.splits.split_reader import Splits, digest_splits

EVERYONE = -1  # in the column "client": the rows that clients share


def choose_typical_clients(splits: Splits, tasks: int, count: int) -> list[int]:
    """Return clients of the first tasks from the one with the fewest rows to the one with the most, evenly."""
    sizes = {
        client: sum(len(splits.select_rows(task, "train", client)) for task in range(tasks))
        for client in range(splits.clients)
    }
    able = sorted((client for client in sizes if sizes[client]), key=lambda client: (sizes[client], client))
    places = np.linspace(0, len(able) - 1, min(count, len(able))).astype(int)
    return sorted({able[place] for place in places})


def write_excerpt(splits: Splits, folder: Path, tasks: int, clients: Sequence[int], most_rows: int) -> Splits:
    """Write splits of the first tasks and of these clients, numbered anew, with at most so many rows in each group."""
    facts = json.loads((splits.folder / "stream.json").read_text())
    numbers = {client: number for number, client in enumerate(clients)} | {EVERYONE: EVERYONE}
    shuffled = pl.int_range(pl.len()).shuffle(seed=0).over("task", "split", "client")
    manifest = (
        pl.read_parquet(splits.folder / "manifest.parquet")
        .filter(pl.col("task") < tasks, pl.col("client").is_in(list(numbers)))
        .filter(shuffled < most_rows)
        .with_columns(pl.col("client").replace_strict(numbers, return_dtype=pl.Int32))
    )
    for task in facts["tasks"]:
        if by_client := task["classes_by_client"]:
            task["classes_by_client"] = {str(numbers[c]): by_client[str(c)] for c in clients if str(c) in by_client}
    facts |= {
        "tasks": facts["tasks"][:tasks],
        "clients": len(clients),
        "prepared": str(splits.prepared.resolve()),
    }
    facts["digest"] = digest_splits(manifest, facts)
    folder.mkdir(parents=True)
    manifest.write_parquet(folder / "manifest.parquet")
    (folder / "stream.json").write_text(json.dumps(facts))
    return Splits.open(folder)
