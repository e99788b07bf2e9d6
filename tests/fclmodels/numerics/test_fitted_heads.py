"""Heads fitted to sums: ridge against least squares, nearest mean by distances, Gaussians against NumPy's moments."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scipy.linalg import lstsq
from scipy.stats import multivariate_normal
from torch import Tensor
from torch.nn.functional import cross_entropy

from fclmodels.numerics.fitted_heads import (
    NEVER,
    LinearHead,
    draw_features,
    fit_discriminant,
    fit_gaussians,
    fit_nearest_mean,
    fit_ridge,
    sum_classes,
    sum_drift,
    sum_products,
    train_head,
)
from fclmodels.numerics.fixed_point import decode, encode


def data(samples: int = 60, features: int = 5, classes: int = 3, seed: int = 0) -> tuple[Tensor, Tensor]:
    random = torch.Generator().manual_seed(seed)
    labels = torch.randint(classes, (samples,), generator=random)
    centres = 2 * torch.randn(classes, features, generator=random)
    return centres[labels] + torch.randn(samples, features, generator=random), labels


def add(parts: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    return {name: sum(part[name] for part in parts) for name in parts[0]}


@pytest.mark.parametrize("ridge", [1e-6, 0.1, 10.0])
def test_ridge_is_least_squares_with_rows_of_the_penalty_below(ridge: float) -> None:
    A, labels = data()
    mine = fit_ridge(**sum_products(A, labels, 3), ridge=ridge)
    below = np.sqrt(ridge) * np.eye(5)
    Y = np.vstack([np.eye(3)[labels.numpy()], np.zeros((5, 3))])
    expected = lstsq(np.vstack([A.double().numpy(), below]), Y)[0].T
    np.testing.assert_allclose(mine.weight, expected, rtol=1e-4, atol=1e-6)
    assert not mine.bias.any()


def test_without_a_penalty_it_is_numpys_least_squares() -> None:
    A, labels = data()
    expected = np.linalg.lstsq(A.double().numpy(), np.eye(3)[labels.numpy()], rcond=None)[0].T
    np.testing.assert_allclose(
        fit_ridge(**sum_products(A, labels, 3), ridge=0.0).weight, expected, rtol=1e-4, atol=1e-6
    )


@pytest.mark.parametrize("limit", [1e9, 1e12])
def test_a_lambda_below_the_resolution_of_masks_is_no_crash(limit: float) -> None:
    """Fewer samples than random features, whose gram fixed point leaves with eigenvalues below 0: as those at 0."""
    A, labels = data(samples=40, features=120)
    sums = {
        name: decode(encode(total, limit, 10), torch.float64, limit, 10)
        for name, total in sum_products(A.relu(), labels, 3).items()
    }
    values, vectors = np.linalg.eigh(sums["gram"].numpy())
    assert values.min() < -1e-9
    right = vectors @ np.diag(1 / (values.clip(0) + 1e-9)) @ vectors.T @ sums["cross"].numpy()
    mine = fit_ridge(**sums, ridge=1e-9).weight.double()
    np.testing.assert_allclose(mine.T.numpy(), right, atol=1e-3 * np.abs(right).max())


def test_sums_over_clients_are_those_of_all_samples() -> None:
    A, labels = data()
    for add_up in (sum_products, sum_classes):
        of_clients = add([add_up(a, own, 3) for a, own in zip(A.split(13), labels.split(13), strict=True)])
        for name, total in add_up(A, labels, 3).items():
            torch.testing.assert_close(of_clients[name], total)


def test_the_nearest_mean_answers() -> None:
    A, labels = data()
    sums = sum_classes(A, labels, 3)
    head = fit_nearest_mean(sums["weight"], sums["sum"])
    means = torch.stack([A[labels == label].mean(0) for label in range(3)])
    x, _ = data(200, seed=5)
    assert torch.equal((x @ head.weight.T + head.bias).argmax(1), torch.cdist(x, means).argmin(1))


@pytest.mark.parametrize("kind", ["nearest mean", "ridge"])
def test_a_class_without_samples_never_answers(kind: str) -> None:
    A, labels = data()
    if kind == "ridge":
        head = fit_ridge(**sum_products(A, labels, 4), ridge=0.1)
    else:
        sums = sum_classes(A, labels, 4)
        head = fit_nearest_mean(sums["weight"], sums["sum"])
    assert head.bias[3] == NEVER
    assert not head.weight[3].any()
    assert (100 * A @ head.weight.T + head.bias).argmax(1).max() < 3


def test_gaussians_have_numpys_means_and_covariances() -> None:
    A, labels = data()
    sums = sum_classes(A, labels, 3)
    gaussians = fit_gaussians(sums["weight"], sums["sum"], sums["outer"])
    for label in range(3):
        of_class = A[labels == label].double().numpy()
        np.testing.assert_allclose(gaussians.means[label], of_class.mean(0))
        np.testing.assert_allclose(gaussians.covariances[label], np.cov(of_class.T), rtol=1e-9, atol=1e-9)


def test_a_class_with_one_sample_has_no_spread_and_one_without_any_is_not_drawn() -> None:
    A, labels = torch.ones(4, 2), torch.tensor([0, 0, 0, 2])
    sums = sum_classes(A, labels, 3)
    gaussians = fit_gaussians(sums["weight"], sums["sum"], sums["outer"])
    assert not gaussians.covariances[2].any()
    features, draws = draw_features(gaussians, 4, torch.Generator().manual_seed(0))
    assert draws.tolist() == [0, 0, 0, 0, 2, 2, 2, 2]
    torch.testing.assert_close(features, torch.ones(8, 2, dtype=torch.float64))


def test_drawn_features_have_the_moments_that_they_were_drawn_from() -> None:
    A, labels = data(40)
    sums = sum_classes(A, labels, 3)
    gaussians = fit_gaussians(sums["weight"], sums["sum"], sums["outer"])
    features, draws = draw_features(gaussians, 20_000, torch.Generator().manual_seed(1))
    again = sum_classes(features, draws, 3)
    refitted = fit_gaussians(again["weight"], again["sum"], again["outer"])
    torch.testing.assert_close(refitted.means, gaussians.means, rtol=0, atol=0.05)
    torch.testing.assert_close(refitted.covariances, gaussians.covariances, rtol=0, atol=0.1)


def test_fewer_samples_than_features_span_no_direction_that_they_did_not_have() -> None:
    A = torch.randn(3, 6, generator=torch.Generator().manual_seed(2))
    sums = sum_classes(A, torch.zeros(3, dtype=torch.int64), 1)
    features, _ = draw_features(fit_gaussians(**rename(sums)), 50, torch.Generator().manual_seed(3))
    deviations = features - A.double().mean(0)
    basis = torch.linalg.svd(A.double() - A.double().mean(0), full_matrices=False).Vh[:2]
    torch.testing.assert_close(deviations @ basis.T @ basis, deviations, rtol=0, atol=1e-6)


def rename(sums: dict[str, Tensor]) -> dict[str, Tensor]:
    return {"counts": sums["weight"], "sums": sums["sum"], "outers": sums["outer"]}


def test_a_trained_head_is_where_the_gradient_is_zero_and_the_rest_stays() -> None:
    A, labels = data(classes=3)
    start = LinearHead(torch.full((4, 5), 0.5), torch.full((4,), -7.0))
    head = train_head(start, A, labels, decay=0.01, iterations=500)
    assert torch.equal(head.weight[3], start.weight[3])
    assert head.bias[3] == -7
    weight, bias = (t[:3].double().requires_grad_() for t in head)
    loss = cross_entropy(A.double() @ weight.T + bias, labels) + 0.005 * weight.square().sum()
    for gradient in torch.autograd.grad(loss, [weight, bias]):
        assert gradient.abs().max() < 1e-4


def test_a_head_trained_on_drawn_features_knows_the_real_ones() -> None:
    A, labels = data(300)
    sums = sum_classes(A, labels, 3)
    features, draws = draw_features(fit_gaussians(**rename(sums)), 100, torch.Generator().manual_seed(4))
    head = train_head(LinearHead(torch.zeros(3, 5), torch.zeros(3)), features, draws)
    assert ((A @ head.weight.T + head.bias).argmax(1) == labels).double().mean() > 0.85


def test_the_discriminant_is_the_best_head_for_classes_of_one_covariance() -> None:
    """Within its own Gaussians' noise it answers as Bayes' rule does, by scipy's densities."""
    random = np.random.default_rng(0)
    means, A = random.normal(size=(4, 3)), random.normal(size=(3, 3))
    Sigma = A @ A.T + np.eye(3)
    head = fit_discriminant(torch.full((4,), 50.0), torch.from_numpy(means), torch.from_numpy(200 * Sigma), shrink=0)
    x = random.normal(size=(200, 3)) * 2
    logits = x @ head.weight.numpy().T + head.bias.numpy()
    densities = np.stack([multivariate_normal(mean, Sigma).logpdf(x) for mean in means], axis=1)
    np.testing.assert_allclose(logits - logits[:, :1], densities - densities[:, :1], rtol=1e-4, atol=1e-3)


def test_a_class_without_samples_is_not_the_discriminants_answer() -> None:
    head = fit_discriminant(torch.tensor([5.0, 0.0]), torch.zeros(2, 3), torch.eye(3))
    assert head.bias[1] < -1e8
    assert head.weight.isfinite().all()


@given(st.integers(1, 5), st.integers(1, 20), st.integers(0, 2**16))
def test_a_drift_that_all_samples_share_is_every_means(classes: int, n: int, seed: int) -> None:
    random = np.random.default_rng(seed)
    means, before, shift = random.normal(size=(classes, 3)), random.normal(size=(n, 3)), random.normal(size=3)
    sums = sum_drift(*(torch.from_numpy(x) for x in (means, np.array(9.0), before, before + shift)))
    drift = (sums["sum"] / sums["weight"][:, None]).numpy()
    np.testing.assert_allclose(drift, np.tile(shift, (classes, 1)), atol=1e-9)


def test_a_mean_drifts_with_the_samples_near_it() -> None:
    means, before = torch.tensor([[0.0], [10.0]]).double(), torch.tensor([[0.1], [9.9]])
    sums = sum_drift(means, torch.tensor(1.0).double(), before, before + torch.tensor([[1.0], [-2.0]]))
    np.testing.assert_allclose(sums["sum"] / sums["weight"][:, None], [[1.0], [-2.0]], atol=1e-6)
