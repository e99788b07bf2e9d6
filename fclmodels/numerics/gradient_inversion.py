"""Gradient inversion: an image and its label from the gradient of a known network's loss (DLG: Zhu et al. 2019).

The label is read off the last layer: of cross entropy's gradient only the row of the label is negative where features
are positive (Zhao et al. 2020). The image is the one whose gradient comes nearest.
"""

from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

Kind = Literal["l-bfgs", "sgd"]


class SigmoidLeNet(nn.Module):
    """Three 5x5 convolutions of 12 channels with sigmoids and a linear layer, all from U(-0.5, 0.5), never trained."""

    def __init__(self, shape: Sequence[int], classes: int, generator: torch.Generator) -> None:
        super().__init__()
        channels, height, width = shape
        sides = [(side + 3) // 4 for side in (height, width)]
        self.convolutions = nn.Sequential(
            *(nn.Conv2d(channels, 12, 5, stride=2, padding=2), nn.Sigmoid()),
            *(nn.Conv2d(12, 12, 5, stride=2, padding=2), nn.Sigmoid()),
            *(nn.Conv2d(12, 12, 5, padding=2), nn.Sigmoid()),
        )
        self.linear = nn.Linear(12 * sides[0] * sides[1], classes)
        with torch.no_grad():
            for parameter in self.parameters():
                parameter.copy_(torch.rand(parameter.shape, generator=generator) - 0.5)

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.linear(self.convolutions(x).flatten(1))
        return logits


def differentiate(network: nn.Module, image: Tensor, label: Tensor, graph: bool = False) -> list[Tensor]:
    """Return the gradient of the cross entropy of an image [1, ...] and its label [1] by each parameter."""
    parameters = list(network.parameters())
    return list(torch.autograd.grad(cross_entropy(network(image), label), parameters, create_graph=graph))


def infer_label(gradient: Sequence[Tensor]) -> Tensor:
    """Return the label [1] that a gradient is of: the row of the last layer's weight with the least sum."""
    return gradient[-2].sum(1).argmin()[None]


def invert_gradient(
    network: nn.Module, gradient: Sequence[Tensor], start: Tensor, kind: Kind, lr: float, steps: int, last: int
) -> tuple[Tensor, float]:
    """Return the last iterates [last, ...] of an image [1, ...] whose gradient nears this one, and the distance.

    The distance is the sum of squared differences. A step of L-BFGS is one iteration; the release has up to 20 in each.
    """
    label, image, iterates = infer_label(gradient), start.clone().requires_grad_(), []
    optimiser = torch.optim.LBFGS([image], lr, max_iter=1) if kind == "l-bfgs" else torch.optim.SGD([image], lr)

    def closure() -> float:
        optimiser.zero_grad()
        of_image = differentiate(network, image, label, graph=True)
        distance = torch.stack([(a - b).square().sum() for a, b in zip(of_image, gradient, strict=True)]).sum()
        (image.grad,) = torch.autograd.grad(distance, [image])
        return float(distance.detach())

    distance = 0.0
    for step in range(steps):
        distance = float(optimiser.step(closure))
        if step >= steps - last:
            iterates.append(image.detach().clone())
    return torch.cat(iterates).nan_to_num(), distance
