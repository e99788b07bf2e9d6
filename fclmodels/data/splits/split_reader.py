"""The splits as the federation reads them: which client has which samples, in which task.

The Parquet manifest says it; the samples stay memory-mapped in the prepared folder.
"""

import functools
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

from fclmodels.data.sample_kind import count_channels, find_kind
from fclmodels.errors import UserError
from fclmodels.storage.digests import begin_digest
from fclmodels.storage.untrusted import Text, read_array, read_json, read_table, validate

FORMAT = 1
UNREADABLE = (OSError, ValueError, LookupError, TypeError, AttributeError, pl.exceptions.PolarsError)
SPLITS = ("train", "val", "test")
GROWING = "arrival"  # the kind of stream whose tasks arrive one by one (data/streams/arrival.py)
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
MOST_CLIENTS = 2**31 - 1  # the largest number in that column
# Entries of stream.json that the digest does not cover.
NOT_DIGESTED = ("digest", "prepared")


@dataclass(frozen=True)
class Task:
    """A task of the stream."""

    index: int
    name: str
    classes: tuple[int, ...]
    permutation: int | None
    classes_by_client: dict[int, tuple[int, ...]] | None
    mean: tuple[float, ...] | None  # of its pixels, where data sets differ in it
    std: tuple[float, ...] | None

    def list_classes(self, client: int | None) -> tuple[int, ...]:
        """Return the classes that this task has for a client: those of everyone, except in a limitless pool."""
        if self.classes_by_client is None or client is None:
            return self.classes
        return self.classes_by_client[client]


class _StreamTaskFacts(BaseModel):
    name: Text
    classes: tuple[NonNegativeInt, ...]
    permutation: int | None
    classes_by_client: dict[str, tuple[NonNegativeInt, ...]] | None = None
    mean: tuple[FiniteFloat, ...] | None = None
    std: tuple[PositiveFloat, ...] | None = None


class _StreamFacts(BaseModel):
    """The content that stream.json must have."""

    kind: str
    head: Literal["growing", "per-task"]
    tasks: tuple[_StreamTaskFacts, ...]
    classes: tuple[Text, ...]
    domains: tuple[Text, ...]
    clients: PositiveInt = Field(le=MOST_CLIENTS)
    shape: tuple[PositiveInt, ...] = Field(min_length=2, max_length=3)
    mean: tuple[FiniteFloat, ...]
    std: tuple[PositiveFloat, ...]
    smaller: Literal["resize", "pad"] = "resize"
    prepared: Text
    prepared_digest: str


@dataclass(frozen=True)
class Rows:
    """Some rows of the manifest."""

    samples: np.ndarray  # [n], rows of the prepared array
    labels: np.ndarray  # [n], the stream's
    tasks: np.ndarray  # [n], from 0
    clients: np.ndarray  # [n]

    def __len__(self) -> int:
        return len(self.samples)

    def take(self, places: np.ndarray) -> "Rows":
        return Rows(self.samples[places], self.labels[places], self.tasks[places], self.clients[places])

    def draw_some(self, most: int | None, random: torch.Generator) -> "Rows":
        """Draw at most so many of them at random, in their old order; None: all."""
        if most is None or most >= len(self):
            return self
        return self.take(np.sort(torch.randperm(len(self), generator=random)[:most].numpy()))

    def assign_to(self, client: int, classes: Sequence[int]) -> "Rows":
        """Return the rows of these classes as a client's."""
        rows = self.take(np.flatnonzero(np.isin(self.labels, classes)))
        return replace(rows, clients=np.full_like(rows.clients, client))

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
        self.smaller: str = facts.get("smaller", "resize")
        self.head: Literal["growing", "per-task"] = facts["head"]
        self.kind: str = facts["kind"]
        self.digest: str = facts["digest"]
        self.prepared_digest: str = facts["prepared_digest"]
        self.tasks = tuple(_parse_task(i, task) for i, task in enumerate(facts["tasks"]))
        self._order = manifest.sort("task", "split", "client", "sample")
        self._groups = self._find_groups()

    @classmethod
    def open(cls, folder: Path) -> "Splits":
        folder = Path(folder)
        for file in (folder / "stream.json", folder / "manifest.parquet"):
            if not file.exists():
                raise UserError(f"{file} is missing. Make the splits first: fcl prepare && fcl partition.")
        try:
            facts, manifest = read_splits(folder)
            return cls(folder, facts, manifest, _map_samples(folder, facts, int(manifest["sample"].to_numpy().max())))
        except UNREADABLE as problem:
            reason = str(problem).partition("\n")[0]
            raise UserError(f"{folder} cannot be read ({reason}). Make it again: {name_command(folder)}.") from problem

    def read_files(self) -> dict[str, bytes]:
        """Read the files, by name, of a folder with these splits and their samples, which `open` needs elsewhere."""
        facts = json.loads((self.folder / "stream.json").read_text())
        samples = find_samples_file(self.folder, facts)
        files = (self.folder / "manifest.parquet", samples.with_name("meta.json"), samples)
        return {
            "stream.json": json.dumps(facts | {"prepared": "."}).encode(),
            **{file.name: file.read_bytes() for file in files},
        }

    def select_rows(self, task: int, split: str, client: int | None = None) -> Rows:
        """Return the rows of one task and split: of one client, or of all."""
        groups = self._groups.get((task, split), {})
        spans = [groups[owner] for owner in (groups if client is None else groups.keys() & {client})]
        span = (spans[0][0], spans[-1][1]) if spans else (0, 0)
        return Rows(*(column[slice(*span)] for column in self._columns))

    def select_test_rows(self, task: int, client: int | None = None) -> Rows:
        """Return the test rows on which one client, or each of them, is evaluated.

        Rows that clients share have client -1. In a limitless pool a client is evaluated on those of its own classes.
        """
        shared = self.select_rows(task, "test", -1)
        classes = self.tasks[task].classes_by_client
        if classes is not None and len(shared):
            clients = classes if client is None else [client]
            return Rows.concatenate([shared.assign_to(one, classes[one]) for one in clients if one in classes])
        own = self.select_rows(task, "test", client)
        return own if client is None else Rows.concatenate([own, shared])

    @property
    def grows(self) -> bool:
        """True where more tasks may arrive, of which nothing is known yet."""
        return self.kind == GROWING

    def select_held_out_rows(self, split: str, task: int, client: int | None = None) -> Rows:
        """Return the val rows of a task, or the test rows: of one client, or of all."""
        return self.select_test_rows(task, client) if split == "test" else self.select_rows(task, split, client)

    def count_classes(self, learned: int) -> int:
        """Return how many classes the first `learned` tasks have; classes are numbered by first appearance."""
        return 1 + max(label for task in self.tasks[:learned] for label in task.classes)

    def list_clients(self, task: int, split: str = "train") -> tuple[int, ...]:
        """Return the clients that have rows of this task."""
        return tuple(client for client in self._groups.get((task, split), {}) if client >= 0)

    @functools.cached_property
    def _columns(self) -> tuple[np.ndarray, ...]:
        table = self._order
        return tuple(
            table[name].cast(pl.Int64).to_numpy(writable=True) for name in ("sample", "label", "task", "client")
        )

    def _find_groups(self) -> dict[tuple[int, str], dict[int, tuple[int, int]]]:
        """Return the first row and the end of each client's rows, by task and split."""
        sizes = self._order.group_by("task", "split", "client", maintain_order=True).len()
        groups: dict[tuple[int, str], dict[int, tuple[int, int]]] = {}
        start = 0
        for task, split, client, size in sizes.iter_rows():
            groups.setdefault((task, split), {})[client] = (start, start + size)
            start += size
        return groups


def read_splits(folder: Path) -> tuple[dict, pl.DataFrame]:
    """Read stream.json and the manifest of a splits folder; one of UNREADABLE where they are damaged or do not fit."""
    facts, manifest = read_json(folder / "stream.json"), read_table(folder / "manifest.parquet")
    if facts["format"] != FORMAT:
        raise ValueError(f"format {facts['format']!a}, this version reads {FORMAT}")
    if facts["digest"] != digest_splits(manifest, facts):
        raise ValueError("the manifest and stream.json do not match their digest: changed or cut short")
    refuse_unfit(manifest, facts)
    return facts, manifest


def refuse_unfit(manifest: pl.DataFrame, facts: dict) -> None:
    """Raise ValueError where rows name a class, task or client that does not exist, or facts are malformed."""
    if manifest.schema != SCHEMA or manifest.is_empty():
        raise ValueError(f"the manifest has not the columns {', '.join(SCHEMA)}, or no rows")
    if any(column.has_nulls() for column in manifest):
        raise ValueError("the manifest has empty places")
    valid = validate(_StreamFacts, facts)
    counts = {name: len(getattr(valid, name)) for name in ("classes", "domains", "tasks")}
    limits = {"label": counts["classes"], "domain": counts["domains"], "task": counts["tasks"], "client": valid.clients}
    for name, limit in limits.items():
        least = -1 if name == "client" else 0  # -1: everyone's
        if not manifest[name].is_between(least, limit - 1).fill_null(False).all():
            raise ValueError(f"the manifest has a {name} that is none of {limit}")
    pairs = [(task.mean, task.std) for task in valid.tasks]
    own = [(valid.mean, valid.std), *(pair for pair in pairs if pair != (None, None))]
    if any(len(numbers or ()) != count_channels(valid.shape) for pair in own for numbers in pair):
        raise ValueError(f"mean and std are not of {count_channels(valid.shape)} channels")
    if len(own) not in (1, 1 + len(valid.tasks)):
        raise ValueError("some tasks have a mean and std of their own, others have none")
    if any(label >= counts["classes"] for task in valid.tasks for label in task.classes):
        raise ValueError("a task has a class that there is not")


def digest_splits(manifest: pl.DataFrame, facts: dict) -> str:
    """Return the SHA-256 of the manifest's values and of stream.json's, whatever the files' formats."""
    digested = {name: value for name, value in facts.items() if name not in NOT_DIGESTED}
    state = begin_digest(digested)
    in_order = manifest.sort("task", "client", "split", "sample")
    for column in in_order.with_columns(pl.col("split").replace_strict(SPLITS, range(3), return_dtype=pl.Int8)):
        state.update(column.to_numpy().tobytes())
    return state.hexdigest()


def _parse_task(index: int, facts: dict) -> Task:
    by_client = facts.get("classes_by_client")
    return Task(
        index,
        facts["name"],
        tuple(facts["classes"]),
        facts["permutation"],
        None if by_client is None else {int(client): tuple(classes) for client, classes in by_client.items()},
        *(tuple(facts[name]) if facts.get(name) else None for name in ("mean", "std")),
    )


def find_samples_file(folder: Path, facts: dict) -> Path:
    """Return the file with the samples of a splits folder."""
    return folder / facts["prepared"] / find_kind(facts["shape"]).file


def name_command(folder: Path) -> str:
    """Return the command that makes these splits: those of a seed lie in a folder of its number."""
    return f"fcl partition --seed {folder.name}" if folder.name.isdecimal() else "fcl partition"


def _map_samples(folder: Path, facts: dict, last: int) -> Tensor:
    """Memory-map the prepared images or token ids: a sample is read from disk when a batch needs it."""
    kind, path = find_kind(facts["shape"]), find_samples_file(folder, facts)
    try:
        meta = read_json(path.parent / "meta.json")
        images = read_array(path, "c")
        digest = meta["digest"]
    except (OSError, EOFError, ValueError, LookupError, TypeError) as problem:
        reason = str(problem).partition("\n")[0]
        raise UserError(f"{path} cannot be read ({reason}). Make it again: fcl prepare.") from problem
    if digest != facts["prepared_digest"]:
        raise UserError(
            f"{folder} was split from other data than {path.parent} holds. Make it again: {name_command(folder)}."
        )
    if images.dtype != kind.dtype or images.shape[1:] != tuple(facts["shape"]) or len(images) <= last:
        raise UserError(
            f"{path} holds {images.dtype} {images.shape}, which does not fit its splits. Make it again: fcl prepare."
        )
    return torch.from_numpy(images)
