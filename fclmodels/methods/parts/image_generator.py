"""Generators of images: from vectors [B, inputs] to pixels [B, C, H, W] within 0..1.

Up to 96 pixels TARGET's: a linear map to a quarter of the side, and two stages of nearest doubling and convolution. Its
linear map grows with the square of the side (103 million numbers at 224 pixels), so that larger images have LANDER's:
a sixteenth of the side, and four stages. Where it changes is ours. Sides that 4 or 16 does not divide are cut from the
next larger image (ours).
"""

from collections.abc import Sequence
from math import ceil, prod

import torch
from torch import Tensor, nn

LARGEST_OF_TWO_STAGES = 96  # pixels of the longer side
SLOPE = 0.2


class ImageGenerator(nn.Module):
    """A linear map, convolutions that double the side, and a sigmoid."""

    def __init__(self, inputs: int, width: int, shape: Sequence[int]) -> None:
        super().__init__()
        channels, *self.sides = shape
        is_large = max(self.sides) > LARGEST_OF_TWO_STAGES
        reduction = 16 if is_large else 4
        self.start = (2 * width, *(ceil(side / reduction) for side in self.sides))
        self.linear = nn.Linear(inputs, prod(self.start))
        stages = (2 * width, width, width, width) if is_large else (2 * width, width)
        before = [make_convolution(2 * width, 2 * width)] if is_large else [nn.BatchNorm2d(2 * width)]
        rises = zip((2 * width, *stages), stages, strict=False)
        doublings = [nn.Sequential(nn.Upsample(scale_factor=2), make_convolution(*rise)) for rise in rises]
        self.layers = nn.Sequential(*before, *doublings, nn.Conv2d(stages[-1], channels, 3, padding=1), nn.Sigmoid())

    def forward(self, vectors: Tensor) -> Tensor:
        pixels: Tensor = self.layers(self.linear(vectors).view(-1, *self.start))
        height, width = self.sides
        return pixels[:, :, :height, :width]


def make_convolution(inputs: int, outputs: int) -> nn.Module:
    """Return a 3x3 convolution with batch normalisation and a leaky ReLU behind it."""
    convolution = nn.Conv2d(inputs, outputs, 3, padding=1, bias=False)
    return nn.Sequential(convolution, nn.BatchNorm2d(outputs), nn.LeakyReLU(SLOPE, inplace=True))


class LabelGenerator(nn.Module):
    """LANDER's: embeddings of labels pass linear layers of noise, ten rows of a batch each, then a generator."""

    ROWS = 10

    def __init__(self, embeddings: int, batch: int, inputs: int, width: int, shape: Sequence[int]) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(embeddings)
        self.noisy = nn.ModuleList(nn.Linear(embeddings, inputs) for _ in range(ceil(batch / self.ROWS)))
        self.images = ImageGenerator(inputs, width, shape)

    def forward(self, embeddings: Tensor) -> Tensor:
        parts = zip(self.noisy, self.norm(embeddings).split(self.ROWS), strict=True)
        pixels: Tensor = self.images(torch.cat([layer(part) for layer, part in parts]))
        return pixels

    @torch.no_grad()
    def redraw(self) -> None:
        """Draw the noisy layers anew from torch's global generator: weights N(0, 1), biases 0."""
        for layer in self.noisy:
            nn.init.normal_(layer.get_parameter("weight"))
            nn.init.zeros_(layer.get_parameter("bias"))
