"""Readers of files that came from elsewhere: whatever a file holds, they return a value or raise an error of one line.

Paths that a file names stay below their root, pictures are of the expected formats and no larger than can be decoded,
and tables no longer than any data set. Only regular files are opened: a pipe would never end.
"""

import json
import os
from pathlib import Path
from tokenize import TokenError
from typing import Annotated, Any, Literal, TypeVar

import numpy as np
import polars as pl
from PIL import Image
from pydantic import AfterValidator, BaseModel, ValidationError

from fclmodels.errors import UserError, is_unprintable

# Those of image_folder.SUFFIXES. Pillow goes by the content, and knows formats that start other programs (EPS).
FORMATS = ("BMP", "JPEG", "PNG", "PPM", "TIFF", "WEBP")

Model = TypeVar("Model", bound=BaseModel)


def _make_printable(text: str) -> str:
    if is_unprintable(text):
        raise ValueError(f"{text!a} cannot be printed")
    return text


Text = Annotated[str, AfterValidator(_make_printable)]
"""Names and paths that may be printed in an error line."""


def resolve_inside(root: Path, name: str) -> Path:
    """Return the path below this folder that a file names; UserError where it leads out, also by a link."""
    path = root / name
    if "\0" in name or not path.resolve().is_relative_to(root.resolve()):
        raise UserError(f"{name!a} leads out of {root}. Right: a path below it, without links to elsewhere.")
    return path


def open_image(path: Path | str) -> Image.Image:
    """Open a picture without decoding its pixels; decoding.decode refuses absurd sizes first."""
    if not os.path.isfile(path):
        raise FileNotFoundError("no such file")
    return Image.open(path, formats=FORMATS)


def read_table(path: Path) -> pl.DataFrame:
    """Read a Parquet file; ValueError or OSError where it cannot be read."""
    if path.exists() and not path.is_file():
        raise OSError(f"{path.name} is no file")
    return parse_table(path.read_bytes())


def parse_table(content: bytes) -> pl.DataFrame:
    """Return the table in the bytes of a Parquet file; ValueError where there is none."""
    from fclmodels.storage.parquet_check import refuse_implausible

    refuse_implausible(content)
    try:
        return pl.read_parquet(content)
    except (pl.exceptions.PolarsError, pl.exceptions.PanicException) as problem:
        reason = str(problem).partition("\n")[0] or type(problem).__name__
        raise ValueError(reason) from problem


def validate(model: type[Model], content: Any) -> Model:
    """Return JSON values as a model; ValueError that names the first that does not fit."""
    try:
        return model.model_validate_json(json.dumps(content), strict=True)
    except ValidationError as problem:
        first = problem.errors()[0]
        raise ValueError(f"{'.'.join(map(str, first['loc']))!a}: {first['msg']}") from problem


def read_array(path: Path, mode: Literal["r", "c"]) -> np.ndarray:
    """Read an .npy file, memory-mapped; ValueError or OSError where it cannot be read."""
    try:
        array = np.load(path, mmap_mode=mode, allow_pickle=False)
    except (EOFError, LookupError, OverflowError, SyntaxError, TokenError, TypeError) as problem:  # of a damaged header
        raise ValueError(f"{path.name} is no array") from problem
    if not isinstance(array, np.ndarray):
        raise ValueError(f"{path.name} is no array")
    return array


def read_json(path: Path) -> Any:
    """Read JSON in UTF-8; ValueError or OSError where it cannot be read."""
    try:
        return json.loads(path.read_bytes())
    except RecursionError:
        raise ValueError("its lists are too deep") from None
