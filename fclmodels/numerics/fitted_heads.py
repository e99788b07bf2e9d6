"""Linear heads that are fitted to features instead of trained by rounds: nearest mean, ridge, Gaussian samples.

A head is W [C, F] and b [C], logits W a + b. What they are fitted to are sums over samples, which a server only has to
add: counts, sums and second moments of each class, or A^T A and A^T Y of features A [n, F] and one-hot labels Y [n, C].
All is computed in float64 and returned in float32.
"""

from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy, one_hot

from fclmodels.numerics.gaussian_mechanism import draw_noise

NEVER = -1e9  # the logit of a class of which no sample has been seen


class LinearHead(NamedTuple):
    """Logits W a + b of features a [F]."""

    weight: Tensor  # W [C, F]
    bias: Tensor  # b [C]


class ClassGaussians(NamedTuple):
    """A Gaussian over features for each of C classes."""

    means: Tensor  # [C, F], 0 where a class has no samples
    covariances: Tensor  # [C, F, F], 0 where a class has less than two samples
    counts: Tensor  # [C], of samples


def sum_classes(features: Tensor, labels: Tensor, classes: int) -> dict[str, Tensor]:
    """Return count [C], sum [C, F] and sum of a a^T [C, F, F] of each class, from features [n, F] and labels [n]."""
    A, members = features.double(), one_hot(labels, classes).double()
    return {
        "weight": members.sum(0),
        "sum": members.T @ A,
        "outer": torch.stack([(A * member[:, None]).T @ A for member in members.T]),
    }


def sum_products(features: Tensor, labels: Tensor, classes: int) -> dict[str, Tensor]:
    """Return A^T A [F, F] and A^T Y [F, C] of features A [n, F] and one-hot labels Y, for `fit_ridge`."""
    A = features.double()
    return {"gram": A.T @ A, "cross": A.T @ one_hot(labels, classes).double()}


def fit_nearest_mean(counts: Tensor, sums: Tensor) -> LinearHead:
    """Return the head whose largest logit is the class with the nearest mean, from counts [C] and sums [C, F].

    w_c = mu_c, b_c = -||mu_c||^2 / 2 (Snell et al. 2017, section 2.4, halved). A class without samples never answers.
    """
    present = counts > 0
    means = sums.double() / torch.where(present, counts.double(), torch.inf)[:, None]
    return _head(means, -means.square().sum(1) / 2, present)


def fit_ridge(gram: Tensor, cross: Tensor, ridge: float) -> LinearHead:
    """Return W = ((G + lambda I)^-1 A^T Y)^T from G = A^T A [F, F] and A^T Y [F, C]; the bias is 0.

    It minimises ||A W^T - Y||^2 + lambda ||W||^2 over all samples that the sums were made of; lambda is above 0 where
    these do not span all features. A class without samples never answers. Where rounding, or the fixed point of masks,
    has left G with eigenvalues below 0 that lambda does not outweigh, they are set to 0.
    """
    gram, cross = gram.double(), cross.double()
    root, failed = torch.linalg.cholesky_ex(gram + ridge * torch.eye(len(gram), dtype=gram.dtype, device=gram.device))
    # Without eigenvalues below 0 no pivot is less than lambda.
    if failed or (root.diagonal().square() < ridge / 2).any():
        values, vectors = torch.linalg.eigh(gram)
        weight = (vectors @ (vectors.T @ cross / (values.clamp(min=0) + ridge)[:, None])).T
    else:
        weight = torch.cholesky_solve(cross, root).T
    present = cross.any(0) if len(cross) else torch.zeros(cross.shape[1], dtype=torch.bool, device=cross.device)
    return _head(weight, torch.zeros_like(weight[:, 0]), present)


def project_positive(gram: Tensor) -> Tensor:
    """Return the nearest symmetric matrix [F, F] without eigenvalues below 0, for one that noise has distorted."""
    values, vectors = torch.linalg.eigh((gram + gram.T).double() / 2)
    return (vectors * values.clamp(min=0)) @ vectors.T


def weigh_groups(counts: Tensor, groups: Tensor) -> tuple[Tensor, Tensor]:
    """Return a [C] and b [C], with which A^T A is estimated from sums over groups of each class's samples.

    Its expectation over random groups is that of sum_c (a_c sum_k s_kc s_kc^T / n_kc + b_c S_c S_c^T), s_kc the sum of
    the n_kc samples in a class's k-th group and S_c that of all N_c in its K_c groups, with a = (N - 1) / (K - 1) and
    b = -(N - K) / ((K - 1) N) (STSA-E). Groups without samples of a class do not count among its K_c. A class with one
    group leaves nothing to estimate its spread from: a = 0 and b = 1 / N are those of samples that are all at the mean.
    """
    between = (groups - 1).clamp(min=1)
    spread = groups > 1
    a = torch.where(spread, (counts - 1) / between, torch.zeros_like(counts))
    b = torch.where(spread, (groups - counts) / (between * counts.clamp(min=1)), 1 / counts.clamp(min=1))
    return a, torch.where(counts > 0, b, torch.zeros_like(b))


def choose_ridge(gram: Tensor, cross: Tensor, held_out: Mapping[str, Tensor]) -> float | None:
    """Return lambda of 10^-8, 10^-7 to 10^8 with which `fit_ridge` has the least squared error on held-out samples.

    The sums gram [F, F] and cross [F, C] are of the fitted samples; `held_out` holds those of the others, whose error
    is tr(W G W^T) - 2 tr(W A^T Y) + n. None where there are no others, or where these are all.
    """
    if not (gram.any() and held_out["gram"].any()):
        return None
    values, vectors = torch.linalg.eigh(gram.double())
    # In the basis of the eigenvectors W^T is (values + lambda)^-1 V^T A^T Y.
    target, G, right = (vectors.T @ cross, vectors.T @ held_out["gram"] @ vectors, vectors.T @ held_out["cross"])
    ridges = 10.0 ** torch.arange(-8, 9, dtype=torch.float64)
    solutions = [target / (values.clamp(min=0) + ridge)[:, None] for ridge in ridges]
    errors = [float((W * (G @ W)).sum() - 2 * (W * right).sum()) for W in solutions]
    return float(ridges[errors.index(min(errors))])


def fit_discriminant(counts: Tensor, means: Tensor, scatter: Tensor, shrink: float = 0.01) -> LinearHead:
    """Return w_c = Sigma^-1 mu_c and b_c = -mu_c^T Sigma^-1 mu_c / 2, the best head for classes N(mu_c, Sigma).

    Sigma = S / n + shrink tr(S) / (n F) I, from counts [C], means [C, F] and the scatter S [F, F] within classes. A
    class without samples never answers.
    """
    Sigma = scatter.double() / counts.sum().clamp(min=1)
    Sigma = Sigma + (shrink * Sigma.trace() / len(Sigma)) * torch.eye(len(Sigma), dtype=Sigma.dtype)
    weight = torch.linalg.solve(Sigma, means.double().T).T
    return _head(weight, -(weight * means).sum(1) / 2, counts > 0)


def sum_drift(means: Tensor, spread: Tensor, before: Tensor, after: Tensor) -> dict[str, Tensor]:
    """Return sums w_c = sum_i w_ic and sum_i w_ic (after_i - before_i) of features [n, F], for means [C, F].

    w_ic = exp(-||before_i - mu_c||^2 / (2 spread)): a mean's drift is that of the samples near it (Yu et al. 2020,
    eq. 10). spread is the mean squared distance of a class's samples from its mean.
    """
    origin = before.double()
    near = torch.exp(-torch.cdist(means, origin).square() / (2 * spread))
    return {"weight": near.sum(1), "sum": near @ (after.double() - origin)}


def fit_gaussians(counts: Tensor, sums: Tensor, outers: Tensor) -> ClassGaussians:
    """Return mu = s / n and Sigma = (S - n mu mu^T) / (n - 1), from n [C], s [C, F] and S [C, F, F]."""
    counts, sums, outers = counts.double(), sums.double(), outers.double()
    means = sums / torch.where(counts > 0, counts, torch.inf)[:, None]
    scatter = outers - counts[:, None, None] * means[:, :, None] * means[:, None, :]
    degrees = torch.where(counts > 1, counts - 1, torch.inf)
    return ClassGaussians(means, scatter / degrees[:, None, None], counts)


def draw_features(gaussians: ClassGaussians, samples: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Draw features [n, F] and labels [n]: so many samples of each class that has any.

    A covariance's root is that of its eigenvalues above 0, so that rounding, or few samples, need no damping.
    """
    present = gaussians.counts.nonzero().flatten()
    means, (values, vectors) = gaussians.means[present], torch.linalg.eigh(gaussians.covariances[present])
    roots = vectors * values.clamp(min=0).sqrt()[:, None, :]
    noise = draw_noise(means[:, None].expand(-1, samples, -1), 1.0, generator)
    features = means[:, None] + noise @ roots.mT
    return features.flatten(0, 1), present.repeat_interleave(samples)


def train_head(
    start: LinearHead, features: Tensor, labels: Tensor, decay: float = 1e-4, iterations: int = 100
) -> LinearHead:
    """Return the head of least cross entropy on features [n, F] and labels [n], plus decay / 2 ||W||^2, by L-BFGS.

    From `start` on; classes without samples keep their rows of it.
    """
    weight, bias = (tensor.double().clone().requires_grad_() for tensor in start)
    present = torch.zeros_like(bias, dtype=torch.bool).index_fill(0, labels.unique(), True)
    columns = present.cumsum(0)[labels] - 1
    optimiser = torch.optim.LBFGS([weight, bias], max_iter=iterations, line_search_fn="strong_wolfe")

    def loss() -> Tensor:
        optimiser.zero_grad()
        of_present = weight[present]
        total = cross_entropy(features.double() @ of_present.T + bias[present], columns)
        total = total + decay / 2 * of_present.square().sum()
        total.backward()
        return total

    optimiser.step(lambda: float(loss().detach()))
    return LinearHead(weight.detach().float(), bias.detach().float())


def _head(weight: Tensor, bias: Tensor, present: Tensor) -> LinearHead:
    """Return the head of these rows, of which those of classes without samples never answer."""
    rows = torch.where(present[:, None], weight, torch.zeros_like(weight))
    return LinearHead(rows.float(), torch.where(present, bias, torch.full_like(bias, NEVER)).float())
