"""Augmentation of a whole batch at once, each sample with its own draw, on the device where the batch is.

It works on pixels, before `normalise`: the padding of a crop is black (0), not the mean, as in the usual CIFAR recipe.
Order: resize-crop, crop, flip, brightness. All randomness comes from the generator passed in.
"""

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from fclmodels.settings.schema import AugmentSettings

Channels = Sequence[float] | Tensor  # a number for each channel


def augment(images: Tensor, settings: AugmentSettings, generator: torch.Generator) -> Tensor:
    """Return altered pixels [B, C, H, W], uint8 in 0..255 or floating in 0..1, of the same type.

    Settings that alter nothing return the same tensor and draw nothing.
    """
    if settings.resize_crop is not None:
        images = resize_crop(images, settings.resize_crop, generator)
    if settings.crop_padding:
        images = crop(images, settings.crop_padding, generator)
    if settings.flip:
        images = flip(images, generator)
    if settings.brightness:
        images = change_brightness(images, settings.brightness, generator)
    return images


def normalise(images: Tensor, mean: Channels, std: Channels) -> Tensor:
    """Return (pixels / 255 - mean) / std of [B, C, H, W] in 0..255 as float32; mean and std [C], or [B, C] by image."""
    shift = torch.as_tensor(mean, dtype=torch.float32, device=images.device)[..., None, None]
    scale = torch.as_tensor(std, dtype=torch.float32, device=images.device)[..., None, None]
    return images.to(torch.float32).mul_(1 / (255 * scale)).sub_(shift / scale)


def to_inputs(samples: Tensor, mean: Channels, std: Channels) -> Tensor:
    """Turn prepared samples into a network's inputs: pixels are normalised, token ids stay as they are."""
    return normalise(samples, mean, std) if samples.dtype == torch.uint8 else samples


def crop(images: Tensor, padding: int, generator: torch.Generator) -> Tensor:
    """Cut a window of the old size at random from the image with `padding` zeros on each side."""
    count, _, height, width = images.shape
    offsets = torch.randint(2 * padding + 1, (2, count), generator=generator, device=generator.device)
    top, left = offsets.to(images.device)
    windows = F.pad(images, (padding,) * 4).unfold(2, height, 1).unfold(3, width, 1)
    return windows[torch.arange(count, device=images.device), :, top, left]


def flip(images: Tensor, generator: torch.Generator) -> Tensor:
    """Mirror left and right with probability 1/2."""
    mirrored = _draw_uniform(images, generator) < 0.5
    return torch.where(mirrored.view(-1, 1, 1, 1), images.flip(-1), images)


def change_brightness(images: Tensor, amount: float, generator: torch.Generator) -> Tensor:
    """Multiply pixels by a factor from U(1 - amount, 1 + amount), clipped at white."""
    factor = 1 + amount * (2 * _draw_uniform(images, generator) - 1)
    white = 1.0 if images.is_floating_point() else 255.0
    return _convert_to_pixels((images * factor.view(-1, 1, 1, 1)).clamp_(max=white), images.dtype)


def resize_crop(images: Tensor, areas: tuple[float, float], generator: torch.Generator) -> Tensor:
    """Cut a window of the image's proportions with a share of its area from U(areas), resized to the old size."""
    low, high = areas
    share, across, down = (_draw_uniform(images, generator) for _ in range(3))
    side = (low + (high - low) * share).sqrt()
    # In affine_grid's coordinates the image spans -1..1, so the window's middle lies within +-(1 - side).
    zero = torch.zeros_like(side)
    middle_x, middle_y = ((1 - side) * (2 * draw - 1) for draw in (across, down))
    windows = torch.stack([side, zero, middle_x, zero, side, middle_y], dim=1).view(-1, 2, 3)
    pixels = images if images.is_floating_point() else images.float()
    grid = F.affine_grid(windows.to(pixels.dtype), list(images.shape), align_corners=False)
    # The outermost half pixel lies beyond the last pixel's middle: "border" repeats that pixel instead of darkening it.
    return _convert_to_pixels(F.grid_sample(pixels, grid, padding_mode="border", align_corners=False), images.dtype)


def _draw_uniform(images: Tensor, generator: torch.Generator) -> Tensor:
    """Draw a number in [0, 1) for each sample: [B]."""
    return torch.rand(len(images), generator=generator, device=generator.device).to(images.device)


def _convert_to_pixels(images: Tensor, dtype: torch.dtype) -> Tensor:
    return images.to(dtype) if dtype.is_floating_point else images.round_().to(dtype)
