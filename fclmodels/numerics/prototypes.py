"""Prototypes of PIP: a Gaussian for each class of a task, out of sums that a server only has to add (sections 4.2-4.4).

Rows are the task's C classes. What a client sends are its moments: weight [C], sum [C, F] and square [C, F], in
float64. With weight = count, moments that are added over batches and clients are those of their pooled data, which is
eq. 7, 8, 14 and 15 in one. With `weighted` they are added as eq. 14 and 15 are printed.
"""

import math
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from fclmodels.numerics.privacy import gaussian

Moments = dict[str, Tensor]
Augmentation = Literal["normal", "paper", "release"]
POWERS = {"weight": 0, "sum": 1, "square": 2}  # of a feature's length
BOUND = math.sqrt(3)  # of a sample's count, sum and squares together, in the units of `in_units`
LEAST = 3  # deviations of the noise in a class's weight up to which it may well be noise alone


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


def weighted(counted: Moments, w: float) -> Moments:
    """A client's w, w mu and w (mu^2 + sigma^2) for each class that it has, from its count moments (eq. 14, 15).

    The paper has w = participation x samples of the task, the same for a class with one sample and with a thousand.
    """
    known = counted["weight"] > 0
    share = w / torch.where(known, counted["weight"], torch.inf)[:, None]
    return {"weight": w * known.double(), "sum": share * counted["sum"], "square": share * counted["square"]}


def gaussians(total: Moments) -> Gaussians:
    """mu = sum / weight (eq. 14) and sigma^2 = square / weight - mu^2 (eq. 15), in float64.

    The difference cancels: of n samples a variance is off by some 1e-16 sqrt(n) (mu^2 + sigma^2). Features of a frozen
    transformer have means of a few deviations, so that there is nothing to gain from a shift. A class without weight is
    not known.
    """
    known = total["weight"] > 0
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
    return means + sigma2.sqrt()[:, None] * gaussian(means, 1.0, generator)


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


def in_units(counted: Moments, bound: float) -> Moments:
    """Count moments as means over the client's samples, in units of 1, bound and bound^2.

    A sample x, ||x|| <= bound, is (1, x, x^2) in its class's row, and ||x^2|| <= bound^2: a vector of length
    BOUND at most. So is the mean of such, whatever their number.
    """
    n = counted["weight"].sum().clamp(min=1)
    return {name: value / (n * bound ** POWERS[name]) for name, value in counted.items()}


def out_of_units(total: Moments, bound: float, noise: float) -> Moments:
    """The inverse for a sum over clients with noise of that deviation; in mu and sigma2 each client counts the same.

    A class whose weight may well be noise alone has none, and no mean is longer than those of clipped features.
    """
    weight = total["weight"] * (total["weight"] > LEAST * noise)
    found = {name: value * bound ** POWERS[name] for name, value in total.items()}
    most = weight[:, None] * bound
    shrunk = (most / found["sum"].norm(dim=1, keepdim=True)).clamp(max=1).nan_to_num(0)
    square = torch.minimum(found["square"].clamp(min=0), most * bound)
    return {"weight": weight, "sum": found["sum"] * shrunk, "square": square}
