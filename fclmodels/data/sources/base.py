"""A source says which samples there are and how to open one; `prepare` does the decoding."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import polars as pl
from PIL import Image

from fclmodels.settings import SourceSettings

# group: samples that show the same thing (one image in several domains) belong in one split and have one number,
# counted from 0; null where there is no such thing.
COLUMNS = {"label": pl.Int32, "domain": pl.Int16, "official": pl.String, "origin": pl.String, "group": pl.UInt32}


@dataclass(frozen=True)
class Catalogue:
    """The samples of a source before any is decoded.

    `samples` has the COLUMNS, one row a sample; `image(row)` opens the picture of a row and may raise anything where
    it cannot. Classes and domains may be listed that no row has: `prepare` names them.
    """

    classes: tuple[str, ...]
    domains: tuple[str, ...]
    samples: pl.DataFrame
    image: Callable[[int], Image.Image]
    own_label_spaces: bool = False


class Source:
    """Where samples come from."""

    name: ClassVar[str]
    reads_root: ClassVar[bool] = True
    Settings: ClassVar[type[SourceSettings]] = SourceSettings

    def __init__(self, settings: SourceSettings) -> None:
        self.settings = settings

    def catalogue(self) -> Catalogue:
        raise NotImplementedError


def table(label: Any, origin: Sequence[str], domain: Any = 0, official: Any = None, group: Any = None) -> pl.DataFrame:
    """The samples of a catalogue: a value a row in each column, or one value for all rows."""
    columns = {"label": label, "domain": domain, "official": official, "origin": origin, "group": group}
    return pl.DataFrame(columns, schema=COLUMNS)


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
