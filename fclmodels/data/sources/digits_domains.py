"""scikit-learn's digits in four domains each, so that domain-incremental runs need no download.

The four pictures of one digit have the same `group`: a split that separated them would train on its test digits.
"""

import numpy as np
import polars as pl
from PIL import Image

from fclmodels.data.sources.base import Catalogue, Source, make_table
from fclmodels.data.sources.digits import DIGITS, read_digits

NOISE = 128


class DigitsDomains(Source):
    """scikit-learn's digits, each in four domains: clean, inverted, rotated, noisy"""

    name = "digits-domains"
    reads_root = False

    def catalogue(self) -> Catalogue:
        images, labels = read_digits()
        domains = make_domains(images)
        pictures = np.concatenate(list(domains.values()))
        rows = range(len(labels))
        samples = [
            make_table(labels, [f"{name}:{i}" for i in rows], domain=index, group=rows)
            for index, name in enumerate(domains)
        ]
        return Catalogue(DIGITS, tuple(domains), pl.concat(samples), lambda row: Image.fromarray(pictures[row]))


def make_domains(images: np.ndarray) -> dict[str, np.ndarray]:
    """Return the grey images [n, H, H] of each domain; the noise is the same in every process."""
    noise = np.random.default_rng(0).integers(0, NOISE, images.shape, dtype=np.uint8)
    return {
        "clean": images,
        "inverted": 255 - images,
        "rotated": np.rot90(images, axes=(1, 2)),
        "noisy": np.maximum(images, noise),
    }
