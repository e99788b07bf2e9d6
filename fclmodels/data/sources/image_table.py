"""A Parquet table of image files: a row a sample, with the columns path, label and, where samples have one, client."""

from pathlib import Path

import polars as pl
from pydantic import Field

from fclmodels.data.sources.base import Catalogue, Source, make_table
from fclmodels.errors import UserError, is_unprintable
from fclmodels.settings.schema import ImageSettings
from fclmodels.storage.untrusted import open_image, read_table, resolve_inside


class ImageTable(Source):
    """a Parquet table of image paths and labels; with a column client, each client is a domain"""

    name = "image-table"

    class Settings(ImageSettings):
        table: Path = Field(
            Path("samples.parquet"), description="the table, from root on; its relative paths begin in its own folder"
        )

    settings: Settings

    def catalogue(self) -> Catalogue:
        file = self.settings.root / self.settings.table
        rows = _check(file, _read(file))
        classes, domains = (sorted(rows[name].unique().to_list(), key=_sort_key) for name in ("label", "client"))
        paths = [str(self.settings.table.parent / path) for path in rows["path"]]
        samples = make_table(
            label=[classes.index(label) for label in rows["label"]],
            domain=[domains.index(client) for client in rows["client"]],
            origin=rows["path"].to_list(),
        )
        return Catalogue(
            tuple(classes),
            tuple(domains),
            samples,
            lambda row: open_image(resolve_inside(self.settings.root, paths[row])),
        )


def _read(file: Path) -> pl.DataFrame:
    try:
        return read_table(file)
    except (OSError, ValueError) as problem:
        raise UserError(f"data.table: {file} cannot be read ({problem}). It must be a Parquet file.") from problem


def _check(file: Path, rows: pl.DataFrame) -> pl.DataFrame:
    """Return path, label and client as text; without a column client all rows are of one domain."""
    if missing := sorted({"path", "label"} - set(rows.columns)):
        raise UserError(f"data.table: {file} has no column {missing[0]}. Right: path, label and, if you like, client.")
    if "client" not in rows.columns:
        rows = rows.with_columns(client=pl.lit(ImageTable.name))
    elif not rows["client"].dtype.is_integer():
        raise UserError(f"data.table: {file}: client must be whole numbers from 0 on, not {rows['client'].dtype}.")
    try:
        rows = rows.select(pl.col("path", "label", "client").cast(pl.String))
    except pl.exceptions.PolarsError as problem:
        raise UserError(f"data.table: {file}: path and label must be text, and here one is not.") from problem
    for name in rows.columns:
        if count := rows[name].null_count():
            raise UserError(f"data.table: {file}: {name} is empty in {count} rows. Fill it in, or leave the rows out.")
        if unreadable := next(filter(is_unprintable, rows[name].unique(maintain_order=True)), None):
            raise UserError(f"data.table: {file}: {name} holds {unreadable!a}, no readable text. Rename it.")
    for path, labels in rows.group_by("path", maintain_order=True).agg(pl.col("label")).iter_rows():
        if len(labels) > 1:
            names = " and ".join(sorted(set(labels)))
            raise UserError(f"data.table: {file} lists {path} {len(labels)} times, as {names}. List it once.")
    return rows


def _sort_key(name: str) -> tuple[int, str]:
    """Return a key that sorts numbers by value, before names."""
    return (int(name), "") if name.isdecimal() else (1 << 62, name)
