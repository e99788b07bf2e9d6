"""Generators of images: sizes as published, pixels within 0..1."""

import pytest
import torch

from fclmodels.methods.parts.image_generator import ImageGenerator


@pytest.mark.parametrize(
    ("side", "parameters"),
    [(8, 355_139), (16, 749_891), (32, 2_328_899), (64, 8_644_931), (224, 6_892_611)],
)
def test_parameters_are_those_of_the_releases(side: int, parameters: int) -> None:
    """TARGET's Generator and the inner part of LANDER's NLGenerator_IN, with 256 numbers and 64 channels."""
    with torch.device("meta"):
        generator = ImageGenerator(256, 64, (3, side, side))
        pixels = generator(torch.empty(2, 256))
    assert sum(p.numel() for p in generator.parameters()) == parameters
    assert pixels.shape == (2, 3, side, side)


@pytest.mark.parametrize("shape", [(1, 6, 6), (3, 8, 8), (1, 28, 28), (3, 30, 21), (2, 100, 100)])
def test_any_side_is_cut_to_its_length(shape: tuple[int, int, int]) -> None:
    pixels = ImageGenerator(4, 2, shape)(torch.randn(3, 4))
    assert pixels.shape == (3, *shape)
    assert 0 <= float(pixels.detach().min()) <= float(pixels.detach().max()) <= 1
