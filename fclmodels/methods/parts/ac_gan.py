"""An AC-GAN: a generator of images by class, and a critic that says whether an image is real and of which class.

The critic is a network with its heads, and one unit beside it, the judge D. With BCE the binary cross entropy of D and
NLL the cross entropy of the class, of samples x with classes y and of draws f with classes drawn uniformly:

    L_D(x) = BCE(D(x), 1) + NLL(x, y) + BCE(D(f), 0) + NLL(f, y_f)        L_G = BCE(D(f), 1) + NLL(f, y_f)

The generator is that of FedCIL's release for EMNIST: of noise and a one-hot class a map of an eighth of the side,
batch normalisation, and three transposed convolutions that double the side; then one more, and tanh. Its start is
rounded up and the images are cut; above 64 pixels more doublings of the first width come before, so that the start is
at most 8 pixels (ours). Its pixels are brought to 0..1, and the critic sees them normalised as the stream's samples
are. It is always in training mode (the release's), so that its running statistics count for nothing.
"""

from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from math import ceil, prod
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import binary_cross_entropy_with_logits, relu

from fclmodels.backbones.layers.norms import BatchNorm, leave_statistics
from fclmodels.backbones.model.network import Network
from fclmodels.federation.training.optimisers import Optimiser
from fclmodels.methods.parts.class_table import ClassTable
from fclmodels.methods.parts.joined_heads import compute_cross_entropy_in_heads, log_softmax_in_heads
from fclmodels.methods.parts.label_sets import draw_uniformly

Normalise = Callable[[Tensor], Tensor]
LARGEST_START = 8  # pixels of the generator's first map
SPREAD = 0.02  # of the generator's first weights


class ClassGenerator(nn.Module):
    """From columns [n], by draws of torch's generator, to pixels [n, C, H, W] within 0..1."""

    def __init__(self, noise: int, width: int, classes: int, shape: Sequence[int]) -> None:
        super().__init__()
        channels, *self.sides = shape
        doublings = 3
        while ceil(max(self.sides) / 2**doublings) > LARGEST_START:
            doublings += 1
        widths = [8 * width] * (doublings - 2) + [4 * width, 2 * width, width]
        self.noise = noise
        self.start = (widths[0], *(ceil(side / 2**doublings) for side in self.sides))
        self.linear, self.of_class = nn.Linear(noise, prod(self.start)), ClassTable(classes, prod(self.start), 1)
        self.norms = nn.ModuleList(BatchNorm(channels) for channels in widths)
        self.rises = nn.ModuleList(nn.ConvTranspose2d(before, after, 4, 2, 1) for before, after in pairwise(widths))
        self.last = nn.ConvTranspose2d(width, channels, 3, 1, 1)
        for name, parameter in self.named_parameters():
            if name.endswith("weight") and not name.startswith("norms."):
                nn.init.normal_(parameter, 0, SPREAD)

    def forward(self, columns: Tensor) -> Tensor:
        """Return an image of each column."""
        noise = torch.randn(len(columns), self.noise, device=columns.device)
        x = relu(self.norms[0]((self.linear(noise) + self.of_class(columns)).view(-1, *self.start)))
        for rise, norm in zip(self.rises, list(self.norms)[1:], strict=True):
            x = relu(norm(rise(x)))
        height, width = self.sides
        pixels: Tensor = (torch.tanh(self.last(x))[:, :, :height, :width] + 1) / 2
        return pixels


def build_generator(spec: Mapping[str, Any]) -> ClassGenerator:
    return ClassGenerator(spec["noise"], spec["width"], spec["classes"], spec["shape"])


def build_judge(spec: Mapping[str, Any]) -> nn.Linear:
    return nn.Linear(spec["features"], 1)


class AcGan:
    """A critic and a generator that learn from each other; normalise: from pixels to the critic's inputs."""

    def __init__(self, network: Network, judge: nn.Module, generator: nn.Module, normalise: Normalise) -> None:
        self.network = network
        self.normalise = normalise
        self.judge = judge
        self.generator = generator.train()

    def measure_critic(self, features: Tensor, nll: Tensor, columns: Tensor) -> Tensor:
        """Return L_D of samples by their features [B, F] and NLL, with as many draws of these columns."""
        drawn, of = self.draw(columns, len(features))
        with leave_statistics(self.network):
            false = self.network.backbone(drawn.detach())
        nll_false = compute_cross_entropy_in_heads(self.network, false, of).mean()
        return add_critic_losses(self.judge(features), nll, self.judge(false), nll_false)

    def measure_samples(self, inputs: Tensor, of: Tensor, columns: Tensor) -> Tensor:
        """Return L_D of synthetic samples, which move no running statistics; draws are of these columns."""
        with leave_statistics(self.network):
            features = self.network.backbone(inputs)
        return self.measure_critic(features, compute_cross_entropy_in_heads(self.network, features, of).mean(), columns)

    def measure_generator(self, columns: Tensor, count: int) -> Tensor:
        """Return L_G of as many draws of these columns."""
        drawn, of = self.draw(columns, count)
        with leave_statistics(self.network):
            features = self.network.backbone(drawn)
        nll = compute_cross_entropy_in_heads(self.network, features, of).mean()
        return binary_cross_entropy_with_logits(self.judge(features), torch.ones_like(features[:, :1])) + nll

    def measure_consistency(self, server: nn.Module, features: Tensor, of: Tensor, columns: Tensor) -> Tensor:
        """Return KL(p(g) || p(x)) + KL(p(g') || p(f')) + NLL(g', y'), g of the server's generator.

        g has the classes of the samples x, whose features are given; g' and the own draws f' have classes y' that are
        drawn from these columns. Only the critic learns from it.
        """
        wished = draw_uniformly(columns, len(of))
        with torch.no_grad():
            like, theirs, own = map(self.normalise, (server(of), server(wished), self.generator(wished)))
        with leave_statistics(self.network):
            g, others, f = (self.network.backbone(inputs) for inputs in (like, theirs, own))
        p_g, p_x = (log_softmax_in_heads(self.network, h, of) for h in (g, features))
        p_others, p_f = (log_softmax_in_heads(self.network, h, wished) for h in (others, f))
        nll = compute_cross_entropy_in_heads(self.network, others, wished).mean()
        return diverge(p_g, p_x) + diverge(p_others, p_f) + nll

    def draw(self, columns: Tensor, count: int) -> tuple[Tensor, Tensor]:
        """Return images, as inputs, and their columns, drawn uniformly from these."""
        of = draw_uniformly(columns, count)
        return self.normalise(self.generator(of)), of


class GanTraining:
    """An AC-GAN in one client's training; own, everyone: columns so far of this client, and of all.

    past: a generator of earlier classes, and these; server: the global generator, with which to be consistent.
    """

    def __init__(
        self,
        gan: AcGan,
        optimiser: Optimiser,
        own: Tensor,
        everyone: Tensor,
        past: tuple[nn.Module, Tensor] | None,
        server: nn.Module | None,
    ) -> None:
        self.gan = gan
        self.optimiser = optimiser
        self.own = own
        self.everyone = everyone
        self.past = past
        self.server = server
        self._count = 0  # of samples in the last batch

    def measure_critic(self, features: Tensor, nll: Tensor, columns: Tensor, consistency: float) -> Tensor:
        """Return the critic's loss of a batch by its features and NLL, and its columns."""
        self._count = len(features)
        loss = self.gan.measure_critic(features, nll, self.own)
        if self.past is not None:
            generator, earlier = self.past
            of = draw_uniformly(earlier, self._count)
            with torch.no_grad():
                replayed = self.gan.normalise(generator(of))
            loss = (loss + self.gan.measure_samples(replayed, of, self.own)) / 2
        if self.server is not None:
            loss = loss + consistency * self.gan.measure_consistency(self.server, features, columns, self.everyone)
        return loss

    def step_generator(self) -> None:
        """Take a step of the generator, on as many draws as the last batch had samples."""
        step_generator(self.gan, self.optimiser, self.own, self._count)


def step_generator(gan: AcGan, optimiser: Optimiser, columns: Tensor, count: int) -> None:
    """Move the generator down L_G of so many draws of these columns."""
    parameters = list(gan.generator.parameters())
    gradients = torch.autograd.grad(gan.measure_generator(columns, count), parameters)
    for parameter, gradient in zip(parameters, gradients, strict=True):
        parameter.grad = gradient
    optimiser.step()


def make_generator_adam(generator: nn.Module, lr: float) -> Optimiser:
    """Return a new optimiser of a generator: the release's Adam."""
    return torch.optim.Adam(generator.parameters(), lr, betas=(0.5, 0.99), weight_decay=1e-5, fused=True)


def add_critic_losses(real: Tensor, nll_real: Tensor, false: Tensor, nll_false: Tensor) -> Tensor:
    """Return L_D by the judge's logits [B, 1] of samples and of draws, and by both's NLL."""
    of_real = binary_cross_entropy_with_logits(real, torch.ones_like(real))
    return of_real + nll_real + binary_cross_entropy_with_logits(false, torch.zeros_like(false)) + nll_false


def diverge(log_p: Tensor, log_q: Tensor) -> Tensor:
    """Return KL(p || q), a mean over rows; columns that are impossible in both have 0 for their logarithm."""
    return (log_p.exp() * (log_p - log_q)).sum(1).mean()
