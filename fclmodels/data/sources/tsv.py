"""Data sets of texts, or pairs of texts, in tab-separated files such as GLUE's, each a domain; tokenised once.

A file's first line names its columns. A field is all that stands between two tabs: quotes are part of the text, as
in GLUE. Blank lines are skipped; a row with more or fewer columns than the first, without text, or with an unknown
label is reported by its line.
"""

import codecs
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import Any, Literal

import numpy as np
import polars as pl
from pydantic import Field, PositiveInt

from fclmodels.data.sources.base import Catalogue, Source, make_table, parse_part, refuse_duplicates
from fclmodels.data.tokens import Tokenizer
from fclmodels.errors import UserError, format_value, is_unprintable, suggest_name
from fclmodels.settings.base import Settings as BaseSettings
from fclmodels.settings.schema import SourceSettings


class DataSetSettings(BaseSettings):
    """The settings of one data set."""

    name: str
    train: Path
    test: Path | None = None
    text: tuple[str, ...] = Field(min_length=1, max_length=2)
    label: str = "label"
    labels: tuple[str, ...] | None = None
    rows: PositiveInt | None = None


@dataclass(frozen=True)
class Row:
    """A line of a file: its texts and label, or the reason why it cannot be used."""

    origin: str
    texts: tuple[str, ...] = ()
    label: str | None = None
    fault: str = ""


class Tsv(Source):
    """texts or pairs of texts in .tsv files, one data set or several, tokenised by a local tokenizer (extra text)"""

    name = "tsv"

    class Settings(SourceSettings):
        tokenizer: Path = Field(
            Path("data/raw/encoder"), description="folder of the tokenizer's files: the encoder's own"
        )
        length: int = Field(128, ge=8, le=8192, description="tokens of a text or pair; shorter ones are padded")
        label_space: Literal["own", "shared"] = Field(
            "own", description="each data set has labels of its own, or the k-th labels of all are one class"
        )
        parts: tuple[dict[str, Any], ...] = Field(
            (
                {"name": "sst-2", "train": "SST-2/train.tsv", "test": "SST-2/dev.tsv", "text": ["sentence"]},
                {
                    "name": "qqp",
                    "train": "QQP/train.tsv",
                    "test": "QQP/dev.tsv",
                    "text": ["question1", "question2"],
                    "label": "is_duplicate",
                },
                {
                    "name": "qnli",
                    "train": "QNLI/train.tsv",
                    "test": "QNLI/dev.tsv",
                    "text": ["question", "sentence"],
                    "labels": ["not_entailment", "entailment"],
                },
            ),
            min_length=1,
            description="the data sets in their order: name; train and test, files from root on (no test: a share is "
            "held out); text, one column or two; label, a column; labels, its values in the order of the classes (if "
            "not that of their names); rows, how many train rows from the first on (if not all)",
        )

    settings: Settings

    def __init__(self, settings: SourceSettings) -> None:
        super().__init__(settings)
        blocks = enumerate(self.settings.parts)
        self.parts = [parse_part(f"data.parts.{number}", DataSetSettings, block) for number, block in blocks]
        refuse_duplicates([part.name for part in self.parts])

    @property
    def folders(self) -> tuple[Path, ...]:
        return (*super().folders, self.settings.tokenizer)

    def catalogue(self) -> Catalogue:
        tokenizer = Tokenizer(self.settings.tokenizer, self.settings.length)
        data_sets = [read_data_set(self.settings.root, part) for part in self.parts]
        own = self.settings.label_space == "own" and len(data_sets) > 1
        classes = name_own_classes(data_sets) if own else name_shared_classes(data_sets)
        firsts = accumulate((len(data.labels) for data in data_sets), initial=0) if own else [0] * len(data_sets)
        tables = [
            data.make_table(domain, split, first)
            for domain, (data, first) in enumerate(zip(data_sets, firsts, strict=False))
            for split in data.rows
        ]
        rows = [row for data in data_sets for of_split in data.rows.values() for row in of_split]

        def encode_row(row: int) -> np.ndarray:
            if rows[row].fault:
                raise ValueError(rows[row].fault)
            return tokenizer(rows[row].texts)

        domains = tuple(data.name for data in data_sets)
        return Catalogue(classes, domains, pl.concat(tables), encode_row, own, tokenizer.digest)


@dataclass(frozen=True)
class DataSet:
    """A data set: its labels in the order of the classes, its rows by official split (None: no split)."""

    name: str
    labels: tuple[str, ...]
    rows: dict[str | None, list[Row]]

    def make_table(self, domain: int, split: str | None, first: int) -> pl.DataFrame:
        """Return the rows of a split as a table of samples; labels count from `first` on, bad rows have any."""
        rows = self.rows[split]
        labels = [first + self.labels.index(row.label or self.labels[0]) for row in rows]
        return make_table(labels, [row.origin for row in rows], domain, split)


def name_own_classes(data_sets: Sequence[DataSet]) -> tuple[str, ...]:
    return tuple(f"{data.name}:{label}" for data in data_sets for label in data.labels)


def name_shared_classes(data_sets: Sequence[DataSet]) -> tuple[str, ...]:
    """Return class names; the k-th joins the names of the k-th label in all data sets."""
    if len({len(data.labels) for data in data_sets}) > 1:
        counts = ", ".join(f"{data.name} has {len(data.labels)}" for data in data_sets)
        raise UserError(f"data.label_space: shared needs as many labels in each part: {counts}. Use own.")
    return tuple("/".join(dict.fromkeys(names)) for names in zip(*(data.labels for data in data_sets), strict=True))


def read_data_set(root: Path, part: DataSetSettings) -> DataSet:
    train = read_tsv(root, part.train, part)[: part.rows]
    test = None if part.test is None else read_tsv(root, part.test, part)
    rows = {None: train} if test is None else {"train": train, "test": test}
    labels = part.labels or tuple(sorted({row.label for row in train if row.label is not None}))
    if not labels:
        raise UserError(f"{root / part.train} holds no row that can be used. Its first line names the columns.")
    return DataSet(part.name, labels, {split: [_check_label(row, labels) for row in of] for split, of in rows.items()})


def read_tsv(root: Path, file: Path, part: DataSetSettings) -> list[Row]:
    path = root / file
    try:
        first, *lines = path.read_bytes().removeprefix(codecs.BOM_UTF8).split(b"\n")
    except OSError as problem:
        raise UserError(
            f"{path} cannot be read ({problem.strerror}). Put the file there, or set data.root."
        ) from problem
    names = first.decode(errors="replace").rstrip("\r").split("\t")
    for column in (*part.text, part.label):
        if column not in names:
            readable = [name for name in names if not is_unprintable(name)]
            raise UserError(f"{path}:1: there is no column {column}. {suggest_name(column, readable)}")
    numbered = enumerate(lines, start=2)
    return [read_row(f"{file}:{number}", line, names, part) for number, line in numbered if line.strip()]


def read_row(origin: str, line: bytes, names: Sequence[str], part: DataSetSettings) -> Row:
    try:
        fields = line.decode().rstrip("\r").split("\t")
    except UnicodeDecodeError:
        return Row(origin, fault="not UTF-8")
    if len(fields) != len(names):
        return Row(origin, fault=f"{len(fields)} columns, not {len(names)}")
    field = dict(zip(names, fields, strict=True))
    if empty := [column for column in part.text if not field[column].strip()]:
        return Row(origin, fault=f"no text in column {empty[0]}")
    if not field[part.label].strip():
        return Row(origin, fault=f"no label in column {part.label}")
    if is_unprintable(field[part.label]):
        return Row(origin, fault=f"label {field[part.label]!a} cannot be printed")
    return Row(origin, tuple(field[column] for column in part.text), field[part.label])


def _check_label(row: Row, labels: Sequence[str]) -> Row:
    if row.label is None or row.label in labels:
        return row
    return Row(row.origin, fault=f"label {format_value(row.label)} is none of {', '.join(labels)}")
