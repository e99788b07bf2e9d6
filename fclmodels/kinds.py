"""The two kinds of samples, told by their shape: images [C, H, W] of uint8, and texts [2, L] of int32.

A text is its token ids and, below each, which text of a pair it belongs to (1 or 2, special tokens included); 0 is
padding.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class Kind:
    """What a person calls such samples, the file that holds them when prepared, and their type in it."""

    plural: str
    file: str
    dtype: np.dtype


IMAGES = Kind("images", "images.npy", np.dtype(np.uint8))
TEXTS = Kind("texts", "tokens.npy", np.dtype(np.int32))


def channels_of(shape: Sequence[int]) -> int:
    """How many means and deviations normalise a sample; token ids are not normalised."""
    return 0 if kind_of(shape) is TEXTS else shape[0]


def kind_of(shape: Sequence[int]) -> Kind:
    return TEXTS if len(shape) == 2 else IMAGES
