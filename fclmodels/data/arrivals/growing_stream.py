"""A stream that grows: a folder of parts, each a task that arrived, of which the first n can be joined into splits.

A part is the prepared data and the splits of one task in one folder (prepare.py, make_splits.py), named by its number.
It appears in one step and never changes, so DVC stores each part once. Joined, the samples of the parts follow each
other, and labels are numbered by the first appearance of their names: the splits of the first n tasks stay the same
whatever comes later. A task is learned from the splits that end with it, since some methods read the number of tasks.
"""

import hashlib
import re
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import polars as pl

from fclmodels.data.arrivals.arrival_folders import ArrivedFolder
from fclmodels.data.partitions.base import Partition
from fclmodels.data.prepare import Prepared, prepare
from fclmodels.data.sample_kind import find_kind
from fclmodels.data.splits.make_splits import write_splits
from fclmodels.data.splits.split_reader import SCHEMA, UNREADABLE, digest_splits, read_splits
from fclmodels.data.streams.arrival import Arrival
from fclmodels.errors import UserError
from fclmodels.randomness import derive_seed
from fclmodels.settings.schema import ImageSettings
from fclmodels.storage.array_cache import create_array
from fclmodels.storage.digests import digest_json
from fclmodels.storage.files import replace_folder
from fclmodels.storage.sealed_json import write_json
from fclmodels.storage.untrusted import read_json

NOTE = "arrival.json"
Content = TypeVar("Content")


@dataclass(frozen=True)
class StreamPart:
    """A task of the stream. Numbers count from 1."""

    folder: Path
    number: int
    name: str

    @property
    def facts(self) -> dict[str, Any]:
        """The content of stream.json."""
        return self._splits[0]

    @property
    def manifest(self) -> pl.DataFrame:
        return self._splits[1]

    @cached_property
    def _splits(self) -> tuple[dict[str, Any], pl.DataFrame]:
        return self._read(read_splits)

    @cached_property
    def prepared(self) -> Prepared:
        return Prepared.open(self.folder)

    @property
    def arrived_at(self) -> int:
        at = self._read(lambda folder: read_json(folder / NOTE)["at"])
        if type(at) is not int:
            raise UserError(f"{self.folder / NOTE} says no time. Get it back as it was: dvc checkout.")
        return at

    def _read(self, reader: Callable[[Path], Content]) -> Content:
        try:
            return reader(self.folder)
        except UNREADABLE as problem:
            reason = str(problem).partition("\n")[0]
            raise UserError(
                f"{self.folder} cannot be read ({reason}). Get it back as it was: dvc checkout."
            ) from problem


class GrowingStream:
    """The folder of a stream's parts."""

    def __init__(self, folder: Path) -> None:
        self.folder = Path(folder)

    @property
    def parts(self) -> list[StreamPart]:
        folders = self.folder.iterdir() if self.folder.is_dir() else ()
        return sorted(
            map(_open_part, (f for f in folders if re.match("[0-9]+-", f.name))), key=lambda part: part.number
        )

    def has(self, arrived: ArrivedFolder) -> bool:
        """Return whether this folder is a task of the stream already."""
        return (arrived.name, arrived.at) in ((part.name, part.arrived_at) for part in self.parts)

    def refuse_other(self, images: ImageSettings, clients: int) -> None:
        """Raise UserError where a setting that all tasks of a stream share differs from the stream's."""
        for part in self.parts[:1]:
            facts, channels = part.facts, part.facts["shape"][0]
            now = {f"data.{name}": list(getattr(images, name) * channels)[:channels] for name in ("mean", "std")}
            for name, value in {"partition.clients": clients, **now, "data.smaller": images.smaller}.items():
                before = facts[name.partition(".")[2]]
                if value != before:
                    raise UserError(
                        f"{name} is {value}, and {self.folder} began with {before}. Set it back, or begin another "
                        "stream: arrivals.name."
                    )

    def take_in(self, arrived: ArrivedFolder, images: ImageSettings, partition: Partition) -> StreamPart:
        """Append an arrived folder as the next task; UserError where it cannot be one."""
        parts, source = self.parts, arrived.make_source(images)
        if arrived.name in (part.name for part in parts):
            raise UserError(f"The stream has a task {arrived.name} already. Give this one another name.")
        number = len(parts) + 1
        reseeded = partition.settings.model_copy(
            update={"seed": derive_seed("arrival", partition.settings.seed or 0, number)}
        )
        place = self.folder / f"{number:02d}-{arrived.name}"
        with replace_folder(place, beside=self.folder) as folder:
            domains = prepare(source, folder).meta.domains
            owners = "drawn" if domains == (source.name,) else "domains"
            stream = Arrival(Arrival.Settings(kind=Arrival.name, task=arrived.name, owners=owners))
            write_splits(folder, stream, type(partition)(reseeded), folder)
            part = StreamPart(folder, number, arrived.name)
            refuse_unfit(part, parts)
            write_json(folder / NOTE, {"at": arrived.at})
        return replace(part, folder=place)


def _open_part(folder: Path) -> StreamPart:
    number, _, name = folder.name.partition("-")
    return StreamPart(folder, int(number), name)


def refuse_unfit(part: StreamPart, before: Sequence[StreamPart]) -> None:
    """Raise UserError where a part does not fit those before it."""
    own, first = (" x ".join(map(str, one.facts["shape"])) for one in (part, *before[:1], part)[:2])
    if own != first:
        raise UserError(f"Its images are {own}, those of the stream {first}. Set data.size and data.channels.")
    if not (part.manifest["split"] == "val").any():
        raise UserError("partition.val leaves no sample to judge by. Use a larger share, or more samples a client.")
    refuse_clashes([*before, part])


def refuse_clashes(parts: Sequence[StreamPart]) -> None:
    """Raise UserError where two class names differ only in case or spaces, or one image has two classes."""
    names: dict[str, str] = {}
    images: dict[bytes, tuple[str, str]] = {}
    for part in parts:
        prepared, classes = part.prepared, part.facts["classes"]
        for name in classes:
            other = names.setdefault(name.strip().casefold(), name)
            if name != other:
                raise UserError(f"Class {name} is nearly {other}. Name them alike, or apart.")
        for row, image in enumerate(prepared.array):
            label, origin = prepared.meta.classes[prepared.samples["label"][row]], prepared.samples["origin"][row]
            path = f"{part.name}/{origin}"
            first = images.setdefault(hashlib.sha256(image.tobytes()).digest(), (label, path))
            if label != first[0]:
                raise UserError(
                    f"{path} is {label}, and the same image is {first[0]} as {first[1]}. Give it one label."
                )


def join_parts(parts: Sequence[StreamPart]) -> tuple[pl.DataFrame, dict[str, Any]]:
    """Return the manifest of all parts and the content of its stream.json."""
    first = parts[0].facts
    labels: dict[str, int] = {}
    rows, tasks, offset = [], [], 0
    for task, part in enumerate(parts):
        last = int(part.manifest["sample"].to_numpy().max())
        if part.prepared.array.shape[1:] != tuple(first["shape"]) or last >= len(part.prepared.array):
            raise UserError(f"{part.folder} does not fit the other parts. Get it back as it was: dvc checkout.")
        own = [labels.setdefault(name, len(labels)) for name in part.facts["classes"]]
        tasks.append({**part.facts["tasks"][0], "classes": own})
        rows.append(
            part.manifest.with_columns(
                sample=pl.col("sample") + offset,
                label=pl.col("label").replace_strict(list(range(len(own))), own),
                task=pl.lit(task),
                domain=pl.lit(0),
            ).cast(SCHEMA)
        )
        offset += len(part.prepared.array)
    manifest = pl.concat(rows)
    prepared = [part.facts["prepared_digest"] for part in parts]
    facts = {
        **{name: first[name] for name in ("format", "kind", "clients", "shape", "mean", "std", "smaller", "head")},
        "tasks": tasks,
        "classes": list(labels),
        "domains": [Arrival.name],
        "prepared_digest": digest_json(prepared),
    }
    return manifest, {**facts, "digest": digest_splits(manifest, facts), "prepared": "."}


def assemble(parts: Sequence[StreamPart], home: Path) -> Path:
    """Write splits of these parts, with their samples, to a folder below home in place of earlier ones; return it."""
    manifest, facts = join_parts(parts)
    folder = home / f"{len(parts):02d}-{facts['digest'][:16]}"
    if folder.exists():
        return folder
    shutil.rmtree(home, ignore_errors=True)
    with replace_folder(folder) as temporary:
        arrays = [part.prepared.array for part in parts]
        kind = find_kind(facts["shape"])
        samples = create_array(temporary / kind.file, kind.dtype, (sum(map(len, arrays)), *facts["shape"]))
        np.concatenate(arrays, out=samples)
        samples.flush()
        write_json(temporary / "meta.json", {"digest": facts["prepared_digest"]})
        manifest.write_parquet(temporary / "manifest.parquet")
        write_json(temporary / "stream.json", facts)
    return folder
