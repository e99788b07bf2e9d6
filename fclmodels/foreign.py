"""Reading what came from elsewhere: whatever is in a file, what comes of it is a value or a mistake told in one line.

Paths that a file names stay below their root, pictures are of the formats that are meant and no larger than can be
decoded, and tables no longer than any data set. No file is opened that is not a regular one: a pipe would never end.
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

from fclmodels.errors import UserError, unprintable
from fclmodels.parquet import refuse_absurd

# Those of image_folder.SUFFIXES. Pillow goes by the content, and knows formats that start other programs (EPS).
FORMATS = ("BMP", "JPEG", "PNG", "PPM", "TIFF", "WEBP")

Model = TypeVar("Model", bound=BaseModel)


def _printable(text: str) -> str:
    if unprintable(text):
        raise ValueError(f"{text!a} cannot be printed")
    return text


Text = Annotated[str, AfterValidator(_printable)]
"""Of names and paths that errors will tell."""


def inside(root: Path, name: str) -> Path:
    """The path below this folder that a file names; UserError where it leads out, be it by a link."""
    path = root / name
    if "\0" in name or not path.resolve().is_relative_to(root.resolve()):
        raise UserError(f"{name!a} leads out of {root}. Right: a path below it, without links to elsewhere.")
    return path


def open_image(path: Path | str) -> Image.Image:
    """A picture whose pixels are not decoded yet; decoding.decode refuses absurd sizes before it does."""
    if not os.path.isfile(path):
        raise FileNotFoundError("no such file")
    return Image.open(path, formats=FORMATS)


def read_table(path: Path) -> pl.DataFrame:
    """A Parquet file; ValueError or OSError where it cannot be read."""
    if path.exists() and not path.is_file():
        raise OSError(f"{path.name} is no file")
    return table_of(path.read_bytes())


def table_of(content: bytes) -> pl.DataFrame:
    """The table that a Parquet file's bytes hold; ValueError where they hold none."""
    refuse_absurd(content)
    try:
        return pl.read_parquet(content)
    except (pl.exceptions.PolarsError, pl.exceptions.PanicException) as problem:
        reason = str(problem).partition("\n")[0] or type(problem).__name__
        raise ValueError(reason) from problem


def checked(model: type[Model], content: Any) -> Model:
    """Values of JSON as what they must be; ValueError that names the first that is not."""
    try:
        return model.model_validate_json(json.dumps(content), strict=True)
    except ValidationError as problem:
        first = problem.errors()[0]
        raise ValueError(f"{'.'.join(map(str, first['loc']))!a}: {first['msg']}") from problem


def read_array(path: Path, mode: Literal["r", "c"]) -> np.ndarray:
    """An .npy file, memory-mapped; ValueError or OSError where it cannot be read."""
    try:
        array = np.load(path, mmap_mode=mode, allow_pickle=False)
    except (EOFError, LookupError, OverflowError, SyntaxError, TokenError, TypeError) as problem:  # of a spoilt header
        raise ValueError(f"{path.name} is no array") from problem
    if not isinstance(array, np.ndarray):
        raise ValueError(f"{path.name} is no array")
    return array


def read_json(path: Path) -> Any:
    """JSON in UTF-8; ValueError or OSError where it cannot be read."""
    try:
        return json.loads(path.read_bytes())
    except RecursionError:
        raise ValueError("its lists are too deep") from None
