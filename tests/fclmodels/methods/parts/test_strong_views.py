"""Second views against the standard library's colours, and what of an image they leave."""

import colorsys

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from numpy.testing import assert_allclose

from fclmodels.methods.parts import strong_views
from fclmodels.methods.parts.strong_views import change_colours, draw_strong_view, turn_hue

Colour = tuple[float, float, float]
colours = st.tuples(*[st.integers(0, 255).map(lambda value: value / 255)] * 3)


def as_images(*pixels: Colour) -> torch.Tensor:
    """One image [1, 3, 1, n]."""
    return torch.tensor(pixels, dtype=torch.float64).T[None, :, None]


@given(colours, st.floats(-0.1, 0.1))
def test_hue_turns_as_colorsys_has_it(colour: Colour, turn: float) -> None:
    hue, saturation, value = colorsys.rgb_to_hsv(*colour)
    expected = colorsys.hsv_to_rgb((hue + turn) % 1, saturation, value)
    (turned,) = turn_hue(as_images(colour), torch.tensor(turn))
    assert_allclose(turned[:, 0, 0], expected, atol=1e-6)


def test_brightness_contrast_and_saturation_by_hand() -> None:
    """Pixels (0.2, 0.4, 0.6) and (0.4, 0.2, 0) times 1.5; then 0.5 around mean luma; then 2 around each one's luma."""
    images = as_images((0.2, 0.4, 0.6), (0.4, 0.2, 0.0))
    bright = np.array([[0.3, 0.6, 0.9], [0.6, 0.3, 0.0]])
    luma = np.array([0.299, 0.587, 0.114])
    mean = (bright @ luma).mean()
    flat = mean + 0.5 * (bright - mean)
    grey = (flat @ luma)[:, None]
    expected = (grey + 2 * (flat - grey)).clip(0, 1)
    factors = torch.tensor([1.5, 0.5, 2.0], dtype=torch.float64).view(3, 1, 1, 1, 1)
    assert_allclose(change_colours(images, factors, torch.zeros(1))[0, :, 0].T, expected, atol=1e-6)


@pytest.mark.parametrize("channels", [1, 2, 3])
def test_each_image_has_its_own_draws(channels: int) -> None:
    images = torch.randint(256, (1, channels, 12, 12), generator=torch.Generator().manual_seed(0)).to(torch.uint8)
    views = draw_strong_view(images.expand(16, -1, -1, -1), torch.Generator().manual_seed(1))
    assert (views.dtype, views.shape) == (torch.uint8, (16, channels, 12, 12))
    assert len({view.numpy().tobytes() for view in views}) == 16
    again = draw_strong_view(images.expand(16, -1, -1, -1), torch.Generator().manual_seed(1))
    assert torch.equal(views, again)


def test_a_fifth_is_grey_and_a_fifth_has_its_colours(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of images that are not cut, counted over 2,000."""
    monkeypatch.setattr(strong_views, "AREAS", (1.0, 1.0))
    images = torch.tensor([200, 90, 30], dtype=torch.uint8).view(1, 3, 1, 1).expand(2000, 3, 2, 2)
    views = draw_strong_view(images, torch.Generator().manual_seed(2))
    grey = (views == views[:, :1]).all(1).flatten(1).all(1)
    same = (views == images).flatten(1).all(1)
    assert grey.double().mean() == pytest.approx(0.2, abs=0.03)
    assert same.double().mean() == pytest.approx(0.2 * 0.8, abs=0.03)
