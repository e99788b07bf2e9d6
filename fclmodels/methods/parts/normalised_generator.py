"""MFCL's generator: of noise [n, z] images as a network reads them, already normalised, [n, C, H, W].

A linear map to a map of the side / 2^k, batch normalisation; k times nearest doubling, a convolution, batch
normalisation, leaky ReLU; a convolution, tanh, batch normalisation without affine part. Up to 32 pixels k is 2, up to
64 it is 3, up to 128 it is 4 (ours), above 5. There are 128 channels, half of them in the last stage, up to 16 pixels
32 (the release's smaller one), above 64 pixels 64 in all stages. Maps are rounded up and images cut. Stages have the
release's eps of 0.8 in batch normalisation, which was meant for its momentum.
"""

from collections.abc import Mapping, Sequence
from itertools import pairwise
from math import ceil, prod
from typing import Any

import torch
from torch import Tensor, nn

from fclmodels.backbones.layers.norms import BatchNorm

SLOPE, EPS = 0.2, 0.8


class NormalisedGenerator(nn.Module):
    """From noise to a network's inputs."""

    def __init__(self, noise: int, width: int | None, shape: Sequence[int]) -> None:
        super().__init__()
        channels, *self.sides = shape
        side = max(self.sides)
        doublings = 2 + sum(side > limit for limit in (32, 64, 128))
        width = width or (32 if side <= 16 else 128 if side <= 64 else 64)
        widths = [width] * (doublings + 1) if side > 64 else [*[width] * doublings, ceil(width / 2)]
        self.noise = noise
        self.start = (width, *(ceil(side / 2**doublings) for side in self.sides))
        self.linear, self.norm = nn.Linear(noise, prod(self.start)), BatchNorm(width)
        self.stages = nn.Sequential(*(make_stage(before, after) for before, after in pairwise(widths)))
        self.last = nn.Conv2d(widths[-1], channels, 3, padding=1)
        self.scale = nn.BatchNorm2d(channels, affine=False)

    def forward(self, noise: Tensor) -> Tensor:
        x = self.stages(self.norm(self.linear(noise).view(-1, *self.start)))
        height, width = self.sides
        images: Tensor = self.scale(torch.tanh(self.last(x))[:, :, :height, :width])
        return images


def make_stage(inputs: int, outputs: int) -> nn.Module:
    """Return a doubling of the side with a convolution behind it."""
    convolution, norm = nn.Conv2d(inputs, outputs, 3, padding=1), BatchNorm(outputs)
    norm.eps = EPS
    return nn.Sequential(nn.Upsample(scale_factor=2), convolution, norm, nn.LeakyReLU(SLOPE))


def build_normalised_generator(spec: Mapping[str, Any]) -> NormalisedGenerator:
    return NormalisedGenerator(spec["noise"], spec["width"], spec["shape"])
