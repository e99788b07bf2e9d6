"""A source lists samples and opens them one by one; `prepare` decodes them."""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, TypeVar

import numpy as np
import polars as pl
from PIL import Image
from pydantic import ValidationError

from fclmodels.errors import UserError, suggest_name
from fclmodels.settings.base import Settings
from fclmodels.settings.schema import ImageSettings, SourceSettings

PartSettings = TypeVar("PartSettings", bound=Settings)

# group: a number from 0, the same for samples that show the same thing (one image in several domains), which belong in
# one split; null where a sample has no such others.
COLUMNS = {"label": pl.Int32, "domain": pl.Int16, "official": pl.String, "origin": pl.String, "group": pl.UInt32}
UNPRINTABLE = r"[\p{Cc}\p{Zl}\p{Zp}]"  # characters that would break an error line with an origin


@dataclass(frozen=True)
class Normalisation:
    """The mean and the standard deviation of pixels in 0..1: one number for all channels, or one each."""

    mean: tuple[float, ...]
    std: tuple[float, ...]


@dataclass(frozen=True)
class Catalogue:
    """The samples of a source before any is decoded.

    Classes and domains may be listed that no row has: `prepare` names them.
    """

    classes: tuple[str, ...]
    domains: tuple[str, ...]
    samples: pl.DataFrame  # with the COLUMNS
    open: Callable[[int], Image.Image | np.ndarray]  # a row's picture, or its tokens; may raise anything
    own_label_spaces: bool = False
    tokenizer: str | None = None  # digest of the tokenizer
    normalisations: tuple[Normalisation, ...] | None = None  # of each domain, where they differ


class Source:
    """An origin of samples."""

    name: ClassVar[str]
    reads_root: ClassVar[bool] = True
    Settings: ClassVar[type[SourceSettings]] = ImageSettings

    def __init__(self, settings: SourceSettings) -> None:
        self.settings = settings

    @property
    def folders(self) -> tuple[Path, ...]:
        """The folders whose files it reads."""
        return (self.settings.root,) if self.reads_root else ()

    @property
    def modules(self) -> tuple[str, ...]:
        """The modules whose code lists and opens its samples."""
        return (type(self).__module__,)

    def catalogue(self) -> Catalogue:
        """List the samples."""
        raise NotImplementedError


def parse_part(where: str, cls: type[PartSettings], block: Mapping[str, Any]) -> PartSettings:
    """Parse the settings of one data set in `data.parts`; UserError that names the first mistake."""
    try:
        return cls(**block)
    except ValidationError as problem:
        error = problem.errors()[0]
        name = ".".join(map(str, error["loc"]))
        hint = f". {suggest_name(name, cls.model_fields)}" if error["type"] == "extra_forbidden" else ""
        raise UserError(f"{where}.{name}: {error['msg']}{hint}") from problem


def refuse_duplicates(names: Sequence[str]) -> None:
    duplicates = [name for name, count in Counter(names).items() if count > 1]
    if duplicates:
        raise UserError(f"data.parts: {', '.join(duplicates)} is there more than once. Give each a name of its own.")


def make_table(
    label: Any, origin: Sequence[str], domain: Any = 0, official: Any = None, group: Any = None
) -> pl.DataFrame:
    """Return the samples of a catalogue: in each column a value a row, or one value for all rows."""
    columns = {"label": label, "domain": domain, "official": official, "origin": origin, "group": group}
    return pl.DataFrame(columns, schema=COLUMNS).with_columns(pl.col("origin").str.replace_all(UNPRINTABLE, "�"))


def list_arrays(
    name: str, classes: Sequence[str], parts: Mapping[str | None, tuple[np.ndarray, np.ndarray]]
) -> Catalogue:
    """Return a catalogue of arrays by official split (None: no split): images [n, H, W] or [n, H, W, 3], labels [n]."""
    tables = [
        make_table(labels, [f"{split or name}:{i}" for i in range(len(labels))], official=split)
        for split, (_, labels) in parts.items()
    ]
    rows = [image for images, _ in parts.values() for image in images]
    return Catalogue(tuple(classes), (name,), pl.concat(tables), lambda row: Image.fromarray(rows[row]))
