"""Second views of images: SCR's augmentation, strong enough that a network has to know a class to know them again.

A window of 20 to 100 % of the area, resized; mirrored in half of all; in four of five brightness, contrast and
saturation times 0.6 to 1.4 and hue turned by up to a tenth of a circle; a fifth in grey (release of Mai et al. 2021).
Ours: the window has the image's proportions (theirs between 3:4 and 4:3), and colours change in the order above (theirs
in any). Of images that have not three channels only brightness and contrast change.
"""

import torch
from torch import Tensor

from fclmodels.data.augment import flip, resize_crop

AREAS, CHANGED, TURNED, JITTERED, GREY = (0.2, 1.0), 0.4, 0.1, 0.8, 0.2
LUMA = (0.299, 0.587, 0.114)


def draw_strong_view(images: Tensor, generator: torch.Generator) -> Tensor:
    """Return altered pixels of images [B, C, H, W], uint8; each image has its own draws."""
    altered = flip(resize_crop(images, AREAS, generator), generator).float() / 255
    draws = torch.rand(6, len(images), 1, 1, 1, generator=generator, device=generator.device).to(images.device)
    factors, turn = 1 + CHANGED * (2 * draws[:3] - 1), TURNED * (2 * draws[3] - 1)
    altered = torch.where(draws[4] < JITTERED, change_colours(altered, factors, turn), altered)
    altered = torch.where(draws[5] < GREY, to_grey(altered).expand_as(altered), altered)
    return (255 * altered).round_().to(torch.uint8)


def change_colours(images: Tensor, factors: Tensor, turn: Tensor) -> Tensor:
    """Return images in 0..1 after brightness, contrast and saturation times factors [3, B, 1, 1, 1], hue plus turn."""
    images = (factors[0] * images).clamp(0, 1)
    images = blend(to_grey(images).mean((2, 3), keepdim=True), images, factors[1])
    if images.shape[1] != 3:
        return images
    return turn_hue(blend(to_grey(images), images, factors[2]), turn)


def blend(base: Tensor, images: Tensor, factor: Tensor) -> Tensor:
    """Return base + factor (images - base), within 0..1."""
    return (base + factor * (images - base)).clamp(0, 1)


def to_grey(images: Tensor) -> Tensor:
    """Return the luma [B, 1, H, W] of three channels, else the mean over channels."""
    if images.shape[1] != 3:
        return images.mean(1, keepdim=True)
    return (images * images.new_tensor(LUMA)[:, None, None]).sum(1, keepdim=True)


def turn_hue(images: Tensor, turn: Tensor) -> Tensor:
    """Return RGB images in 0..1 whose hue is further by a share of the circle, at the same value and saturation."""
    value, place = images.max(1, keepdim=True)
    chroma = value - images.amin(1, keepdim=True)
    sixths = (images.roll(-1, 1) - images.roll(-2, 1)) / chroma.clamp(min=1e-12)  # of (g-b), (b-r), (r-g)
    hue = sixths.gather(1, place) + 2 * place + 6 * turn
    k = (images.new_tensor([5, 3, 1])[:, None, None] + hue) % 6
    return value - chroma * torch.minimum(k, 4 - k).clamp(0, 1)
