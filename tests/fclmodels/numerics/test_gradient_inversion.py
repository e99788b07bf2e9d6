"""What a gradient of a known network gives away: the label for sure, the image nearly."""

import pytest
import torch

from fclmodels.numerics.gradient_inversion import SigmoidLeNet, differentiate, infer_label, invert_gradient

SHAPE = (1, 6, 6)


def make_encoder(shape: tuple[int, int, int] = SHAPE, classes: int = 5) -> SigmoidLeNet:
    return SigmoidLeNet(shape, classes, torch.Generator().manual_seed(0))


def test_it_has_the_releases_size() -> None:
    """85,036 numbers a prototype of CIFAR-100."""
    assert sum(p.numel() for p in make_encoder((3, 32, 32), 100).parameters()) == 85036


def test_everybody_draws_the_same_one() -> None:
    mine, yours = make_encoder(), make_encoder()
    assert all(torch.equal(a, b) for a, b in zip(mine.parameters(), yours.parameters(), strict=True))
    assert all(p.abs().max() <= 0.5 for p in mine.parameters())


@pytest.mark.parametrize("label", range(5))
def test_the_label_is_read_off_the_last_layer(label: int) -> None:
    image = torch.randn(1, *SHAPE, generator=torch.Generator().manual_seed(label))
    assert infer_label(differentiate(make_encoder(), image, torch.tensor([label]))).tolist() == [label]


def test_the_image_comes_back() -> None:
    """By L-BFGS, nearly to the bit; by descent, far slower."""
    random = torch.Generator().manual_seed(1)
    image, start = (torch.randn(1, *SHAPE, generator=random) for _ in range(2))
    gradient = differentiate(make_encoder(), image, torch.tensor([2]))
    images, distance = invert_gradient(make_encoder(), gradient, start, "l-bfgs", 0.5, 120, 3)
    assert images.shape == (3, *SHAPE)
    assert float((images - image).square().mean()) < 1e-3
    assert distance < 1e-6
    by_descent, _ = invert_gradient(make_encoder(), gradient, start, "sgd", 0.5, 60, 1)
    errors = [float((of - image).square().mean()) for of in (by_descent, start)]
    assert errors[0] < errors[1]
