"""MFCL's generator: the release's sizes, and images of every size, normalised."""

import pytest
import torch

from fclmodels.methods.parts.normalised_generator import NormalisedGenerator


@pytest.mark.parametrize(
    ("noise", "width", "shape", "millions"),
    [
        (1000, None, (3, 32, 32), 8.4),
        (1000, 32, (3, 32, 32), 2.1),
        (1000, None, (3, 64, 64), 8.6),
        (1000, None, (3, 224, 224), 3.3),
    ],
)
def test_it_has_as_many_numbers_as_the_releases(
    noise: int, width: int | None, shape: tuple[int, ...], millions: float
) -> None:
    with torch.device("meta"):
        generator = NormalisedGenerator(noise, width, shape)
    assert sum(p.numel() for p in generator.parameters()) / 1e6 == pytest.approx(millions, abs=0.06)


@pytest.mark.parametrize("side", [8, 16, 28, 32, 64, 84, 224])
def test_its_images_have_every_size_and_are_normalised(side: int) -> None:
    torch.manual_seed(0)
    generator = NormalisedGenerator(4, 8, (2, side, side))
    images = generator.train()(torch.randn(6, 4))
    assert images.shape == (6, 2, side, side)
    assert images.mean((0, 2, 3)).tolist() == pytest.approx([0, 0], abs=1e-5)
    assert (images.var((0, 2, 3)) > 0.5).all()
    assert (images.var((0, 2, 3)) < 1.1).all()
    assert generator.eval()(torch.randn(1, 4)).isfinite().all()
