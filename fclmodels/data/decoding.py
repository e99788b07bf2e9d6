"""Samples of a catalogue as arrays of one shape, made in parallel; what cannot be used is told, row by row."""

import os
import warnings
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from PIL import Image, UnidentifiedImageError

from fclmodels.data.sources.base import Catalogue
from fclmodels.errors import UserError
from fclmodels.kinds import kind_of
from fclmodels.mapped import new_array
from fclmodels.settings import ImageSettings, SourceSettings

CHUNK = 256
PROBES = 64
MOST_PIXELS = 100_000_000
GREY = ("1", "L", "LA", "La")

UNREADABLE = "unreadable {}"
OTHER_SIZE = "{} of another size than most"
OTHER_CHANNELS = "{} with other channels than most"

Shape = tuple[int, ...]


@dataclass(frozen=True)
class Fault:
    """Why a row of the catalogue cannot be used: one of the kinds above (of images, or texts), and particulars."""

    row: int
    kind: str
    why: str


def decode(image: Image.Image, size: tuple[int, int] | None, channels: int | None) -> np.ndarray:
    """A picture as uint8 [C, H, W]: grey or colour, squashed to (width, height), each only where it is asked for."""
    if image.width * image.height > MOST_PIXELS:
        raise ValueError(f"{image.width} x {image.height} pixels are too many")
    if image.mode[0] in "IF":
        raise ValueError(f"pixels of mode {image.mode} have more than 8 bits")
    grey = channels == 1 or (channels is None and image.mode in GREY)
    pixels = image.convert("L" if grey else "RGB")
    if size is not None:
        pixels = pixels.resize(size, Image.Resampling.BILINEAR)
    array = np.asarray(pixels)
    return array[None] if grey else array.transpose(2, 0, 1)


def commonest_shape(catalogue: Catalogue, settings: SourceSettings) -> Shape:
    """The shape that most of some images from all over the catalogue decode to."""
    count = len(catalogue.samples)
    rows = np.linspace(0, count - 1, min(count, PROBES)).astype(int).tolist()
    with warnings.catch_warnings(action="ignore"):
        tried = [_decode_row(catalogue, row, settings) for row in rows]
    shapes = Counter(array.shape for array in tried if isinstance(array, np.ndarray))
    if not shapes:
        first = next(fault for fault in tried if isinstance(fault, Fault))
        origin = catalogue.samples["origin"][first.row]
        raise UserError(
            f"none of {len(rows)} samples tried can be read ({origin}: {first.why}). Check data.source and data.root."
        )
    ((shape, _),) = shapes.most_common(1)
    return shape


def decode_all(catalogue: Catalogue, settings: SourceSettings, shape: Shape, path: Path) -> list[Fault]:
    """Write each usable sample into its row of a new .npy file [N, *shape]; the rows of the others stay 0."""
    count = len(catalogue.samples)
    arrays = new_array(path, kind_of(shape).dtype, (count, *shape))

    def decode_chunk(start: int) -> list[Fault]:
        faults: list[Fault] = []
        for row in range(start, min(start + CHUNK, count)):
            found = _decode_row(catalogue, row, settings)
            if isinstance(found, Fault):
                faults.append(found)
            elif found.shape == shape:
                arrays[row] = found
            else:
                faults.extend(_differences(row, found.shape, shape))
        return faults

    # Pillow decodes without holding the interpreter's lock, so threads are enough. What it remarks on a damaged file is
    # either one of the faults or of no consequence for the pixels.
    with warnings.catch_warnings(action="ignore"), ThreadPoolExecutor(os.cpu_count()) as threads:
        return [fault for faults in threads.map(decode_chunk, range(0, count, CHUNK)) for fault in faults]


def _decode_row(catalogue: Catalogue, row: int, settings: SourceSettings) -> np.ndarray | Fault:
    try:
        sample = catalogue.open(row)
        if isinstance(sample, np.ndarray):
            return sample
        assert isinstance(settings, ImageSettings)
        with sample:
            size = None if settings.size is None else (settings.size, settings.size)
            return decode(sample, size, settings.channels)
    except UnidentifiedImageError:
        return Fault(row, UNREADABLE, "not an image")
    except Exception as problem:  # on a damaged file a decoder may raise anything
        return Fault(row, UNREADABLE, " ".join(str(problem).split()) or type(problem).__name__)


def _differences(row: int, shape: tuple[int, ...], usual: Shape) -> Iterator[Fault]:
    if shape[1:] != usual[1:]:
        yield Fault(row, OTHER_SIZE, f"{shape[2]} x {shape[1]}, not {usual[2]} x {usual[1]}")
    if shape[0] != usual[0]:
        yield Fault(row, OTHER_CHANNELS, f"{shape[0]}, not {usual[0]}")
