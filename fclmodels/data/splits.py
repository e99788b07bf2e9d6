"""The splits as the federation reads them: who sees which samples, in which task.

The Parquet manifest is the single source of truth; the samples stay memory-mapped in the prepared folder.
"""

import functools
import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

import numpy as np
import polars as pl
import torch
from pydantic import BaseModel, Field, FiniteFloat, NonNegativeInt, PositiveFloat, PositiveInt
from torch import Tensor

from fclmodels.data.streams.arrival import Arrival
from fclmodels.errors import UserError
from fclmodels.foreign import Text, checked, read_array, read_json, read_table
from fclmodels.kinds import channels_of, kind_of

FORMAT = 1
UNREADABLE = (OSError, ValueError, LookupError, TypeError, AttributeError, pl.exceptions.PolarsError)
SPLITS = ("train", "val", "test")
SCHEMA = pl.Schema(
    {
        "sample": pl.UInt32,
        "label": pl.Int32,
        "domain": pl.Int16,
        "task": pl.Int16,
        "client": pl.Int32,
        "split": pl.String,
    }
)
MOST_CLIENTS = 2**31 - 1  # that column can number
# What stream.json says besides what the digest covers.
NOT_DIGESTED = ("digest", "prepared")


@dataclass(frozen=True)
class Task:
    index: int
    name: str
    classes: tuple[int, ...]
    permutation: int | None
    classes_by_client: dict[int, tuple[int, ...]] | None

    def classes_of(self, client: int | None) -> tuple[int, ...]:
        """The classes that this task has for a client: everyone's, but in a limitless pool."""
        if self.classes_by_client is None or client is None:
            return self.classes
        return self.classes_by_client[client]


class _TaskFacts(BaseModel):
    name: Text
    classes: tuple[NonNegativeInt, ...]
    permutation: int | None
    classes_by_client: dict[str, tuple[NonNegativeInt, ...]] | None = None


class _Facts(BaseModel):
    """What stream.json must say."""

    kind: str
    head: Literal["growing", "per-task"]
    tasks: tuple[_TaskFacts, ...]
    classes: tuple[Text, ...]
    domains: tuple[Text, ...]
    clients: PositiveInt = Field(le=MOST_CLIENTS)
    shape: tuple[PositiveInt, ...] = Field(min_length=2, max_length=3)
    mean: tuple[FiniteFloat, ...]
    std: tuple[PositiveFloat, ...]
    prepared: Text
    prepared_digest: str


@dataclass(frozen=True)
class Rows:
    """Some rows of the manifest: samples are rows of the images, labels are the stream's, tasks 0-based."""

    samples: np.ndarray
    labels: np.ndarray
    tasks: np.ndarray
    clients: np.ndarray

    def __len__(self) -> int:
        return len(self.samples)

    def take(self, places: np.ndarray) -> "Rows":
        return Rows(self.samples[places], self.labels[places], self.tasks[places], self.clients[places])

    def some(self, most: int | None, random: torch.Generator) -> "Rows":
        """At most so many of them, drawn at random, in their old order; None: all."""
        if most is None or most >= len(self):
            return self
        return self.take(np.sort(torch.randperm(len(self), generator=random)[:most].numpy()))

    def as_those_of(self, client: int, classes: Sequence[int]) -> "Rows":
        """The rows of these classes, given to a client."""
        mine = self.take(np.flatnonzero(np.isin(self.labels, classes)))
        return replace(mine, clients=np.full_like(mine.clients, client))

    @staticmethod
    def concatenate(parts: Sequence["Rows"]) -> "Rows":
        columns = ("samples", "labels", "tasks", "clients")
        return Rows(*(np.concatenate([getattr(part, column) for part in parts]) for column in columns))


class Splits:
    """An opened splits folder."""

    def __init__(self, folder: Path, facts: dict, manifest: pl.DataFrame, images: Tensor) -> None:
        self.folder = folder
        self.prepared = folder / facts["prepared"]  # the folder that holds the samples
        self.images = images
        self.classes: tuple[str, ...] = tuple(facts["classes"])
        self.clients: int = facts["clients"]
        self.shape: tuple[int, ...] = tuple(facts["shape"])
        self.mean: tuple[float, ...] = tuple(facts["mean"])
        self.std: tuple[float, ...] = tuple(facts["std"])
        self.head: Literal["growing", "per-task"] = facts["head"]
        self.kind: str = facts["kind"]
        self.digest: str = facts["digest"]
        self.prepared_digest: str = facts["prepared_digest"]
        self.tasks = tuple(_task(i, task) for i, task in enumerate(facts["tasks"]))
        self._order = manifest.sort("task", "split", "client", "sample")
        self._groups = self._first_and_last_row_of_each_group()

    @classmethod
    def open(cls, folder: Path) -> "Splits":
        folder = Path(folder)
        for file in (folder / "stream.json", folder / "manifest.parquet"):
            if not file.exists():
                raise UserError(f"{file} is missing. Make the splits first: fcl prepare && fcl partition.")
        try:
            facts, manifest = read(folder)
            return cls(folder, facts, manifest, _images(folder, facts, int(manifest["sample"].to_numpy().max())))
        except UNREADABLE as problem:
            reason = str(problem).partition("\n")[0]
            raise UserError(f"{folder} cannot be read ({reason}). Make it again: fcl partition.") from problem

    def files(self) -> dict[str, bytes]:
        """The files of a folder that holds these splits and their samples: all that `open` needs elsewhere."""
        facts = json.loads((self.folder / "stream.json").read_text())
        samples = prepared_file(self.folder, facts)
        files = (self.folder / "manifest.parquet", samples.with_name("meta.json"), samples)
        return {
            "stream.json": json.dumps(facts | {"prepared": "."}).encode(),
            **{file.name: file.read_bytes() for file in files},
        }

    def rows(self, task: int, split: str, client: int | None = None) -> Rows:
        """Rows of one task and split: of one client, or of all of them."""
        groups = self._groups.get((task, split), {})
        spans = [groups[owner] for owner in (groups if client is None else groups.keys() & {client})]
        span = (spans[0][0], spans[-1][1]) if spans else (0, 0)
        return Rows(*(column[slice(*span)] for column in self._columns))

    def test_rows(self, task: int, client: int | None = None) -> Rows:
        """The test rows that one client, or all of them, are judged by.

        Rows that clients share have client -1. In a limitless pool a client is judged by those of its own classes.
        """
        shared = self.rows(task, "test", -1)
        classes = self.tasks[task].classes_by_client
        if classes is not None and len(shared):
            judged = classes if client is None else [client]
            return Rows.concatenate([shared.as_those_of(one, classes[one]) for one in judged if one in classes])
        own = self.rows(task, "test", client)
        return own if client is None else Rows.concatenate([own, shared])

    @property
    def grows(self) -> bool:
        """Whether more tasks may arrive, of which nobody knows anything yet."""
        return self.kind == Arrival.name

    def held_out_rows(self, split: str, task: int, client: int | None = None) -> Rows:
        """The val rows of a task, or the test rows: of one client, or of all of them."""
        return self.test_rows(task, client) if split == "test" else self.rows(task, split, client)

    def clients_with(self, task: int, split: str = "train") -> tuple[int, ...]:
        """The clients that have rows of this task."""
        return tuple(client for client in self._groups.get((task, split), {}) if client >= 0)

    @functools.cached_property
    def _columns(self) -> tuple[np.ndarray, ...]:
        table = self._order
        return tuple(
            table[name].cast(pl.Int64).to_numpy(writable=True) for name in ("sample", "label", "task", "client")
        )

    def _first_and_last_row_of_each_group(self) -> dict[tuple[int, str], dict[int, tuple[int, int]]]:
        sizes = self._order.group_by("task", "split", "client", maintain_order=True).len()
        groups: dict[tuple[int, str], dict[int, tuple[int, int]]] = {}
        start = 0
        for task, split, client, size in sizes.iter_rows():
            groups.setdefault((task, split), {})[client] = (start, start + size)
            start += size
        return groups


def read(folder: Path) -> tuple[dict, pl.DataFrame]:
    """The facts and the manifest of a splits folder; one of UNREADABLE where they are not whole or do not fit."""
    facts, manifest = read_json(folder / "stream.json"), read_table(folder / "manifest.parquet")
    if facts["format"] != FORMAT:
        raise ValueError(f"format {facts['format']!a}, this version reads {FORMAT}")
    if facts["digest"] != content_digest(manifest, facts):
        raise ValueError("the manifest and stream.json do not match their digest: changed or cut short")
    refuse_unfit(manifest, facts)
    return facts, manifest


def refuse_unfit(manifest: pl.DataFrame, facts: dict) -> None:
    """ValueError where rows are of no sample, class, task or client that there is, or facts are of another kind."""
    if manifest.schema != SCHEMA or manifest.is_empty():
        raise ValueError(f"the manifest has not the columns {', '.join(SCHEMA)}, or no rows")
    if any(column.has_nulls() for column in manifest):
        raise ValueError("the manifest has empty places")
    known = checked(_Facts, facts)
    counts = {name: len(getattr(known, name)) for name in ("classes", "domains", "tasks")}
    limits = {"label": counts["classes"], "domain": counts["domains"], "task": counts["tasks"], "client": known.clients}
    for name, limit in limits.items():
        least = -1 if name == "client" else 0  # -1: everyone's
        if not manifest[name].is_between(least, limit - 1).fill_null(False).all():
            raise ValueError(f"the manifest has a {name} that is none of {limit}")
    if not len(known.mean) == len(known.std) == channels_of(known.shape):
        raise ValueError(f"mean and std are not of {channels_of(known.shape)} channels")
    if any(label >= counts["classes"] for task in known.tasks for label in task.classes):
        raise ValueError("a task has a class that there is not")


def content_digest(manifest: pl.DataFrame, facts: dict) -> str:
    """SHA-256 of the manifest's values and the facts of stream.json, whatever their files' formats."""
    digested = {name: value for name, value in facts.items() if name not in NOT_DIGESTED}
    state = hashlib.sha256(json.dumps(digested, sort_keys=True).encode())
    in_order = manifest.sort("task", "client", "split", "sample")
    for column in in_order.with_columns(pl.col("split").replace_strict(SPLITS, range(3), return_dtype=pl.Int8)):
        state.update(column.to_numpy().tobytes())
    return state.hexdigest()


def _task(index: int, facts: dict) -> Task:
    by_client = facts.get("classes_by_client")
    return Task(
        index,
        facts["name"],
        tuple(facts["classes"]),
        facts["permutation"],
        None if by_client is None else {int(client): tuple(classes) for client, classes in by_client.items()},
    )


def prepared_file(folder: Path, facts: dict) -> Path:
    """Where the samples are that a splits folder numbers."""
    return folder / facts["prepared"] / kind_of(facts["shape"]).file


def _images(folder: Path, facts: dict, last: int) -> Tensor:
    """The prepared images or token ids, memory-mapped: a sample is read from disk when a batch holds it."""
    kind, path = kind_of(facts["shape"]), prepared_file(folder, facts)
    try:
        meta = read_json(path.parent / "meta.json")
        images = read_array(path, "c")
        digest = meta["digest"]
    except (OSError, EOFError, ValueError, LookupError, TypeError) as problem:
        reason = str(problem).partition("\n")[0]
        raise UserError(f"{path} cannot be read ({reason}). Make it again: fcl prepare.") from problem
    if digest != facts["prepared_digest"]:
        raise UserError(f"{folder} was split from other data than {path.parent} holds. Make it again: fcl partition.")
    if images.dtype != kind.dtype or images.shape[1:] != tuple(facts["shape"]) or len(images) <= last:
        raise UserError(
            f"{path} holds {images.dtype} {images.shape}, which does not fit its splits. Make it again: fcl prepare."
        )
    return torch.from_numpy(images)
