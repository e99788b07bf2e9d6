"""The 1,797 handwritten digits of 8x8 pixels that come with scikit-learn: no download, no official split."""

import numpy as np

from fclmodels.data.sources.base import Catalogue, Source, list_arrays

DIGITS = tuple("0123456789")


class Digits(Source):
    """scikit-learn's 8x8 digits, embedded: 1,797 grey images of 10 classes"""

    name = "digits"
    reads_root = False

    def catalogue(self) -> Catalogue:
        return list_arrays(self.name, DIGITS, {None: read_digits()})


def read_digits() -> tuple[np.ndarray, np.ndarray]:
    """Return images [1797, 8, 8], scikit-learn's 0..16 stretched to 0..255, and labels."""
    from sklearn.datasets import load_digits  # takes a second to import

    images, labels = load_digits(return_X_y=True)
    return np.rint(images.reshape(-1, 8, 8) * (255 / 16)).astype(np.uint8), labels
