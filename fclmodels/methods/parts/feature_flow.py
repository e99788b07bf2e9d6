"""A class-conditional flow on features: an invertible map between features h [B, d] and Gaussian latents z, by column.

Four times a fixed permutation (reverse, reverse, random, random) and an affine coupling (Dinh et al. 2017):

    x = (a, b) -> (a, s b + t),   s = sigmoid(u + 2) + 0.001,   (t, u) of a and the class
    log f(h|y) = log N(z; 0, I) + sum log s

The first half a passes. The conditioner is AF-FCL's: a linear layer of a and the class, two residual blocks that the
class gates, a linear layer. Classes have rows of tables, to which a growing stream adds. The size of images plays no
part, only d.
"""

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import leaky_relu

from fclmodels.methods.parts.class_table import ClassTable

LEAST_SCALE = 1e-3


class GatedBlock(nn.Module):
    """x + (linear of leaky ReLU, twice) * sigmoid(linear of the class); it starts near the identity."""

    def __init__(self, width: int, classes: int) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(width, width), nn.Linear(width, width)
        for parameter in self.second.parameters():
            nn.init.uniform_(parameter, -1e-3, 1e-3)
        self.gate = ClassTable(classes, width, classes**-0.5)
        self.gate_bias = nn.Parameter(torch.empty(width).uniform_(-(classes**-0.5), classes**-0.5))

    def forward(self, x: Tensor, classes: Tensor) -> Tensor:
        moved = self.second(leaky_relu(self.first(leaky_relu(x))))
        return x + moved * torch.sigmoid(self.gate(classes) + self.gate_bias)


class Coupling(nn.Module):
    """A permutation, and an affine coupling after it."""

    order: Tensor

    def __init__(self, order: Tensor, width: int, classes: int) -> None:
        super().__init__()
        self.register_buffer("order", order)
        self.passing = len(order) // 2
        bound = (self.passing + classes) ** -0.5
        self.enter, self.of_class = nn.Linear(self.passing, width), ClassTable(classes, width, bound)
        for parameter in self.enter.parameters():
            nn.init.uniform_(parameter, -bound, bound)
        self.blocks = nn.ModuleList(GatedBlock(width, classes) for _ in range(2))
        self.leave = nn.Linear(width, 2 * (len(order) - self.passing))

    def forward(self, x: Tensor, classes: Tensor) -> tuple[Tensor, Tensor]:
        """Return the coupled numbers [B, d], and the logarithm [B] of the determinant."""
        x = x[:, self.order]
        passed, moved = x[:, : self.passing], x[:, self.passing :]
        shift, scale = self.compute_shift_and_scale(passed, classes)
        return torch.cat([passed, moved * scale + shift], 1), scale.log().sum(1)

    def invert(self, x: Tensor, classes: Tensor) -> Tensor:
        """Return what the coupling makes x of."""
        passed, moved = x[:, : self.passing], x[:, self.passing :]
        shift, scale = self.compute_shift_and_scale(passed, classes)
        return torch.cat([passed, (moved - shift) / scale], 1)[:, self.order.argsort()]

    def compute_shift_and_scale(self, passed: Tensor, classes: Tensor) -> tuple[Tensor, Tensor]:
        """Return shift and scale of the second half."""
        hidden = self.enter(passed) + self.of_class(classes)
        for block in self.blocks:
            hidden = block(hidden, classes)
        shift, unscaled = self.leave(hidden).split(len(self.order) - self.passing, 1)
        return shift, torch.sigmoid(unscaled + 2) + LEAST_SCALE


class FeatureFlow(nn.Module):
    """The flow between features and latents."""

    def __init__(self, features: int, width: int, classes: int) -> None:
        super().__init__()
        backwards = torch.arange(features).flip(0)
        orders = [backwards, backwards, torch.randperm(features), torch.randperm(features)]
        self.features = features
        self.couplings = nn.ModuleList(Coupling(order.clone(), width, classes) for order in orders)

    def forward(self, h: Tensor, classes: Tensor) -> tuple[Tensor, Tensor]:
        """Return latents [B, d] and log densities [B] of features [B, d], by their classes [B]."""
        log_scales = h.new_zeros(len(h))
        for coupling in self.couplings:
            h, log_scale = coupling(h, classes)
            log_scales = log_scales + log_scale
        return h, log_scales - 0.5 * h.square().sum(1) - 0.5 * self.features * math.log(2 * math.pi)

    def invert(self, z: Tensor, classes: Tensor) -> Tensor:
        """Return the features [B, d] that have these latents."""
        for coupling in reversed(self.couplings):
            assert isinstance(coupling, Coupling)
            z = coupling.invert(z, classes)
        return z

    @torch.no_grad()
    def draw(self, classes: Tensor) -> tuple[Tensor, Tensor]:
        """Return features [B, d] of classes [B], drawn with torch's generator, and their latents."""
        z = torch.randn(len(classes), self.features, device=classes.device)
        return self.invert(z, classes), z


def build_flow(spec: Mapping[str, Any]) -> FeatureFlow:
    return FeatureFlow(spec["features"], spec["width"], spec["classes"])


def weigh_by_density(
    drawn: Tensor, drawn_classes: Tensor, present: Tensor, classes: Tensor, otherwise: Tensor, least: int = 2
) -> Tensor:
    """Return how likely each drawn row [n, d] is among the present rows [B, d] of its class: [n].

    A mean over dimensions of the density of a Gaussian with the mean and the biased variance of these rows; `otherwise`
    where there are fewer than `least` of them.
    """
    weights = otherwise.expand(len(drawn)).clone()
    for label in drawn_classes.unique().tolist():
        of_class, mine = present[classes == label], drawn_classes == label
        if len(of_class) >= least:
            variance, mean = torch.var_mean(of_class, 0, correction=0)
            variance = variance + 1e-30
            density = (-0.5 * (drawn[mine] - mean).square() / variance).exp() / (2 * math.pi * variance).sqrt()
            weights[mine] = density.mean(1)
    return weights
