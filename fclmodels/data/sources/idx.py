"""idx files, the format of MNIST: two zero bytes, a type, the number of dimensions, the dimensions, the values.

http://yann.lecun.com/exdb/mnist: numbers are big-endian, type 0x08 is an unsigned byte.
"""

import gzip
import math
import zlib
from pathlib import Path

import numpy as np
from pydantic import Field

from fclmodels.data.decoding import MOST_PIXELS
from fclmodels.data.sources.base import Catalogue, Source, list_arrays
from fclmodels.errors import UserError
from fclmodels.settings.schema import ImageSettings

UNSIGNED_BYTE = 0x08
MOST_VALUES = 1 << 32
PIECE = 1 << 24


class Idx(Source):
    """idx files, plain or .gz: images and labels, and test images and labels where there are some"""

    name = "idx"

    class Settings(ImageSettings):
        images: Path = Field(Path("train-images-idx3-ubyte"), description="idx file of the images, from root on")
        labels: Path = Field(Path("train-labels-idx1-ubyte"), description="idx file of their labels")
        test_images: Path | None = Field(
            Path("t10k-images-idx3-ubyte"), description="idx file of the official test images; null: no official split"
        )
        test_labels: Path | None = Field(Path("t10k-labels-idx1-ubyte"), description="idx file of their labels")

    settings: Settings

    def catalogue(self) -> Catalogue:
        files = self.settings
        if (files.test_images is None) != (files.test_labels is None):
            raise UserError("data.test_images and data.test_labels go together. Name both files, or set both to null.")
        if files.test_images is None or files.test_labels is None:
            parts: dict[str | None, tuple[np.ndarray, np.ndarray]] = {None: self._pair(files.images, files.labels)}
        else:
            parts = {
                "train": self._pair(files.images, files.labels),
                "test": self._pair(files.test_images, files.test_labels),
            }
        numbers = np.unique(np.concatenate([labels for _, labels in parts.values()]))
        numbered = {split: (images, np.searchsorted(numbers, labels)) for split, (images, labels) in parts.items()}
        return list_arrays(self.name, [str(number) for number in numbers], numbered)

    def _pair(self, images_file: Path, labels_file: Path) -> tuple[np.ndarray, np.ndarray]:
        images, labels = read_idx(self.settings.root / images_file), read_idx(self.settings.root / labels_file)
        if images.ndim != 3 and images.shape[3:] != (3,):
            raise UserError(
                f"{images_file} holds values of shape {images.shape}. Right: images x height x width [x 3]."
            )
        if labels.shape != images.shape[:1]:
            raise UserError(f"{labels_file} holds {labels.shape} labels for the {len(images)} images of {images_file}.")
        return images, labels


def read_idx(path: Path) -> np.ndarray:
    """Read the values of an idx file of unsigned bytes, or of its .gz beside it."""
    packed = path.with_name(f"{path.name}.gz")
    if not path.exists() and not packed.exists():
        raise UserError(f"{path} is missing, and so is {packed.name}. Put the file there, or set data.root.")
    path = path if path.exists() else packed
    try:
        with gzip.open(path) if path.suffix == ".gz" else open(path, "rb") as file:
            start = file.read(4)
            if len(start) < 4 or start[:3] != bytes((0, 0, UNSIGNED_BYTE)):
                raise UserError(f"{path} is not an idx file of unsigned bytes (it starts with {start.hex(' ')}).")
            shape = tuple(int(size) for size in np.frombuffer(file.read(4 * start[3]), ">u4"))
            count = math.prod(shape)
            if count > MOST_VALUES or math.prod(shape[1:3]) > MOST_PIXELS:
                raise UserError(f"{path} says that it holds {' x '.join(map(str, shape))} values. That is too many.")
            # Memory grows with the content: the header may say too much, and a packed file may hold any amount more.
            values = bytearray()
            while len(values) <= count and (piece := file.read(min(count + 1 - len(values), PIECE))):
                values += piece
            if len(shape) != start[3] or len(values) != count:
                size = " x ".join(map(str, shape))
                raise UserError(f"{path} is cut short or too long for its {size} values. Get it again.")
            return np.frombuffer(values, np.uint8).reshape(shape)
    except (OSError, EOFError, ValueError, zlib.error) as problem:
        raise UserError(f"{path} cannot be read ({problem}). Get the file again.") from problem
