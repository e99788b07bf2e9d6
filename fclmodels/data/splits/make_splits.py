"""Prepared data + a stream + a partition -> the manifest: which client has which sample, in which task and split.

Test rows are cut first: nothing that is decided for train and val rows depends on them.
"""

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl

from fclmodels.data.partitions.base import Partition
from fclmodels.data.prepare import Prepared, prepare
from fclmodels.data.sample_kind import TEXTS, find_kind
from fclmodels.data.splits import split_statistics
from fclmodels.data.splits.dealing import Deal, deal
from fclmodels.data.splits.held_out import cut_test, cut_val, number_units
from fclmodels.data.splits.split_reader import FORMAT, SCHEMA, SPLITS, digest_splits
from fclmodels.data.streams.base import Layout, Pool, SampleTable, Stream
from fclmodels.errors import UserError
from fclmodels.plugins import find
from fclmodels.settings.schema import Params
from fclmodels.storage.files import make_temporary_folder, move_synced

FILES = ("manifest.parquet", "statistics.csv", "statistics.json", "stream.json")


def make_splits(params: Params, folder: Path) -> Path:
    """Prepare the data of these settings and write their splits, both below one folder; return that of the splits."""
    prepare(find("source", params.data.source)(params.data), folder / "prepared")
    stream = find("stream", params.stream.kind)(params.stream)
    partition = find("partition", params.partition.kind)(params.partition)
    return write_splits(folder / "prepared", stream, partition, folder / "splits")


def write_splits(prepared_folder: Path, stream: Stream, partition: Partition, out_folder: Path) -> Path:
    """Write the manifest, stream.json and the statistics; old ones stay until all are complete."""
    out_folder = Path(out_folder)
    prepared = Prepared.open(prepared_folder)
    layout, manifest = arrange(prepared, stream, partition)
    facts = _describe(prepared, stream, layout, manifest, partition.settings.clients)
    facts["digest"] = digest_splits(manifest, facts)
    facts["prepared"] = os.path.relpath(Path(prepared_folder).resolve(), out_folder.resolve())
    table = split_statistics.tabulate(manifest)
    with _replace_splits(out_folder) as folder:
        manifest.write_parquet(folder / "manifest.parquet")
        table.write_csv(folder / "statistics.csv")
        _write_json(folder / "statistics.json", split_statistics.summarise(table, partition.settings.clients))
        _write_json(folder / "stream.json", facts)
    return out_folder


def arrange(prepared: Prepared, stream: Stream, partition: Partition) -> tuple[Layout, pl.DataFrame]:
    """Return the tasks, and the manifest: a row for each sample that a client has in a task."""
    units = number_units(prepared.samples["group"].cast(pl.Int64).fill_null(-1).to_numpy())
    samples = _cut_test_rows(prepared, units, partition)
    layout = _thin(stream.lay_out(samples, partition.settings.clients), samples, units, partition)
    if find_kind(prepared.meta.shape) is TEXTS and any(task.permutation is not None for task in layout.tasks):
        raise UserError(f"stream.kind: {stream.name} needs images, these samples are texts. Use another kind.")
    unofficial = prepared.samples["official"].is_null().to_numpy()
    for pool in layout.pools:
        _refuse_gaps(pool, samples, unofficial, partition.settings.test)
    train, test = deal(layout, samples, partition)
    labels, share, generator = samples.labels[train.samples], partition.settings.val, partition.make_generator("val")
    val = cut_val(train.clients, train.tasks, labels, units[train.samples], share, generator)
    kinds = np.concatenate([val.astype(int), np.full(len(test.samples), SPLITS.index("test"))])
    return layout, _make_manifest(samples, layout, Deal.concatenate([train, test]), kinds)


def _cut_test_rows(prepared: Prepared, units: np.ndarray, partition: Partition) -> SampleTable:
    """Return the prepared table with its test rows: the official ones, and a share of those without a split."""
    table, meta = prepared.samples, prepared.meta
    labels, domains = table["label"].to_numpy(), table["domain"].to_numpy()
    test = (table["official"] == "test").fill_null(False).to_numpy().copy()
    free = np.flatnonzero(table["official"].is_null().to_numpy())
    strata = labels[free].astype(np.int64) * len(meta.domains) + domains[free]
    test[free] = cut_test(strata, units[free], partition.settings.test, partition.make_generator("test"))
    return SampleTable(labels, domains, test, meta.classes, meta.domains, meta.own_label_spaces)


def _thin(layout: Layout, samples: SampleTable, units: np.ndarray, partition: Partition) -> Layout:
    """Drop the train samples that no client gets and the test samples that are not evaluated."""
    is_dropped = np.zeros(len(units), bool)
    strata = samples.labels.astype(np.int64) * len(samples.domain_names) + samples.domains
    shares = {"train": partition.settings.train_share, "test": partition.settings.test_share}
    for kind, share in shares.items():
        if share < 1:
            rows = np.flatnonzero(samples.test == (kind == "test"))
            is_dropped[rows] = cut_test(strata[rows], units[rows], 1 - share, partition.make_generator(f"{kind} share"))
    pools = (replace(pool, rows=pool.rows[~is_dropped[pool.rows]]) for pool in layout.pools)
    return replace(layout, pools=tuple(pools))


def _refuse_gaps(pool: Pool, samples: SampleTable, unofficial: np.ndarray, share: float) -> None:
    """Raise UserError where a pool has no test samples, or a class of it no train samples or no test share."""
    k = len(samples.classes)
    labels, test = samples.labels[pool.rows], samples.test[pool.rows]
    trained, tested = (np.bincount(labels[half], minlength=k) for half in (~test, test))
    cut = np.bincount(labels[unofficial[pool.rows]], minlength=k) > 0
    required = tested > 0
    required[list(pool.classes)] = (pool.task_of >= 0).any(axis=0)
    for c in np.flatnonzero(required & ((trained == 0) | (cut & (tested == 0)))):
        where, kind = f"{samples.classes[c]} in {pool.name}", "train" if trained[c] == 0 else "test"
        if cut[c]:
            right = f"Use a {'smaller' if kind == 'train' else 'larger'} share, or add samples."
            total = trained[c] + tested[c]
            raise UserError(f"partition.test: {share} of the {total} samples of {where} leaves none to {kind}. {right}")
        raise UserError(f"data: {where} has no training samples. Add some to the source, or leave the class out.")
    if not tested.any():
        raise UserError(f"data: {pool.name} has no test samples. Add some to the source's test split.")


def _make_manifest(samples: SampleTable, layout: Layout, deal: Deal, split: np.ndarray) -> pl.DataFrame:
    """Return rows sorted by task, client, split, sample; labels number classes in the order of their first task."""
    label_of = np.full(len(samples.classes), -1)
    classes = _order_classes(layout)
    label_of[classes] = np.arange(len(classes))
    columns = {
        "sample": deal.samples,
        "label": label_of[samples.labels[deal.samples]],
        "domain": samples.domains[deal.samples],
        "task": deal.tasks,
        "client": deal.clients,
        "split": pl.Series(SPLITS).gather(split),
    }
    return pl.DataFrame(columns).cast(SCHEMA).sort("task", "client", "split", "sample")


def _order_classes(layout: Layout) -> list[int]:
    """Return the source's number of each label."""
    return list(dict.fromkeys(c for task in layout.tasks for c in task.classes))


def _describe(
    prepared: Prepared, stream: Stream, layout: Layout, manifest: pl.DataFrame, clients: int
) -> dict[str, Any]:
    """Return the content of stream.json, without the digest and the path of the prepared data."""
    meta, classes = prepared.meta, _order_classes(layout)
    label_of = {c: label for label, c in enumerate(classes)}
    normalisations = _normalise_tasks(prepared, layout, manifest)
    tasks = [
        {
            "name": task.name,
            "classes": [label_of[c] for c in task.classes],
            "permutation": task.permutation,
            "classes_by_client": None
            if task.classes_by_client is None
            else {str(client): [label_of[c] for c in own] for client, own in task.classes_by_client.items()},
        }
        | own
        for task, own in zip(layout.tasks, normalisations, strict=True)
    ]
    return {
        "format": FORMAT,
        "kind": stream.name,
        "tasks": tasks,
        "classes": [meta.classes[c] for c in classes],
        "domains": list(meta.domains),
        "clients": clients,
        "shape": list(meta.shape),
        "mean": list(meta.mean),
        "std": list(meta.std),
        "smaller": meta.smaller or "resize",
        "head": stream.head,
        "prepared_digest": meta.digest,
    }


def _normalise_tasks(prepared: Prepared, layout: Layout, manifest: pl.DataFrame) -> list[dict[str, Any]]:
    """Return the mean and std of each task's data set, nothing where all sets have the same.

    UserError where a task mixes data sets with different ones.
    """
    normalisations = prepared.meta.normalisations
    if normalisations is None:
        return [{} for _ in layout.tasks]
    domains = dict(manifest.group_by("task").agg(pl.col("domain").unique()).iter_rows())
    of_tasks = []
    for t, task in enumerate(layout.tasks):
        first, *others = {normalisations[domain] for domain in domains[t]}
        if others:
            raise UserError(
                f"data.parts: task {t + 1} ({task.name}) mixes data sets with different mean or std. Set data.mean and "
                "data.std for all, or use stream.kind: datasets or domain-incremental."
            )
        of_tasks.append({"mean": list(first.mean), "std": list(first.std)})
    return of_tasks


def _write_json(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=1) + "\n")


@contextmanager
def _replace_splits(folder: Path) -> Iterator[Path]:
    """Yield a folder beside this one whose files replace the old ones when the block ends well.

    Reading begins with stream.json, which goes first and comes last: splits are complete or not there.
    """
    folder = folder.resolve()
    if folder.exists() and not folder.is_dir():
        raise UserError(f"{folder} is a file. Name a folder for the splits.")
    with make_temporary_folder(folder) as temporary:
        yield temporary
        folder.mkdir(exist_ok=True)
        (folder / FILES[-1]).unlink(missing_ok=True)
        for name in FILES:
            move_synced(temporary / name, folder / name)
