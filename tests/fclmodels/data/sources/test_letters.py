"""Drawn letters: which there are, that they are like the embedded digits and yet none of them."""

import subprocess
import sys

import numpy as np
import pytest
from numpy.testing import assert_allclose, assert_array_equal
from PIL import Image

from fclmodels.data.prepare import prepare
from fclmodels.data.sources import letters
from fclmodels.data.sources.digits import read_digits
from fclmodels.data.sources.letters import LETTERS, Letters, average_bits, draw_bitmap, flip_bits
from fclmodels.errors import UserError
from fclmodels.plugins import find


def drawn(**settings):
    """Images [letters, samples, H, W] of a catalogue."""
    settings = {"samples": 4, **settings}
    catalogue = Letters(Letters.Settings(source="letters", **settings)).catalogue()
    images = [np.asarray(catalogue.open(row)) for row in range(len(catalogue.samples))]
    return np.stack(images).reshape(len(LETTERS), settings["samples"], *images[0].shape)


@pytest.fixture(scope="module")
def four():
    return drawn()


def test_there_are_letters_only_and_none_that_stands_for_a_digit():
    catalogue = Letters(Letters.Settings(source="letters", samples=2)).catalogue()
    assert find("source", "letters") is Letters
    assert catalogue.classes == LETTERS
    assert len(set(LETTERS)) == len(LETTERS) >= 26
    assert all(letter.isascii() and letter.isalpha() for letter in LETTERS)
    assert set(LETTERS).isdisjoint("OoQDIilZzSsGbBgq")
    assert catalogue.samples["label"].to_list() == [label for label in range(len(LETTERS)) for _ in range(2)]
    assert catalogue.samples["official"].null_count() == 2 * len(LETTERS)


def test_a_seed_draws_the_same_and_more_samples_begin_with_those_of_fewer(four):
    assert_array_equal(drawn(samples=2), four[:, :2])
    assert not np.array_equal(drawn(samples=2, seed=1), four[:, :2])


def test_every_sample_is_another_and_none_is_empty(four):
    flat = four.reshape(-1, 64)
    assert len(np.unique(flat, axis=0)) == len(flat)
    assert flat.max(axis=1).min() > 128


@pytest.mark.parametrize("size", [8, 12])
def test_images_are_grey_bytes_of_the_size_asked_for(tmp_path, size):
    source = Letters(Letters.Settings(source="letters", samples=1, size=size))
    prepared = prepare(source, tmp_path / "prepared")
    assert prepared.meta.shape == (1, size, size)
    assert prepared.array.dtype == np.uint8
    assert_array_equal(prepared.array[:, 0], drawn(samples=1, size=size)[:, 0])


def test_they_are_as_bright_as_the_embedded_digits():
    ours, digits = (images.astype(float) for images in (drawn(samples=30), read_digits()[0]))
    assert_allclose([ours.mean(), ours.std()], [digits.mean(), digits.std()], rtol=0.15)
    assert (ours == 0).mean() == pytest.approx((digits == 0).mean(), abs=0.06)
    assert set(np.unique(ours)) <= set(np.unique(digits))  # counts of 16 bits, both


def test_no_letter_is_read_as_one_digit():
    """A classifier of digits sees letters further from every digit than digits are from each other."""
    from sklearn.neighbors import NearestNeighbors

    digits = read_digits()[0].reshape(-1, 64).astype(float)
    nearest = NearestNeighbors(n_neighbors=2).fit(digits)
    among_digits = np.median(nearest.kneighbors(digits)[0][:, 1])
    for letter, images in zip(LETTERS, drawn(samples=30), strict=True):
        distances = nearest.kneighbors(images.reshape(-1, 64).astype(float))[0][:, 0]
        assert np.median(distances) > 1.4 * among_digits, letter


def test_a_pixel_counts_the_white_ones_of_its_sixteen_bits():
    bits = np.zeros((8, 8), bool)
    bits[:4, :4] = True
    bits[5, 6] = True
    assert_array_equal(average_bits(bits), [[255, 0], [0, 16]])


def test_noise_flips_its_share_of_bits():
    blank = np.zeros((200, 200), bool)
    random = np.random.default_rng(0)
    assert flip_bits(blank, 0.1, random).mean() == pytest.approx(0.1, abs=0.01)
    assert flip_bits(~blank, 0.1, random).mean() == pytest.approx(0.9, abs=0.01)
    assert_array_equal(flip_bits(blank, 0, random), blank)


class Still:
    """No turn, no shear, no stretch, no shift."""

    def uniform(self, low, high, size=None):
        return np.full(size, high) if high == 1 else np.zeros(size) if size else 0.0


def test_unmoved_a_glyph_is_as_high_as_the_image_in_its_middle_and_keeps_its_proportions():
    bits = draw_bitmap(Image.new("L", (20, 40), 255), 32, Still())
    assert_array_equal(np.flatnonzero(bits.any(1)), np.arange(32))
    assert_array_equal(np.flatnonzero(bits.any(0)), np.arange(8, 24))


def test_without_matplotlib_the_way_out_is_told(monkeypatch):
    monkeypatch.setattr(letters.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(UserError, match=r"pip install 'fclflow\[workflow\]'"):
        drawn()


def test_drawing_imports_nothing_of_matplotlib():
    code = (
        "import sys; from fclmodels.data.sources.letters import Letters;"
        "Letters(Letters.Settings(source='letters', samples=1)).catalogue(); print('matplotlib' in sys.modules)"
    )
    end = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert end.stdout == "False\n"


def test_other_fonts_are_other_data():
    (folder,) = Letters(Letters.Settings(source="letters")).folders
    assert {f"{font}.ttf" for font in letters.FONTS} <= {path.name for path in folder.iterdir()}
