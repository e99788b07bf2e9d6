"""Decoding of a catalogue's samples into one array, in parallel; defects are listed row by row."""

import os
import warnings
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from PIL import Image, UnidentifiedImageError

from fclmodels.data.sample_kind import find_kind
from fclmodels.data.sources.base import Catalogue
from fclmodels.errors import UserError
from fclmodels.settings.schema import ImageSettings, SourceSettings
from fclmodels.storage.array_cache import create_array

CHUNK = 256
PROBES = 64
MOST_PIXELS = 100_000_000
GREY = ("1", "L", "LA", "La")

UNREADABLE = "unreadable {}"
OTHER_SIZE = "{} of another size than most"
OTHER_CHANNELS = "{} with other channels than most"

Shape = tuple[int, ...]


@dataclass(frozen=True)
class Defect:
    """The reason why a row of the catalogue cannot be used."""

    row: int
    kind: str  # one of those above, with a place for images or texts
    why: str


def decode(
    image: Image.Image, size: tuple[int, int] | None, channels: int | None, smaller: str = "resize"
) -> np.ndarray:
    """Decode a picture to uint8 [C, H, W]; `size` (width, height) and `channels` (1 or 3) of None: its own.

    One that is smaller in both directions is enlarged, or with `smaller: pad` set in the middle of a black one.
    """
    if image.width * image.height > MOST_PIXELS:
        raise ValueError(f"{image.width} x {image.height} pixels are too many")
    if image.mode[0] in "IF":
        raise ValueError(f"pixels of mode {image.mode} have more than 8 bits")
    grey = channels == 1 or (channels is None and image.mode in GREY)
    pixels = image.convert("L" if grey else "RGB")
    if size is not None and smaller == "pad" and pixels.width <= size[0] and pixels.height <= size[1]:
        pixels = _pad(pixels, size)
    elif size is not None:
        pixels = pixels.resize(size, Image.Resampling.BILINEAR)
    array = np.asarray(pixels)
    return array[None] if grey else array.transpose(2, 0, 1)


def _pad(image: Image.Image, size: tuple[int, int]) -> Image.Image:
    """Set the image in the middle of a black one of this size (width, height)."""
    padded = Image.new(image.mode, size)
    padded.paste(image, ((size[0] - image.width) // 2, (size[1] - image.height) // 2))
    return padded


def find_commonest_shape(catalogue: Catalogue, settings: SourceSettings) -> Shape:
    """Return the commonest shape of some samples from all over the catalogue."""
    count = len(catalogue.samples)
    rows = np.linspace(0, count - 1, min(count, PROBES)).astype(int).tolist()
    with warnings.catch_warnings(action="ignore"):
        decoded = [_decode_row(catalogue, row, settings) for row in rows]
    shapes = Counter(array.shape for array in decoded if isinstance(array, np.ndarray))
    if not shapes:
        first = next(defect for defect in decoded if isinstance(defect, Defect))
        origin = catalogue.samples["origin"][first.row]
        raise UserError(
            f"none of {len(rows)} samples tried can be read ({origin}: {first.why}). Check data.source and data.root."
        )
    ((shape, _),) = shapes.most_common(1)
    return shape


def decode_all(catalogue: Catalogue, settings: SourceSettings, shape: Shape, path: Path) -> list[Defect]:
    """Write each usable sample into its row of a new .npy file [N, *shape]; the rows of the others stay 0."""
    count = len(catalogue.samples)
    arrays = create_array(path, find_kind(shape).dtype, (count, *shape))

    def decode_chunk(start: int) -> list[Defect]:
        defects: list[Defect] = []
        for row in range(start, min(start + CHUNK, count)):
            sample = _decode_row(catalogue, row, settings)
            if isinstance(sample, Defect):
                defects.append(sample)
            elif sample.shape == shape:
                arrays[row] = sample
            else:
                defects.extend(_compare_shapes(row, sample.shape, shape))
        return defects

    # Pillow decodes without holding the interpreter's lock, so threads are enough. Its warnings on a damaged file
    # either belong to a defect or do not concern the pixels.
    with warnings.catch_warnings(action="ignore"), ThreadPoolExecutor(os.cpu_count()) as threads:
        chunks = threads.map(decode_chunk, range(0, count, CHUNK))
        return [defect for defects in chunks for defect in defects]


def _decode_row(catalogue: Catalogue, row: int, settings: SourceSettings) -> np.ndarray | Defect:
    try:
        sample = catalogue.open(row)
        if isinstance(sample, np.ndarray):
            return sample
        assert isinstance(settings, ImageSettings)
        with sample:
            size = None if settings.size is None else (settings.size, settings.size)
            return decode(sample, size, settings.channels, settings.smaller)
    except UnidentifiedImageError:
        return Defect(row, UNREADABLE, "not an image")
    except Exception as problem:  # on a damaged file a decoder may raise anything
        return Defect(row, UNREADABLE, " ".join(str(problem).split()) or type(problem).__name__)


def _compare_shapes(row: int, shape: tuple[int, ...], usual: Shape) -> Iterator[Defect]:
    if shape[1:] != usual[1:]:
        yield Defect(row, OTHER_SIZE, f"{shape[2]} x {shape[1]}, not {usual[2]} x {usual[1]}")
    if shape[0] != usual[0]:
        yield Defect(row, OTHER_CHANNELS, f"{shape[0]}, not {usual[0]}")
