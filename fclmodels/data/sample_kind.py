"""The two kinds of samples, which differ in shape: images [C, H, W] of uint8, and texts [2, L] of int32.

A text is its token ids and, below each, which text of a pair it belongs to (1 or 2, special tokens included); 0 is
padding.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class SampleKind:
    """A kind of samples and the format in which they are prepared."""

    plural: str  # for error lines
    file: str  # in the prepared folder
    dtype: np.dtype


IMAGES = SampleKind("images", "images.npy", np.dtype(np.uint8))
TEXTS = SampleKind("texts", "tokens.npy", np.dtype(np.int32))


def count_channels(shape: Sequence[int]) -> int:
    """Return the number of means and deviations that normalise a sample: 0 for token ids."""
    return 0 if find_kind(shape) is TEXTS else shape[0]


def find_kind(shape: Sequence[int]) -> SampleKind:
    return TEXTS if len(shape) == 2 else IMAGES
