import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis.strategies import booleans, integers
from numpy.testing import assert_allclose, assert_array_equal

from fclmodels.data.augment import augment, change_brightness, crop, flip, normalise, resize_crop
from fclmodels.settings.schema import AugmentSettings

EVERYTHING = AugmentSettings(crop_padding=2, flip=True, brightness=0.3, resize_crop=(0.4, 0.9))


def seeded(seed=0):
    return torch.Generator().manual_seed(seed)


def pictures(count=40, channels=3, height=6, width=5, seed=0):
    return torch.randint(1, 256, (count, channels, height, width), dtype=torch.uint8, generator=seeded(seed))


def test_settings_that_alter_nothing_give_the_very_same_tensor_and_draw_nothing():
    images, generator = pictures(), seeded()
    assert augment(images, AugmentSettings(), generator) is images
    assert torch.equal(generator.get_state(), seeded().get_state())


@given(seed=integers(0, 999), floating=booleans())
def test_the_same_generator_gives_the_same_pixels_and_the_input_stays(seed, floating):
    images = pictures(8).float() / 255 if floating else pictures(8)
    before = images.clone()
    once, again = (augment(images, EVERYTHING, seeded(seed)) for _ in range(2))
    assert torch.equal(once, again)
    assert torch.equal(images, before)
    assert (once.dtype, once.shape) == (images.dtype, images.shape)
    assert not torch.equal(once, augment(images, EVERYTHING, seeded(seed + 1)))


def test_every_sample_gets_its_own_draw():
    one = pictures(1, height=12, width=12)
    altered = augment(one.expand(30, -1, -1, -1), EVERYTHING, seeded())
    assert len({image.numpy().tobytes() for image in altered}) == 30


@given(seed=integers(0, 999), padding=integers(1, 3))
def test_a_crop_is_the_slice_at_one_offset_of_the_zero_padded_image(seed, padding):
    images = pictures(12, seed=seed)
    padded = np.pad(images.numpy(), ((0, 0), (0, 0), (padding, padding), (padding, padding)))
    for image, whole in zip(crop(images, padding, seeded(seed)).numpy(), padded, strict=True):
        offsets = [(top, left) for top in range(2 * padding + 1) for left in range(2 * padding + 1)]
        # Pixels are never 0, so that only one slice can be equal.
        assert sum(np.array_equal(image, whole[:, t : t + 6, x : x + 5]) for t, x in offsets) == 1


def test_all_crop_offsets_come_equally_often():
    marked = torch.zeros(9000, 1, 5, 5, dtype=torch.uint8)
    marked[:, :, 2, 2] = 1
    rows, columns = crop(marked, 1, seeded()).squeeze(1).nonzero()[:, 1:].T
    counts = torch.bincount(3 * (rows - 1) + columns - 1, minlength=9)
    assert len(rows) == 9000
    assert_allclose(counts, 1000, atol=150)


def test_half_of_the_images_are_mirrored_the_others_untouched():
    images = pictures(4000, channels=1, height=1, width=3)
    flipped = flip(images, seeded()).numpy()
    same = (flipped == images.numpy()).all(axis=(1, 2, 3))
    mirrored = (flipped == images.numpy()[..., ::-1]).all(axis=(1, 2, 3))
    assert (same | mirrored).all()
    assert 0.46 < mirrored.mean() < 0.54


def test_brightness_multiplies_each_image_by_one_factor_around_one():
    images = torch.full((5000, 3, 2, 2), 0.5)
    factors = (change_brightness(images, 0.4, seeded()) / 0.5).flatten(1)
    assert_allclose(factors.amin(1), factors.amax(1))
    assert 0.6 <= factors.min() < 0.61
    assert 1.39 < factors.max() <= 1.4
    assert_allclose(factors.mean(), 1, atol=0.01)


def test_brightness_of_bytes_is_rounded_and_cut_off_at_white():
    images = torch.tensor([0, 100, 200, 255], dtype=torch.uint8).view(1, 1, 2, 2).expand(500, -1, -1, -1)
    black, grey, light, white = change_brightness(images, 1.0, seeded()).flatten(1).double().T
    dim = grey < 127  # there the factor is below 1.27, and 200 not yet white
    assert (black == 0).all()
    assert_allclose(light[dim], 2 * grey[dim], atol=1.5)
    assert_allclose(light[~dim], 255, atol=1.5)
    assert_array_equal(white[grey >= 100], 255)


@pytest.mark.parametrize("images", [pictures(), pictures().float() / 255])
def test_a_window_of_the_whole_image_is_the_image(images):
    assert_allclose(resize_crop(images, (1.0, 1.0), seeded()), images, atol=1e-5)


def test_a_window_of_a_ramp_is_a_flatter_ramp_inside_it():
    """On pixel values that rise linearly, bilinear interpolation is exact: slope = side of the window = sqrt(area)."""
    size = 64
    ramp = torch.arange(size, dtype=torch.float64).expand(300, 1, size, size)
    for image in (ramp, ramp.mT):
        out = resize_crop(image / size, (0.25, 0.81), seeded()) * size
        along = out[:, 0, 0] if image is ramp else out[:, 0, :, 0]
        inside = (along > 0) & (along < size - 1)  # the outermost half pixel is flat
        steps = along.diff()
        slopes = steps[:, size // 2]
        assert_allclose(steps[inside[:, 1:] & inside[:, :-1]].mean(), slopes.mean(), atol=0.01)
        assert 0.5 <= slopes.min() < 0.52
        assert 0.88 < slopes.max() <= 0.9
        assert_allclose(slopes.square().mean(), (0.25 + 0.81) / 2, atol=0.02)
        # Windows lie anywhere in the image, also at its borders, and never beyond.
        first = along[:, size // 2] - slopes * (size + 1) / 2  # from the middle of a pixel to the window's edge
        last = first + slopes * size
        assert first.min() >= -0.5 - 1e-3
        assert last.max() <= size - 0.5 + 1e-3
        assert first.min() < 1
        assert last.max() > size - 2


def test_padding_is_black_before_normalisation():
    images = crop(torch.full((50, 1, 4, 4), 255, dtype=torch.uint8), 4, seeded())
    assert set(normalise(images, [0.5], [0.25]).unique().tolist()) == {-2.0, 2.0}


@given(seed=integers(0, 99))
def test_normalised_pixels_are_those_of_the_equation(seed):
    images, mean, std = pictures(seed=seed), [0.1, 0.5, 0.9], [0.2, 0.3, 0.4]
    expected = (images.numpy() / 255.0 - np.reshape(mean, (3, 1, 1))) / np.reshape(std, (3, 1, 1))
    result = normalise(images, mean, std)
    assert result.dtype == torch.float32
    assert_allclose(result, expected, atol=2e-6)
