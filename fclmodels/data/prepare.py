"""Prepared data: the decoded samples of a source (sample_kind.py) as one memory-mapped array, with their table.

Samples that cannot be used (unreadable, of another shape than most, of classes without training samples) are named in
one error, or left out and counted where data.skip_bad is set.
"""

import math
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, TypeVar

import numpy as np
import polars as pl
from pydantic import BaseModel, ConfigDict

from fclmodels.data.decoding import CHUNK, OTHER_CHANNELS, OTHER_SIZE, Defect, Shape, decode_all, find_commonest_shape
from fclmodels.data.sample_kind import TEXTS, find_kind
from fclmodels.data.sources.base import COLUMNS, UNPRINTABLE, Catalogue, Normalisation, Source
from fclmodels.errors import UserError
from fclmodels.settings.schema import ImageSettings, SourceSettings
from fclmodels.storage.array_cache import create_array
from fclmodels.storage.digests import begin_digest
from fclmodels.storage.files import replace_file, replace_folder
from fclmodels.storage.untrusted import read_array, read_table

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
    smaller: Literal["pad"] | None = None  # images smaller than the shape got a border
    normalisations: tuple[Normalisation, ...] | None = None  # of each domain, where they differ
    tokenizer: str | None = None
    skipped: int
    digest: str = ""


@dataclass(frozen=True)
class Prepared:
    """A prepared folder: the samples as an array [N, *shape] on disk, and a table with a row for each."""

    folder: Path
    meta: Meta
    array: np.ndarray
    samples: pl.DataFrame

    @classmethod
    def open(cls, folder: Path) -> "Prepared":
        """Read a prepared folder; UserError where a file is missing, cut short or does not fit the others."""
        folder = Path(folder)
        meta = _read(folder / "meta.json", lambda path: Meta.model_validate_json(path.read_bytes()))
        file = folder / find_kind(meta.shape).file
        array = _read(file, lambda path: read_array(path, "r"))
        samples = _read(folder / "samples.parquet", read_table)
        if samples.schema != {"sample": pl.UInt32} | COLUMNS:
            raise UserError(f"{folder / 'samples.parquet'} has other columns: {', '.join(samples.columns)}. {AGAIN}")
        actual, right = (array.dtype, array.shape), (find_kind(meta.shape).dtype, (len(samples), *meta.shape))
        if actual != right:
            raise UserError(f"{file} holds {actual[0]} {actual[1]}, not {right[0]} {right[1]}. {AGAIN}")
        for column, names in {"label": meta.classes, "domain": meta.domains}.items():
            if not samples[column].is_between(0, len(names) - 1).fill_null(False).all():
                raise UserError(f"{folder / 'samples.parquet'} has a {column} that is none of {len(names)}. {AGAIN}")
        if samples["origin"].str.contains(UNPRINTABLE).any():
            raise UserError(f"{folder / 'samples.parquet'} has an origin that cannot be printed. {AGAIN}")
        return cls(folder, meta, array, samples)

    def verify(self) -> None:
        """Raise UserError where the content does not match its digest."""
        if digest(self.meta, self.array, self.samples) != self.meta.digest:
            raise UserError(f"{self.folder} does not match its digest (changed after it was written). {AGAIN}")


def prepare(source: Source, folder: Path) -> Prepared:
    """Decode all samples of the source into the folder, which appears complete or not at all."""
    folder = Path(folder)
    _refuse_foreign(folder)
    catalogue, settings = source.catalogue(), source.settings
    if catalogue.samples.is_empty():
        raise UserError(f"data.source: {source.name} holds no samples.")
    shape = find_commonest_shape(catalogue, settings)
    mean, std = _find_normalisation(settings, shape[0])
    with replace_folder(folder) as temporary:
        _refuse_too_large(temporary, len(catalogue.samples), shape)
        file = temporary / find_kind(shape).file
        defects = decode_all(catalogue, settings, shape, file)
        classes, domains, samples = _drop_bad(source, catalogue, defects, find_kind(shape).plural)
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
            smaller="pad" if isinstance(settings, ImageSettings) and settings.smaller == "pad" else None,
            normalisations=_select_normalisations(catalogue, domains, shape[0]),
            tokenizer=catalogue.tokenizer,
            skipped=len(catalogue.samples) - len(samples),
        )
        meta = meta.model_copy(update={"digest": digest(meta, array, samples)})
        (temporary / "meta.json").write_text(meta.model_dump_json(indent=1) + "\n")
    return Prepared.open(folder)


def digest(meta: Meta, array: np.ndarray, samples: pl.DataFrame) -> str:
    """Return the SHA-256 of all that training could see: facts, table and samples, whatever the files' formats."""
    facts = meta.model_dump(exclude={"digest", "skipped"}, exclude_none=True)
    state = begin_digest([facts, samples.to_dict(as_series=False)])
    for start in range(0, len(array), CHUNK):
        state.update(np.ascontiguousarray(array[start : start + CHUNK]).data)
    return state.hexdigest()


def _drop_bad(
    source: Source, catalogue: Catalogue, defects: list[Defect], plural: str
) -> tuple[tuple[str, ...], tuple[str, ...], pl.DataFrame]:
    """Return the usable classes, domains and samples, renumbered; `sample` still is the row of the catalogue."""
    samples = catalogue.samples.with_row_index("sample")
    samples = samples.filter(~pl.col("sample").is_in([defect.row for defect in defects]))
    labels = samples.filter(pl.col("official").ne_missing("test"))["label"].unique().sort()
    samples = samples.filter(pl.col("label").is_in(labels.implode()))
    domains = samples["domain"].unique().sort()
    usable_classes = tuple(catalogue.classes[label] for label in labels)
    usable_domains = tuple(catalogue.domains[domain] for domain in domains)

    bad: dict[str, list[str]] = {}
    for defect in defects:
        bad.setdefault(defect.kind, []).append(f"{catalogue.samples['origin'][defect.row]}: {defect.why}")
    bad["classes without {} to train on"] = [name for name in catalogue.classes if name not in usable_classes]
    bad["domains without {}"] = [name for name in catalogue.domains if name not in usable_domains]
    bad = {kind: names for kind, names in bad.items() if names}
    _refuse(source, bad, len(samples), len(catalogue.samples), plural)

    renumbered = samples.with_columns(
        label=labels.search_sorted(samples["label"]).cast(pl.Int32),
        domain=domains.search_sorted(samples["domain"]).cast(pl.Int16),
    )
    return usable_classes, usable_domains, renumbered


def _refuse(source: Source, bad: dict[str, list[str]], usable: int, count: int, plural: str) -> None:
    """Raise one UserError that names all bad samples and the remedies, unless they may be left out."""
    most_is_bad = 2 * usable < count
    if not bad or (source.settings.skip_bad and not most_is_bad):
        return
    remedies = [] if most_is_bad else ["data.skip_bad: true to leave them out"]
    remedies += ["data.size to resize all images"] if OTHER_SIZE in bad else []
    remedies += ["data.channels to make all grey (1) or coloured (3)"] if OTHER_CHANNELS in bad else []
    lists = "; ".join(f"{kind.format(plural)}: {len(names)} ({_shorten(names)})" for kind, names in bad.items())
    right = f"Set {', or '.join(remedies)}." if remedies else "That is most of them: check data.source and data.root."
    raise UserError(f"{source.name}: {lists}, of {count} {plural}. {right}")


def _shorten(names: list[str]) -> str:
    return ", ".join(names[:NAMED]) + (", ..." if len(names) > NAMED else "")


def _keep_rows(path: Path, rows: np.ndarray) -> np.ndarray:
    """Rewrite the file with the samples of these rows alone; return them."""
    array = np.load(path, mmap_mode="r")
    if len(rows) == len(array):
        return array
    with replace_file(path) as temporary:
        selection = create_array(temporary, array.dtype, (len(rows), *array.shape[1:]))
        for start in range(0, len(rows), CHUNK):
            selection[start : start + CHUNK] = array[rows[start : start + CHUNK]]
        selection.flush()
    return selection


def _find_normalisation(settings: SourceSettings, channels: int) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Return the mean and standard deviation of each channel; none where there are no pixels."""
    if not isinstance(settings, ImageSettings):
        return (), ()
    return _repeat_for_channels("mean", settings.mean, channels), _repeat_for_channels("std", settings.std, channels)


def _select_normalisations(
    catalogue: Catalogue, domains: tuple[str, ...], channels: int
) -> tuple[Normalisation, ...] | None:
    """Return those of the usable domains, a number for each channel."""
    if catalogue.normalisations is None:
        return None
    own = (catalogue.normalisations[catalogue.domains.index(domain)] for domain in domains)
    return tuple(
        Normalisation(_repeat_for_channels("mean", n.mean, channels), _repeat_for_channels("std", n.std, channels))
        for n in own
    )


def _repeat_for_channels(setting: str, values: tuple[float, ...], channels: int) -> tuple[float, ...]:
    if len(values) not in (1, channels):
        raise UserError(
            f"data.{setting} has {len(values)} numbers. Right: one for all channels, or {channels}, one each."
        )
    return values * (channels // len(values))


def _refuse_foreign(folder: Path) -> None:
    """Raise UserError where the folder holds something that prepare did not write."""
    if folder.is_dir() and any(folder.iterdir()) and not (folder / "meta.json").exists():
        raise UserError(f"{folder} holds something else than prepared data. Name another folder, or empty this one.")
    if folder.exists() and not folder.is_dir():
        raise UserError(f"{folder} is a file. Name a folder for the prepared data.")


def _refuse_too_large(folder: Path, count: int, shape: Shape) -> None:
    """Raise UserError where the samples do not fit the disk: one that fills up under a memory map kills the process."""
    kind = find_kind(shape)
    needed, free = count * math.prod(shape) * kind.dtype.itemsize, shutil.disk_usage(folder).free
    if needed > free:
        size = f"{count} {kind.plural} of {' x '.join(map(str, shape))} take {needed / 1e9:.1f} GB"
        smaller = "data.length" if kind is TEXTS else "data.size"
        raise UserError(f"{folder.parent}: {size}, and {free / 1e9:.1f} GB are free. Set {smaller}, or make room.")


def _read(path: Path, reader: Callable[[Path], Content]) -> Content:
    try:
        return reader(path)
    except FileNotFoundError as problem:
        raise UserError(f"{path} is missing. {AGAIN}") from problem
    except (OSError, EOFError, ValueError) as problem:
        reason = " ".join(str(problem).split())
        raise UserError(f"{path} cannot be read ({reason}). {AGAIN}") from problem
