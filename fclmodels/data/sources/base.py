"""A source says which samples there are and how to open one; `prepare` does the decoding."""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, TypeVar

import numpy as np
import polars as pl
from PIL import Image
from pydantic import ValidationError

from fclmodels.errors import UserError, did_you_mean
from fclmodels.settings import ImageSettings, Settings, SourceSettings

PartSettings = TypeVar("PartSettings", bound=Settings)

# group: samples that show the same thing (one image in several domains) belong in one split and have one number,
# counted from 0; null where there is no such thing.
COLUMNS = {"label": pl.Int32, "domain": pl.Int16, "official": pl.String, "origin": pl.String, "group": pl.UInt32}
UNPRINTABLE = r"[\p{Cc}\p{Zl}\p{Zp}]"  # what would break the line of an error that tells an origin


@dataclass(frozen=True)
class Catalogue:
    """The samples of a source before any is decoded.

    `samples` has the COLUMNS, one row a sample; `open(row)` gives the picture of a row, or its tokens (kinds.py), and
    may raise anything where it cannot. Classes and domains may be listed that no row has: `prepare` names them.
    `tokenizer` is the digest of what made the tokens.
    """

    classes: tuple[str, ...]
    domains: tuple[str, ...]
    samples: pl.DataFrame
    open: Callable[[int], Image.Image | np.ndarray]
    own_label_spaces: bool = False
    tokenizer: str | None = None


class Source:
    """Where samples come from."""

    name: ClassVar[str]
    reads_root: ClassVar[bool] = True
    Settings: ClassVar[type[SourceSettings]] = ImageSettings

    def __init__(self, settings: SourceSettings) -> None:
        self.settings = settings

    @property
    def folders(self) -> tuple[Path, ...]:
        """Those whose files it reads."""
        return (self.settings.root,) if self.reads_root else ()

    def catalogue(self) -> Catalogue:
        raise NotImplementedError


def part_settings(where: str, cls: type[PartSettings], block: Mapping[str, Any]) -> PartSettings:
    """What `data.parts` says of one data set, as settings of this class."""
    try:
        return cls(**block)
    except ValidationError as problem:
        error = problem.errors()[0]
        name = ".".join(map(str, error["loc"]))
        hint = f". {did_you_mean(name, cls.model_fields)}" if error["type"] == "extra_forbidden" else ""
        raise UserError(f"{where}.{name}: {error['msg']}{hint}") from problem


def refuse_doubled(names: Sequence[str]) -> None:
    doubled = [name for name, times in Counter(names).items() if times > 1]
    if doubled:
        raise UserError(f"data.parts: {', '.join(doubled)} is there more than once. Give each a name of its own.")


def table(label: Any, origin: Sequence[str], domain: Any = 0, official: Any = None, group: Any = None) -> pl.DataFrame:
    """The samples of a catalogue: a value a row in each column, or one value for all rows."""
    columns = {"label": label, "domain": domain, "official": official, "origin": origin, "group": group}
    return pl.DataFrame(columns, schema=COLUMNS).with_columns(pl.col("origin").str.replace_all(UNPRINTABLE, "�"))


def catalogue_of_arrays(
    name: str, classes: Sequence[str], parts: Mapping[str | None, tuple[np.ndarray, np.ndarray]]
) -> Catalogue:
    """Arrays by official split (None: there is none): uint8 images [n, H, W] or [n, H, W, 3] and their labels [n]."""
    tables = [
        table(labels, [f"{split or name}:{i}" for i in range(len(labels))], official=split)
        for split, (_, labels) in parts.items()
    ]
    rows = [image for images, _ in parts.values() for image in images]
    return Catalogue(tuple(classes), (name,), pl.concat(tables), lambda row: Image.fromarray(rows[row]))
