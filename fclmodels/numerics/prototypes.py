"""Prototypes of PIP: a Gaussian for each class of a task, out of sums that a server only has to add (sections 4.2-4.4).

Rows are the task's C classes. What a client sends are its moments: weight [C], sum [C, F] and square [C, F], in
float64. With weight = count, moments that are added over batches and clients are those of their pooled data, which is
eq. 7, 8, 14 and 15 in one. With `weighted` they are added as eq. 14 and 15 are printed.
"""

import math
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from fclmodels.numerics.privacy import noise_share

Moments = dict[str, Tensor]
Augmentation = Literal["normal", "paper", "release"]
SENSITIVITY = math.sqrt(3)  # of a sample's count, sum and squares together, in the units of `noisy`


class Gaussians(NamedTuple):
    """Means mu [C, F] and variances sigma2 [C, F]; nothing is known of a class, and both are 0, where not known [C]."""

    mu: Tensor
    sigma2: Tensor
    known: Tensor


def moments(features: Tensor, labels: Tensor, classes: int) -> Moments:
    """Count, sum and sum of squares of each class, from features [B, F] and labels [B] in 0..C-1."""
    X = features.double()
    empty = X.new_zeros(classes, X.shape[1])
    return {
        "weight": X.new_zeros(classes).index_add(0, labels, X.new_ones(len(X))),
        "sum": empty.index_add(0, labels, X),
        "square": empty.index_add(0, labels, X.square()),
    }


def weighted(counted: Moments, w: float, least: float = 0.0) -> Moments:
    """A client's w, w mu and w (mu^2 + sigma^2) for each class that it has, from its count moments (eq. 14, 15).

    The paper has w = participation x samples of the task, the same for a class with one sample and with a thousand.
    """
    known = counted["weight"] > least
    share = w / torch.where(known, counted["weight"], torch.inf)[:, None]
    return {"weight": w * known.double(), "sum": share * counted["sum"], "square": share * counted["square"]}


def gaussians(total: Moments, least: float = 0.0) -> Gaussians:
    """mu = sum / weight (eq. 14) and sigma^2 = square / weight - mu^2 (eq. 15), in float64.

    The difference cancels: of n samples a variance is off by some 1e-16 sqrt(n) (mu^2 + sigma^2). Features of a frozen
    transformer have means of a few deviations, so that there is nothing to gain from a shift. A class of weight `least`
    or below is not known.
    """
    known = total["weight"] > least
    weight = torch.where(known, total["weight"], torch.inf)[:, None]
    mu = total["sum"] / weight
    sigma2 = total["square"] / weight - mu.square()
    return Gaussians(mu, sigma2.clamp(min=0), known)


def carried(old: Gaussians, new: Gaussians) -> Gaussians:
    """The new prototypes, and the old ones of classes that the new ones do not know. Both are of the same task."""
    kept = new.known[:, None]
    return Gaussians(
        torch.where(kept, new.mu, old.mu), torch.where(kept, new.sigma2, old.sigma2), new.known | old.known
    )


def augmented(mu: Tensor, sigma2: Tensor, count: int, kind: Augmentation, generator: torch.Generator) -> Tensor:
    """So many vectors of each class, [C, count, F], from means and variances [C, F] (eq. 11).

    normal: draws from N(mu, sigma^2), which section 4.3 describes.
    paper: mu, then mu + beta sigma as eq. 11 has it. beta is uniform in (0, 1), one number a vector, so that all lie on
        the line from mu to mu + sigma.
    release: mu, mu + shift and mu - shift, over and over. shift = U(0, 1) / 3 sigma^4 for each number of each class, as
        the released code has it, but with the true variance.
    """
    return AUGMENTATIONS[kind](mu, sigma2, count, generator)


def _normal(mu: Tensor, sigma2: Tensor, count: int, generator: torch.Generator) -> Tensor:
    means = mu[:, None].expand(-1, count, -1)
    return means + sigma2.sqrt()[:, None] * noise_share(means, 1.0, 1, generator)


def _paper(mu: Tensor, sigma2: Tensor, count: int, generator: torch.Generator) -> Tensor:
    beta = _uniform((len(mu), count, 1), mu, generator)
    beta[:, :1] = 0
    return mu[:, None] + beta * sigma2.sqrt()[:, None]


def _release(mu: Tensor, sigma2: Tensor, count: int, generator: torch.Generator) -> Tensor:
    shift = _uniform(tuple(mu.shape), mu, generator) / 3 * sigma2.square()
    return torch.stack([mu, mu + shift, mu - shift], dim=1)[:, torch.arange(count) % 3]


def _uniform(shape: tuple[int, ...], like: Tensor, generator: torch.Generator) -> Tensor:
    return torch.rand(shape, generator=generator, dtype=like.dtype, device=generator.device).to(like.device)


AUGMENTATIONS = {"normal": _normal, "paper": _paper, "release": _release}


def balanced(batch_size: int, own_classes: int) -> int:
    """How many vectors a class that a client lacks gets in a batch: about as many as one that it has has samples."""
    return max(1, round(batch_size / own_classes))


def clipped_rows(features: Tensor, bound: float) -> Tensor:
    """Features [B, F], each sample's at the norm `bound` where it has more."""
    return features.double().renorm(2, 0, bound)


def noisy(counted: Moments, multiplier: float, bound: float, generator: torch.Generator) -> Moments:
    """A client's count moments by the Gaussian mechanism, for samples of which each may have been there or not.

    One sample x, ||x|| <= bound, adds (1, x, x^2) to its class's row and nothing to others, and ||x^2|| <= bound^2: in
    units of 1, bound and bound^2 that has a norm of at most sqrt(3). Every entry, also of classes that the client
    lacks, gets noise of `multiplier` times that in its unit: one release a round for `privacy.epsilon`.
    """
    units = {"weight": 1.0, "sum": bound, "square": bound**2}
    scale = multiplier * SENSITIVITY
    return {name: value + noise_share(value, scale * units[name], 1, generator) for name, value in counted.items()}


def least_count(multiplier: float, clients: int) -> float:
    """Three deviations of a class's noisy count, summed over so many clients: up to here it may well be noise alone."""
    return 3 * multiplier * SENSITIVITY * math.sqrt(clients)
