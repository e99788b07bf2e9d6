"""Different data sets one after another: each is a domain.

Its classes are its own, as in FOT's 5-Datasets, or the same as those of the others, as in SPECIAL's Digit-10.
"""

import bisect
from itertools import accumulate
from typing import Any, Literal

import numpy as np
import polars as pl
from PIL import Image
from pydantic import Field, PositiveInt

from fclmodels.data.sources.base import Catalogue, Normalisation, Source, parse_part, refuse_duplicates
from fclmodels.errors import UserError, format_value
from fclmodels.plugins import find
from fclmodels.settings.schema import ImageSettings, SourceSettings

COMMON = {"size", "smaller", "channels", "skip_bad"}


class Sequence(Source):
    """other sources one after another, each a domain: with its own classes (5-Datasets) or the same (Digit-10)"""

    name = "sequence"

    class Settings(ImageSettings):
        size: PositiveInt | None = Field(32, description="side in pixels that all images are resized to")
        channels: Literal[1, 3] | None = Field(3, description="1 grey, 3 colour, for all images")
        label_space: Literal["own", "shared"] = Field(
            "own", description="each data set has classes of its own, or classes of the same name are one"
        )
        parts: tuple[dict[str, Any], ...] = Field(
            ({"source": "cifar10"}, {"source": "mnist"}, {"source": "svhn"}, {"source": "fashion-mnist"}),
            description="the data sets in their order: source, its own settings, a name if not the source's, and mean "
            "and std if not those of all",
        )

    settings: Settings

    def __init__(self, settings: SourceSettings) -> None:
        super().__init__(settings)
        if not self.settings.parts:
            raise UserError("data.parts is empty. Name at least one source: [{source: mnist}, {source: svhn}].")
        self.parts = [self._make_part(i, dict(part)) for i, part in enumerate(self.settings.parts)]
        self.names = [part.get("name", part["source"]) for part in self.settings.parts]
        refuse_duplicates(self.names)

    @property
    def modules(self) -> tuple[str, ...]:
        return (*super().modules, *(module for part in self.parts for module in part.modules))

    def catalogue(self) -> Catalogue:
        catalogues = [part.catalogue() for part in self.parts]
        ends = list(accumulate(len(catalogue.samples) for catalogue in catalogues))

        def open_row(row: int) -> Image.Image | np.ndarray:
            part = bisect.bisect_right(ends, row)
            return catalogues[part].open(row - (ends[part - 1] if part else 0))

        own = self.settings.label_space == "own"
        if not own:
            refuse_different_classes(self.names, catalogues)
        names = [
            [f"{name}:{c}" if own else c for c in part.classes]
            for name, part in zip(self.names, catalogues, strict=True)
        ]
        classes = list(dict.fromkeys(c for of_part in names for c in of_part))
        return Catalogue(
            classes=tuple(classes),
            domains=tuple(self.names),
            samples=join_samples(self.names, catalogues, [[classes.index(c) for c in of_part] for of_part in names]),
            open=open_row,
            own_label_spaces=own,
            normalisations=self._list_normalisations(),
        )

    def _list_normalisations(self) -> tuple[Normalisation, ...] | None:
        """Return each part's mean and deviation; None where no part has its own."""
        common = {"mean": self.settings.mean, "std": self.settings.std}
        own = [part.settings.model_dump(include=set(common), exclude_unset=True) for part in self.parts]
        return tuple(Normalisation(**common | of_part) for of_part in own) if any(own) else None

    def _make_part(self, index: int, block: dict[str, Any]) -> Source:
        where = f"data.parts.{index}"
        if not isinstance(block.get("source"), str):
            raise UserError(f"{where} names no source. Right: {{source: mnist, ...}}.")
        if not isinstance(block.get("name", ""), str):
            raise UserError(f"{where}.name is {format_value(block['name'])}; it must be text.")
        if misplaced := block.keys() & COMMON:
            raise UserError(f"{where}: {', '.join(sorted(misplaced))} is common to all parts. Set it in data itself.")
        block.pop("name", None)
        plugin = find("source", block["source"])
        if not issubclass(plugin.Settings, ImageSettings):
            raise UserError(f"{where}: {block['source']} has no images. Use it as data.source, with parts of its own.")
        return plugin(parse_part(where, plugin.Settings, {"root": self.settings.root} | block))


def refuse_different_classes(names: list[str], catalogues: list[Catalogue]) -> None:
    for name, part in zip(names, catalogues, strict=True):
        if unshared := sorted(set(part.classes) ^ set(catalogues[0].classes)):
            raise UserError(
                f"data.label_space: shared needs the same classes in each part; {unshared[0]} is not in both "
                f"{names[0]} and {name}. Use own."
            )


def join_samples(names: list[str], catalogues: list[Catalogue], labels: list[list[int]]) -> pl.DataFrame:
    """Join the tables: each is a domain, its labels become these, and groups are numbered on."""
    tables = []
    groups = 0
    for domain, (name, part) in enumerate(zip(names, catalogues, strict=True)):
        tables.append(
            part.samples.with_columns(
                pl.Series("label", np.array(labels[domain])[part.samples["label"].to_numpy()], pl.Int32),
                pl.col("group") + groups,
                domain=pl.lit(domain, pl.Int16),
                origin=name + "/" + pl.col("origin"),
            )
        )
        groups += part.samples["group"].drop_nulls().n_unique()
    return pl.concat(tables)
