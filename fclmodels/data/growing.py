"""A stream that grows: a folder of parts, each one task that arrived, joined into splits as long as wanted.

A part is prepared data and splits of one task in one folder (prepare.py, split.py), named by its number. It is written
beside its place and appears there in one step; nothing changes it any more, so DVC keeps each part once. Joined, the
samples of the parts stand behind each other, and labels are numbered by the first appearance of their names: the
splits of the first n tasks stay the same whatever comes later. A task is learned from the splits that end with it, not
from longer ones: some methods ask which tasks there are.
"""

import hashlib
import json
import os
import re
import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import polars as pl

from fclmodels.data.incoming import Arrived
from fclmodels.data.partitions.base import Partition
from fclmodels.data.prepare import Prepared, prepare
from fclmodels.data.split import split
from fclmodels.data.splits import SCHEMA, UNREADABLE, content_digest, read
from fclmodels.data.streams.arrival import Arrival
from fclmodels.errors import UserError
from fclmodels.foreign import read_json
from fclmodels.kinds import kind_of
from fclmodels.mapped import new_array
from fclmodels.randomness import seed_of
from fclmodels.settings import ImageSettings
from fclmodels.state import write_json

NOTE = "arrival.json"
Content = TypeVar("Content")


@dataclass(frozen=True)
class Part:
    """A task that was taken in. Numbers count from 1."""

    folder: Path
    number: int
    name: str

    @property
    def facts(self) -> dict[str, Any]:
        """What stream.json says."""
        return self._splits[0]

    @property
    def manifest(self) -> pl.DataFrame:
        return self._splits[1]

    @cached_property
    def _splits(self) -> tuple[dict[str, Any], pl.DataFrame]:
        return self._whole(read)

    @cached_property
    def prepared(self) -> Prepared:
        return Prepared.open(self.folder)

    @property
    def came_at(self) -> int:
        at = self._whole(lambda folder: read_json(folder / NOTE)["at"])
        if type(at) is not int:
            raise UserError(f"{self.folder / NOTE} says no time. Get it back as it was: dvc checkout.")
        return at

    def _whole(self, reader: Callable[[Path], Content]) -> Content:
        try:
            return reader(self.folder)
        except UNREADABLE as problem:
            reason = str(problem).partition("\n")[0]
            raise UserError(
                f"{self.folder} cannot be read ({reason}). Get it back as it was: dvc checkout."
            ) from problem


class GrowingStream:
    def __init__(self, folder: Path) -> None:
        self.folder = Path(folder)

    @property
    def parts(self) -> list[Part]:
        folders = self.folder.iterdir() if self.folder.is_dir() else ()
        return sorted(map(_part, (f for f in folders if re.match("[0-9]+-", f.name))), key=lambda part: part.number)

    def has(self, arrived: Arrived) -> bool:
        return (arrived.name, arrived.at) in ((part.name, part.came_at) for part in self.parts)

    def refuse_other(self, images: ImageSettings, clients: int) -> None:
        """What all tasks of a stream have in common cannot change on the way."""
        for part in self.parts[:1]:
            begun, channels = part.facts, part.facts["shape"][0]
            now = {name: list(getattr(images, name) * channels)[:channels] for name in ("mean", "std")}
            for name, value in {"partition.clients": clients, "data.mean": now["mean"], "data.std": now["std"]}.items():
                before = begun[name.partition(".")[2]]
                if value != before:
                    raise UserError(
                        f"{name} is {value}, and {self.folder} began with {before}. Set it back, or begin another "
                        "stream: arrivals.name."
                    )

    def take_in(self, arrived: Arrived, images: ImageSettings, partition: Partition) -> Part:
        """Append it as the next task; a UserError says why it cannot be one."""
        parts, source = self.parts, arrived.source(images)
        if arrived.name in (part.name for part in parts):
            raise UserError(f"The stream has a task {arrived.name} already. Give this one another name.")
        number = len(parts) + 1
        drawn_anew = partition.settings.model_copy(update={"seed": seed_of("arrival", partition.settings.seed, number)})
        with _beside(self.folder) as folder:
            domains = prepare(source, folder).meta.domains
            owners = "drawn" if domains == (source.name,) else "domains"
            stream = Arrival(Arrival.Settings(kind=Arrival.name, task=arrived.name, owners=owners))
            split(folder, stream, type(partition)(drawn_anew), folder)
            part = Part(folder, number, arrived.name)
            refuse_unfit(part, parts)
            write_json(folder / NOTE, {"at": arrived.at})
            self.folder.mkdir(parents=True, exist_ok=True)
            place = self.folder / f"{number:02d}-{arrived.name}"
            os.replace(folder, place)
        return replace(part, folder=place)


def _part(folder: Path) -> Part:
    number, _, name = folder.name.partition("-")
    return Part(folder, int(number), name)


def refuse_unfit(part: Part, before: Sequence[Part]) -> None:
    """Whether a part goes with those before it."""
    own, theirs = (" x ".join(map(str, one.facts["shape"])) for one in (part, *before[:1], part)[:2])
    if own != theirs:
        raise UserError(f"Its images are {own}, those of the stream {theirs}. Set data.size and data.channels.")
    if not (part.manifest["split"] == "val").any():
        raise UserError("partition.val leaves no sample to judge by. Use a larger share, or more samples a client.")
    refuse_clashes([*before, part])


def refuse_clashes(parts: Sequence[Part]) -> None:
    """Two names for one class, as far as that can be seen, or two classes for one image."""
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
            here = label, f"{part.name}/{origin}"
            there = images.setdefault(hashlib.sha256(image.tobytes()).digest(), here)
            if here[0] != there[0]:
                raise UserError(
                    f"{here[1]} is {here[0]}, and the same image is {there[0]} as {there[1]}. Give it one label."
                )


def joined(parts: Sequence[Part]) -> tuple[pl.DataFrame, dict[str, Any]]:
    """The manifest of all parts, and what stream.json says of it."""
    first = parts[0].facts
    labels: dict[str, int] = {}
    rows, tasks, behind = [], [], 0
    for task, part in enumerate(parts):
        last = int(part.manifest["sample"].to_numpy().max())
        if part.prepared.array.shape[1:] != tuple(first["shape"]) or last >= len(part.prepared.array):
            raise UserError(f"{part.folder} does not fit the other parts. Get it back as it was: dvc checkout.")
        own = [labels.setdefault(name, len(labels)) for name in part.facts["classes"]]
        tasks.append({**part.facts["tasks"][0], "classes": own})
        rows.append(
            part.manifest.with_columns(
                sample=pl.col("sample") + behind,
                label=pl.col("label").replace_strict(list(range(len(own))), own),
                task=pl.lit(task),
                domain=pl.lit(0),
            ).cast(SCHEMA)
        )
        behind += len(part.prepared.array)
    manifest = pl.concat(rows)
    prepared = [part.facts["prepared_digest"] for part in parts]
    facts = {
        **{name: first[name] for name in ("format", "kind", "clients", "shape", "mean", "std", "head")},
        "tasks": tasks,
        "classes": list(labels),
        "domains": [Arrival.name],
        "prepared_digest": hashlib.sha256(json.dumps(prepared).encode()).hexdigest(),
    }
    return manifest, {**facts, "digest": content_digest(manifest, facts), "prepared": "."}


def assembled(parts: Sequence[Part], home: Path) -> Path:
    """Splits of these parts with their samples in one folder below home; those that were asked for before go."""
    manifest, facts = joined(parts)
    folder = home / f"{len(parts):02d}-{facts['digest'][:16]}"
    if folder.exists():
        return folder
    shutil.rmtree(home, ignore_errors=True)
    with _beside(folder) as temporary:
        arrays = [part.prepared.array for part in parts]
        kind = kind_of(facts["shape"])
        whole = new_array(temporary / kind.file, kind.dtype, (sum(map(len, arrays)), *facts["shape"]))
        np.concatenate(arrays, out=whole)
        whole.flush()
        write_json(temporary / "meta.json", {"digest": facts["prepared_digest"]})
        manifest.write_parquet(temporary / "manifest.parquet")
        write_json(temporary / "stream.json", facts)
        os.replace(temporary, folder)
    return folder


@contextmanager
def _beside(folder: Path) -> Iterator[Path]:
    """An empty folder beside this one, to be moved away; what is left of it goes."""
    beside = folder.with_name(f".{folder.name}.next")
    shutil.rmtree(beside, ignore_errors=True)  # of a run that was killed
    beside.mkdir(parents=True)
    try:
        yield beside
    finally:
        shutil.rmtree(beside, ignore_errors=True)
