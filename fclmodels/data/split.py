"""Prepared data + a stream + a partition -> the manifest: who sees which sample, in which task, for what.

Test rows are cut first and go their own way: nothing that is decided for train and val rows depends on them.
"""

import json
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl

from fclmodels.data import statistics
from fclmodels.data.partitions.base import Partition
from fclmodels.data.partitions.dealing import Given, deal
from fclmodels.data.partitions.held_out import cut_test, cut_val, units_of
from fclmodels.data.prepare import Prepared, prepare
from fclmodels.data.splits import FORMAT, SCHEMA, SPLITS, content_digest
from fclmodels.data.streams.base import Layout, Pool, Samples, Stream
from fclmodels.errors import UserError
from fclmodels.kinds import TEXTS, kind_of
from fclmodels.plugins import find
from fclmodels.settings import Params

FILES = ("manifest.parquet", "statistics.csv", "statistics.json", "stream.json")


def splits_of(params: Params, folder: Path) -> Path:
    """What these settings ask for, from the source on: the splits, beside the prepared data, in one folder."""
    prepare(find("source", params.data.source)(params.data), folder / "prepared")
    stream = find("stream", params.stream.kind)(params.stream)
    partition = find("partition", params.partition.kind)(params.partition)
    return split(folder / "prepared", stream, partition, folder / "splits")


def split(prepared_folder: Path, stream: Stream, partition: Partition, out_folder: Path) -> Path:
    """Write the manifest, stream.json and the statistics; old ones stay until all is there."""
    out_folder = Path(out_folder)
    prepared = Prepared.open(prepared_folder)
    layout, manifest = arrange(prepared, stream, partition)
    facts = _facts(prepared, stream, layout, partition.settings.clients)
    facts["digest"] = content_digest(manifest, facts)
    facts["prepared"] = os.path.relpath(Path(prepared_folder).resolve(), out_folder.resolve())
    table = statistics.table(manifest)
    with _replacing(out_folder) as folder:
        manifest.write_parquet(folder / "manifest.parquet")
        table.write_csv(folder / "statistics.csv")
        _write_json(folder / "statistics.json", statistics.summary(table, partition.settings.clients))
        _write_json(folder / "stream.json", facts)
    return out_folder


def arrange(prepared: Prepared, stream: Stream, partition: Partition) -> tuple[Layout, pl.DataFrame]:
    """The tasks, and the manifest: one row for each sample that a client has in a task."""
    units = units_of(prepared.samples["group"].cast(pl.Int64).fill_null(-1).to_numpy())
    samples = _samples(prepared, units, partition)
    layout = _thinned(stream.layout(samples, partition.settings.clients), samples, units, partition)
    if kind_of(prepared.meta.shape) is TEXTS and any(task.permutation is not None for task in layout.tasks):
        raise UserError(f"stream.kind: {stream.name} needs images, these samples are texts. Use another kind.")
    unofficial = prepared.samples["official"].is_null().to_numpy()
    for pool in layout.pools:
        _refuse_gaps(pool, samples, unofficial, partition.settings.test)
    train, test = deal(layout, samples, partition)
    labels, share, generator = samples.labels[train.samples], partition.settings.val, partition.generator("val")
    val = cut_val(train.clients, train.tasks, labels, units[train.samples], share, generator)
    kinds = np.concatenate([val.astype(int), np.full(len(test.samples), SPLITS.index("test"))])
    return layout, _manifest(samples, layout, Given.concatenate([train, test]), kinds)


def _samples(prepared: Prepared, units: np.ndarray, partition: Partition) -> Samples:
    """The prepared table with its test rows: the official ones, and a share of what has no official split."""
    table, meta = prepared.samples, prepared.meta
    labels, domains = table["label"].to_numpy(), table["domain"].to_numpy()
    test = (table["official"] == "test").fill_null(False).to_numpy().copy()
    free = np.flatnonzero(table["official"].is_null().to_numpy())
    strata = labels[free].astype(np.int64) * len(meta.domains) + domains[free]
    test[free] = cut_test(strata, units[free], partition.settings.test, partition.generator("test"))
    return Samples(labels, domains, test, meta.classes, meta.domains, meta.own_label_spaces)


def _thinned(layout: Layout, samples: Samples, units: np.ndarray, partition: Partition) -> Layout:
    """Without the train samples that nobody gets and the test samples that are not evaluated."""
    left_out = np.zeros(len(units), bool)
    strata = samples.labels.astype(np.int64) * len(samples.domain_names) + samples.domains
    shares = {"train": partition.settings.train_share, "test": partition.settings.test_share}
    for kind, share in shares.items():
        if share < 1:
            rows = np.flatnonzero(samples.test == (kind == "test"))
            left_out[rows] = cut_test(strata[rows], units[rows], 1 - share, partition.generator(f"{kind} share"))
    pools = (replace(pool, rows=pool.rows[~left_out[pool.rows]]) for pool in layout.pools)
    return replace(layout, pools=tuple(pools))


def _refuse_gaps(pool: Pool, samples: Samples, unofficial: np.ndarray, share: float) -> None:
    """A pool has test samples, each class of it train samples and, where we cut the test share, test samples too."""
    k = len(samples.classes)
    labels, test = samples.labels[pool.rows], samples.test[pool.rows]
    trained, tested = (np.bincount(labels[half], minlength=k) for half in (~test, test))
    cut = np.bincount(labels[unofficial[pool.rows]], minlength=k) > 0
    wanted = tested > 0
    wanted[list(pool.classes)] = (pool.task_of >= 0).any(axis=0)
    for c in np.flatnonzero(wanted & ((trained == 0) | (cut & (tested == 0)))):
        where, kind = f"{samples.classes[c]} in {pool.name}", "train" if trained[c] == 0 else "test"
        if cut[c]:
            right = f"Use a {'smaller' if kind == 'train' else 'larger'} share, or add samples."
            total = trained[c] + tested[c]
            raise UserError(f"partition.test: {share} of the {total} samples of {where} leaves none to {kind}. {right}")
        raise UserError(f"data: {where} has no training samples. Add some to the source, or leave the class out.")
    if not tested.any():
        raise UserError(f"data: {pool.name} has no test samples. Add some to the source's test split.")


def _manifest(samples: Samples, layout: Layout, given: Given, kind: np.ndarray) -> pl.DataFrame:
    """Rows sorted by task, client, split, sample; labels count classes in the order in which tasks bring them."""
    label_of = np.full(len(samples.classes), -1)
    seen = _classes_seen(layout)
    label_of[seen] = np.arange(len(seen))
    columns = {
        "sample": given.samples,
        "label": label_of[samples.labels[given.samples]],
        "domain": samples.domains[given.samples],
        "task": given.tasks,
        "client": given.clients,
        "split": pl.Series(SPLITS).gather(kind),
    }
    return pl.DataFrame(columns).cast(SCHEMA).sort("task", "client", "split", "sample")


def _classes_seen(layout: Layout) -> list[int]:
    """The source's number of each label."""
    return list(dict.fromkeys(c for task in layout.tasks for c in task.classes))


def _facts(prepared: Prepared, stream: Stream, layout: Layout, clients: int) -> dict[str, Any]:
    """What stream.json says, but for the digest and the place of the prepared data."""
    meta, seen = prepared.meta, _classes_seen(layout)
    label_of = {c: label for label, c in enumerate(seen)}
    tasks = [
        {
            "name": task.name,
            "classes": [label_of[c] for c in task.classes],
            "permutation": task.permutation,
            "classes_by_client": None
            if task.classes_by_client is None
            else {str(client): [label_of[c] for c in own] for client, own in task.classes_by_client.items()},
        }
        for task in layout.tasks
    ]
    return {
        "format": FORMAT,
        "kind": stream.name,
        "tasks": tasks,
        "classes": [meta.classes[c] for c in seen],
        "domains": list(meta.domains),
        "clients": clients,
        "shape": list(meta.shape),
        "mean": list(meta.mean),
        "std": list(meta.std),
        "head": stream.head,
        "prepared_digest": meta.digest,
    }


def _write_json(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=1) + "\n")


@contextmanager
def _replacing(folder: Path) -> Iterator[Path]:
    """A folder beside this one whose files take the places of the old ones when the block ends well.

    Splits are read by way of stream.json, so it goes first and comes last: they are there whole or not at all.
    """
    folder = folder.resolve()
    if folder.exists() and not folder.is_dir():
        raise UserError(f"{folder} is a file. Name a folder for the splits.")
    partial = folder.with_name(f".{folder.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)  # of a run that was killed
    partial.mkdir(parents=True)
    try:
        yield partial
        folder.mkdir(exist_ok=True)
        (folder / FILES[-1]).unlink(missing_ok=True)
        for name in FILES:
            os.replace(partial / name, folder / name)
    finally:
        shutil.rmtree(partial, ignore_errors=True)
