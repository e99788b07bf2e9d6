"""A source is decoded once: its samples (kinds.py) as one memory-mapped array, their table beside it.

What cannot be used (unreadable samples, images unlike the others, classes without samples) is named in one error, or
left out and counted where data.skip_bad says so.
"""

import hashlib
import json
import math
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, TypeVar

import numpy as np
import polars as pl
from pydantic import BaseModel, ConfigDict

from fclmodels.data.decoding import CHUNK, OTHER_CHANNELS, OTHER_SIZE, Fault, Shape, commonest_shape, decode_all
from fclmodels.data.sources.base import COLUMNS, UNPRINTABLE, Catalogue, Source
from fclmodels.errors import UserError
from fclmodels.foreign import read_array, read_table
from fclmodels.kinds import TEXTS, kind_of
from fclmodels.mapped import new_array
from fclmodels.settings import ImageSettings, SourceSettings

NAMED = 20
AGAIN = "Make it again: fcl prepare."

Content = TypeVar("Content")


class Meta(BaseModel):
    """meta.json of a prepared folder."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    format: Literal[1] = 1
    source: str
    classes: tuple[str, ...]
    domains: tuple[str, ...]
    shape: Shape
    own_label_spaces: bool
    mean: tuple[float, ...]
    std: tuple[float, ...]
    tokenizer: str | None = None
    skipped: int
    digest: str = ""


@dataclass(frozen=True)
class Prepared:
    """A prepared folder: the samples as an array [N, *shape] on disk, and one row a sample of what is known of them."""

    folder: Path
    meta: Meta
    array: np.ndarray
    samples: pl.DataFrame

    @classmethod
    def open(cls, folder: Path) -> "Prepared":
        """Read a prepared folder; UserError where a file is missing, cut short or does not fit the others."""
        folder = Path(folder)
        meta = _read(folder / "meta.json", lambda path: Meta.model_validate_json(path.read_bytes()))
        file = folder / kind_of(meta.shape).file
        array = _read(file, lambda path: read_array(path, "r"))
        samples = _read(folder / "samples.parquet", read_table)
        if samples.schema != {"sample": pl.UInt32} | COLUMNS:
            raise UserError(f"{folder / 'samples.parquet'} has other columns: {', '.join(samples.columns)}. {AGAIN}")
        found, right = (array.dtype, array.shape), (kind_of(meta.shape).dtype, (len(samples), *meta.shape))
        if found != right:
            raise UserError(f"{file} holds {found[0]} {found[1]}, not {right[0]} {right[1]}. {AGAIN}")
        for column, names in {"label": meta.classes, "domain": meta.domains}.items():
            if not samples[column].is_between(0, len(names) - 1).fill_null(False).all():
                raise UserError(f"{folder / 'samples.parquet'} has a {column} that is none of {len(names)}. {AGAIN}")
        if samples["origin"].str.contains(UNPRINTABLE).any():
            raise UserError(f"{folder / 'samples.parquet'} has an origin that cannot be printed. {AGAIN}")
        return cls(folder, meta, array, samples)

    def verify(self) -> None:
        """UserError where the content is no longer the one that the digest names."""
        if digest(self.meta, self.array, self.samples) != self.meta.digest:
            raise UserError(f"{self.folder} does not match its digest (changed after it was written). {AGAIN}")


def prepare(source: Source, folder: Path) -> Prepared:
    """Decode all samples of the source into the folder, which appears whole or not at all."""
    folder = Path(folder)
    _refuse_foreign(folder)
    catalogue, settings = source.catalogue(), source.settings
    if catalogue.samples.is_empty():
        raise UserError(f"data.source: {source.name} holds no samples.")
    shape = commonest_shape(catalogue, settings)
    mean, std = _normalisation(settings, shape[0])
    with _replacing(folder) as temporary:
        _refuse_too_large(temporary, len(catalogue.samples), shape)
        file = temporary / kind_of(shape).file
        faults = decode_all(catalogue, settings, shape, file)
        classes, domains, samples = _without_bad(source, catalogue, faults, kind_of(shape).plural)
        array = _keep_rows(file, samples["sample"].to_numpy())
        samples = samples.with_columns(sample=pl.int_range(len(samples), dtype=pl.UInt32))
        samples.write_parquet(temporary / "samples.parquet")
        meta = Meta(
            source=source.name,
            classes=classes,
            domains=domains,
            shape=shape,
            own_label_spaces=catalogue.own_label_spaces,
            mean=mean,
            std=std,
            tokenizer=catalogue.tokenizer,
            skipped=len(catalogue.samples) - len(samples),
        )
        meta = meta.model_copy(update={"digest": digest(meta, array, samples)})
        (temporary / "meta.json").write_text(meta.model_dump_json(indent=1) + "\n")
    return Prepared.open(folder)


def digest(meta: Meta, array: np.ndarray, samples: pl.DataFrame) -> str:
    """SHA-256 of all that training could see: facts, table and samples, whatever their files' formats."""
    facts = meta.model_dump(exclude={"digest", "skipped"}, exclude_none=True)
    state = hashlib.sha256(json.dumps([facts, samples.to_dict(as_series=False)], sort_keys=True).encode())
    for start in range(0, len(array), CHUNK):
        state.update(np.ascontiguousarray(array[start : start + CHUNK]).data)
    return state.hexdigest()


def _without_bad(
    source: Source, catalogue: Catalogue, faults: list[Fault], plural: str
) -> tuple[tuple[str, ...], tuple[str, ...], pl.DataFrame]:
    """Classes, domains and samples that can be used, numbered anew; `sample` still is the row of the catalogue."""
    samples = catalogue.samples.with_row_index("sample")
    samples = samples.filter(~pl.col("sample").is_in([fault.row for fault in faults]))
    labels = samples.filter(pl.col("official").ne_missing("test"))["label"].unique().sort()
    samples = samples.filter(pl.col("label").is_in(labels.implode()))
    domains = samples["domain"].unique().sort()
    classes_left = tuple(catalogue.classes[label] for label in labels)
    domains_left = tuple(catalogue.domains[domain] for domain in domains)

    bad: dict[str, list[str]] = {}
    for fault in faults:
        bad.setdefault(fault.kind, []).append(f"{catalogue.samples['origin'][fault.row]}: {fault.why}")
    bad["classes without {} to train on"] = [name for name in catalogue.classes if name not in classes_left]
    bad["domains without {}"] = [name for name in catalogue.domains if name not in domains_left]
    bad = {kind: names for kind, names in bad.items() if names}
    _refuse(source, bad, len(samples), len(catalogue.samples), plural)

    renumbered = samples.with_columns(
        label=labels.search_sorted(samples["label"]).cast(pl.Int32),
        domain=domains.search_sorted(samples["domain"]).cast(pl.Int16),
    )
    return classes_left, domains_left, renumbered


def _refuse(source: Source, bad: dict[str, list[str]], left: int, count: int, plural: str) -> None:
    """One UserError that names all that is bad and the ways out, unless it may be left out."""
    most_is_bad = 2 * left < count
    if not bad or (source.settings.skip_bad and not most_is_bad):
        return
    ways = [] if most_is_bad else ["data.skip_bad: true to leave them out"]
    ways += ["data.size to resize all images"] if OTHER_SIZE in bad else []
    ways += ["data.channels to make all grey (1) or coloured (3)"] if OTHER_CHANNELS in bad else []
    told = "; ".join(f"{kind.format(plural)}: {len(names)} ({_first(names)})" for kind, names in bad.items())
    right = f"Set {', or '.join(ways)}." if ways else "That is most of them: check data.source and data.root."
    raise UserError(f"{source.name}: {told}, of {count} {plural}. {right}")


def _first(names: list[str]) -> str:
    return ", ".join(names[:NAMED]) + (", ..." if len(names) > NAMED else "")


def _keep_rows(path: Path, rows: np.ndarray) -> np.ndarray:
    """The samples of these rows alone, in the same file."""
    array = np.load(path, mmap_mode="r")
    if len(rows) == len(array):
        return array
    shorter = path.with_suffix(".kept")
    kept = new_array(shorter, array.dtype, (len(rows), *array.shape[1:]))
    for start in range(0, len(rows), CHUNK):
        kept[start : start + CHUNK] = array[rows[start : start + CHUNK]]
    os.replace(shorter, path)
    return kept


def _normalisation(settings: SourceSettings, channels: int) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Mean and standard deviation of each channel, none where there are no pixels."""
    if not isinstance(settings, ImageSettings):
        return (), ()
    return _each_channel("mean", settings.mean, channels), _each_channel("std", settings.std, channels)


def _each_channel(setting: str, values: tuple[float, ...], channels: int) -> tuple[float, ...]:
    if len(values) not in (1, channels):
        raise UserError(
            f"data.{setting} has {len(values)} numbers. Right: one for all channels, or {channels}, one each."
        )
    return values * (channels // len(values))


def _refuse_foreign(folder: Path) -> None:
    """What prepare did not write it does not replace."""
    if folder.is_dir() and any(folder.iterdir()) and not (folder / "meta.json").exists():
        raise UserError(f"{folder} holds something else than prepared data. Name another folder, or empty this one.")
    if folder.exists() and not folder.is_dir():
        raise UserError(f"{folder} is a file. Name a folder for the prepared data.")


def _refuse_too_large(folder: Path, count: int, shape: Shape) -> None:
    """A disk that fills up under a memory map kills the process, so the room is asked for before."""
    kind = kind_of(shape)
    needed, free = count * math.prod(shape) * kind.dtype.itemsize, shutil.disk_usage(folder).free
    if needed > free:
        size = f"{count} {kind.plural} of {' x '.join(map(str, shape))} take {needed / 1e9:.1f} GB"
        smaller = "data.length" if kind is TEXTS else "data.size"
        raise UserError(f"{folder.parent}: {size}, and {free / 1e9:.1f} GB are free. Set {smaller}, or make room.")


@contextmanager
def _replacing(folder: Path) -> Iterator[Path]:
    """A folder beside this one that takes its place when the block ends well, and goes when it does not."""
    folder = folder.absolute()
    partial, old = (folder.with_name(f".{folder.name}.{state}") for state in ("partial", "old"))
    for leftover in (partial, old):  # of a run that was killed
        shutil.rmtree(leftover, ignore_errors=True)
    partial.mkdir(parents=True)
    try:
        yield partial
        if folder.exists():
            os.replace(folder, old)
        os.replace(partial, folder)
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    shutil.rmtree(old, ignore_errors=True)


def _read(path: Path, reader: Callable[[Path], Content]) -> Content:
    try:
        return reader(path)
    except FileNotFoundError as problem:
        raise UserError(f"{path} is missing. {AGAIN}") from problem
    except (OSError, EOFError, ValueError) as problem:
        reason = " ".join(str(problem).split())
        raise UserError(f"{path} cannot be read ({reason}). {AGAIN}") from problem
