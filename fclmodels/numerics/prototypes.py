"""Prototypes of PIP: a Gaussian for each class of a task, from sums that a server only has to add (sections 4.2-4.4).

Rows are the task's C classes. A client sends its moments: weight [C], sum [C, F] and square [C, F], in
float64. With weight = count, moments that are added over batches and clients are those of their pooled data, which is
eq. 7, 8, 14 and 15 in one. With `weigh` they are added as eq. 14 and 15 are printed.
"""

import math
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from fclmodels.numerics.gaussian_mechanism import draw_noise

Moments = dict[str, Tensor]
Augmentation = Literal["normal", "paper", "release"]
POWERS = {"weight": 0, "sum": 1, "square": 2}  # of a feature's length
BOUND = math.sqrt(3)  # of a sample's count, sum and squares together, in the units of `to_units`
LEAST = 3  # deviations of the noise in a class's weight up to which it counts as noise alone


class Gaussians(NamedTuple):
    """A Gaussian for each of C classes."""

    mu: Tensor  # [C, F] means, 0 where a class is missing
    sigma2: Tensor  # [C, F] variances, 0 where a class is missing
    present: Tensor  # bool [C]

    def to_tree(self) -> dict[str, Tensor]:
        return {"mu": self.mu, "sigma2": self.sigma2, "known": self.present}


def moments(features: Tensor, labels: Tensor, classes: int) -> Moments:
    """Return count, sum and sum of squares of each class, from features [B, F] and labels [B] in 0..C-1."""
    X = features.double()
    empty = X.new_zeros(classes, X.shape[1])
    return {
        "weight": X.new_zeros(classes).index_add(0, labels, X.new_ones(len(X))),
        "sum": empty.index_add(0, labels, X),
        "square": empty.index_add(0, labels, X.square()),
    }


def weigh(counted: Moments, w: float) -> Moments:
    """Return a client's w, w mu and w (mu^2 + sigma^2) for each class that it has, from its count moments (eq. 14, 15).

    The paper has w = participation x samples of the task, the same for a class with one sample and with a thousand.
    """
    present = counted["weight"] > 0
    share = w / torch.where(present, counted["weight"], torch.inf)[:, None]
    return {"weight": w * present.double(), **{n: share * value for n, value in counted.items() if n != "weight"}}


def fit_gaussians(total: Moments) -> Gaussians:
    """Return mu = sum / weight (eq. 14) and sigma^2 = square / weight - mu^2 (eq. 15), in float64.

    The difference cancels: of n samples a variance is off by some 1e-16 sqrt(n) (mu^2 + sigma^2). Features of a frozen
    transformer have means of a few deviations, so that there is nothing to gain from a shift. A class without weight is
    missing.
    """
    present = total["weight"] > 0
    weight = torch.where(present, total["weight"], torch.inf)[:, None]
    mu = total["sum"] / weight
    sigma2 = total["square"] / weight - mu.square()
    return Gaussians(mu, sigma2.clamp(min=0), present)


def carry_over(old: Gaussians, new: Gaussians) -> Gaussians:
    """Return the new prototypes, and the old ones of classes that they lack; both are of the same task."""
    is_new = new.present[:, None]
    return Gaussians(
        torch.where(is_new, new.mu, old.mu), torch.where(is_new, new.sigma2, old.sigma2), new.present | old.present
    )


def draw_vectors(mu: Tensor, sigma2: Tensor, count: int, kind: Augmentation, generator: torch.Generator) -> Tensor:
    """Draw vectors [C, count, F] of each class from means and variances [C, F] (eq. 11).

    normal: draws from N(mu, sigma^2), which section 4.3 describes.
    paper: mu, then mu + beta sigma as eq. 11 has it. beta is uniform in (0, 1), one number a vector, so that all lie on
        the line from mu to mu + sigma.
    release: mu, mu + shift and mu - shift, over and over. shift = U(0, 1) / 3 sigma^4 for each number of each class, as
        the released code has it, but with the true variance.
    """
    return AUGMENTATIONS[kind](mu, sigma2, count, generator)


def _normal(mu: Tensor, sigma2: Tensor, count: int, generator: torch.Generator) -> Tensor:
    means = mu[:, None].expand(-1, count, -1)
    return means + sigma2.sqrt()[:, None] * draw_noise(means, 1.0, generator)


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


def count_balanced(batch_size: int, own_classes: int) -> int:
    """Return the number of vectors of a missing class in a batch: about that of samples of a client's own class."""
    return max(1, round(batch_size / own_classes))


def clip_rows(features: Tensor, bound: float) -> Tensor:
    """Return features [B, F], each sample's scaled to the norm `bound` where its own is larger."""
    return features.double().renorm(2, 0, bound)


def to_units(counted: Moments, bound: float) -> Moments:
    """Return count moments as means over the client's samples, in units of 1, bound and bound^2.

    A sample x, ||x|| <= bound, is (1, x, x^2) in its class's row, and ||x^2|| <= bound^2: a vector of length
    BOUND at most. So is the mean of such, whatever their number.
    """
    n = counted["weight"].sum().clamp(min=1)
    return {name: value / (n * bound ** POWERS[name]) for name, value in counted.items()}


def from_units(total: Moments, bound: float, noise: float) -> Moments:
    """Undo to_units for a sum over clients with noise of that deviation; in mu and sigma2 each client counts the same.

    A class whose weight may be noise alone gets none, and no mean is longer than those of clipped features.
    """
    weight = total["weight"] * (total["weight"] > LEAST * noise)
    scaled = {name: value * bound ** POWERS[name] for name, value in total.items()}
    most = weight[:, None] * bound
    shrunk = (most / scaled["sum"].norm(dim=1, keepdim=True)).clamp(max=1).nan_to_num(0)
    squares = {"square": torch.minimum(scaled["square"].clamp(min=0), most * bound)} if "square" in scaled else {}
    return {"weight": weight, "sum": scaled["sum"] * shrunk, **squares}
