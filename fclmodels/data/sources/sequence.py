"""Different data sets one after another, as in the 5-Datasets stream: each is a domain with classes of its own."""

import bisect
from collections import Counter
from itertools import accumulate
from typing import Any, Literal

import polars as pl
from PIL import Image
from pydantic import Field, PositiveInt, ValidationError

from fclmodels.data.sources.base import Catalogue, Source
from fclmodels.errors import UserError, did_you_mean, shown
from fclmodels.plugins import find
from fclmodels.settings import SourceSettings

COMMON = {"size", "channels", "skip_bad", "mean", "std"}


class Sequence(Source):
    """other sources one after another, each a domain with its own classes (5-Datasets)"""

    name = "sequence"

    class Settings(SourceSettings):
        size: PositiveInt | None = Field(32, description="side in pixels that all images are resized to")
        channels: Literal[1, 3] | None = Field(3, description="1 grey, 3 colour, for all images")
        parts: tuple[dict[str, Any], ...] = Field(
            ({"source": "cifar10"}, {"source": "mnist"}, {"source": "svhn"}, {"source": "fashion-mnist"}),
            description="the data sets in their order: source, its own settings, and a name if not the source's",
        )

    settings: Settings

    def __init__(self, settings: SourceSettings) -> None:
        super().__init__(settings)
        if not self.settings.parts:
            raise UserError("data.parts is empty. Name at least one source: [{source: mnist}, {source: svhn}].")
        self.parts = [self._part(i, dict(part)) for i, part in enumerate(self.settings.parts)]
        self.names = [part.get("name", part["source"]) for part in self.settings.parts]
        doubled = [name for name, times in Counter(self.names).items() if times > 1]
        if doubled:
            raise UserError(f"data.parts: {', '.join(doubled)} is there more than once. Give each a name of its own.")

    def catalogue(self) -> Catalogue:
        catalogues = [part.catalogue() for part in self.parts]
        ends = list(accumulate(len(catalogue.samples) for catalogue in catalogues))

        def image(row: int) -> Image.Image:
            part = bisect.bisect_right(ends, row)
            return catalogues[part].image(row - (ends[part - 1] if part else 0))

        named = zip(self.names, catalogues, strict=True)
        return Catalogue(
            classes=tuple(f"{name}:{label}" for name, part in named for label in part.classes),
            domains=tuple(self.names),
            samples=joined(self.names, catalogues),
            image=image,
            own_label_spaces=True,
        )

    def _part(self, index: int, block: dict[str, Any]) -> Source:
        where = f"data.parts.{index}"
        if not isinstance(block.get("source"), str):
            raise UserError(f"{where} names no source. Right: {{source: mnist, ...}}.")
        if not isinstance(block.get("name", ""), str):
            raise UserError(f"{where}.name is {shown(block['name'])}; it must be text.")
        if misplaced := block.keys() & COMMON:
            raise UserError(f"{where}: {', '.join(sorted(misplaced))} is common to all parts. Set it in data itself.")
        block.pop("name", None)
        plugin = find("source", block["source"])
        try:
            return plugin(plugin.Settings(**{"root": self.settings.root} | block))
        except ValidationError as problem:
            error = problem.errors()[0]
            name = ".".join(map(str, error["loc"]))
            hint = f". {did_you_mean(name, plugin.Settings.model_fields)}" if error["type"] == "extra_forbidden" else ""
            raise UserError(f"{where}.{name}: {error['msg']}{hint}") from problem


def joined(names: list[str], catalogues: list[Catalogue]) -> pl.DataFrame:
    """The tables below each other: labels and groups go on counting, and each table is a domain."""
    tables = []
    labels = groups = 0
    for domain, (name, part) in enumerate(zip(names, catalogues, strict=True)):
        tables.append(
            part.samples.with_columns(
                pl.col("label") + labels,
                pl.col("group") + groups,
                domain=pl.lit(domain, pl.Int16),
                origin=name + "/" + pl.col("origin"),
            )
        )
        labels += len(part.classes)
        groups += part.samples["group"].drop_nulls().n_unique()
    return pl.concat(tables)
