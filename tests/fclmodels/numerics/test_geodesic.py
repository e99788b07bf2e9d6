"""GeoDL's kernel: the worked number, the integral by quadrature, and limits; DDE's losses likewise."""

import numpy as np
import pytest
import torch
from torch import Tensor, tensor
from torch.nn.functional import cosine_similarity, cross_entropy

from fclmodels.numerics.causal_effects import find_neighbours, remove_direction, shared_cross_entropy
from fclmodels.numerics.geodesic import Geodesic, find_geodesic, find_subspace, geodesic_loss


def draw(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def to_matrix(G: Geodesic) -> np.ndarray:
    unit = torch.eye(len(G.A), dtype=torch.float64)
    return torch.stack([G.multiply(row.expand_as(unit), unit) for row in unit]).numpy()


def test_the_worked_number() -> None:
    P = tensor([[1.0], [0], [0]], dtype=torch.float64)
    Q = tensor([[0.5], [0.75**0.5], [0]], dtype=torch.float64)
    G = find_geodesic(P, Q)
    expected = np.zeros((3, 3))
    expected[:2, :2] = [[0.706748, 0.358099], [0.358099, 0.293252]]
    assert to_matrix(G) == pytest.approx(expected, abs=1e-6)
    old, new = tensor([[1.0, 1, 0]], dtype=torch.float64), tensor([[1.0, 0, 1]], dtype=torch.float64)
    cosine = G.multiply(old, new) / (G.multiply(old, old) * G.multiply(new, new)).sqrt()
    assert float(1 - cosine) == pytest.approx(0.033123, abs=1e-6)


@pytest.mark.parametrize("k", [1, 3])
def test_it_is_the_integral_along_the_geodesic(k: int) -> None:
    """By the matrix logarithm's path and Simpson's rule."""
    P, Q = (torch.linalg.qr(draw(7, k, seed=seed)).Q for seed in (1, 2))
    U, cosines, Vh = np.linalg.svd(P.numpy().T @ Q.numpy())
    t = np.arccos(cosines.clip(-1, 1))
    A = P.numpy() @ U
    R = (Q.numpy() @ Vh.T - A * np.cos(t)) / np.sin(t)
    steps = np.linspace(0, 1, 201)
    weights = np.array([1, *[4, 2] * 99, 4, 1]) / 600
    paths = [A * np.cos(t * nu) + R * np.sin(t * nu) for nu in steps]
    expected = sum(w * path @ path.T for w, path in zip(weights, paths, strict=True))
    assert to_matrix(find_geodesic(P, Q)) == pytest.approx(expected, abs=1e-7)


def test_one_subspace_that_holds_both_is_cosine_distillation() -> None:
    features = draw(6, 5)
    G = find_geodesic(*[torch.eye(5, dtype=torch.float64)] * 2)
    assert to_matrix(G) == pytest.approx(np.eye(5), abs=1e-9)
    targets = features @ torch.diag(tensor([1.0, 2, 3, 4, 5], dtype=torch.float64))
    many = torch.cat([features] * 4), torch.cat([targets] * 4)
    expected = (1 - cosine_similarity(*many)).mean()
    assert float(geodesic_loss(*many)) == pytest.approx(float(expected), abs=1e-6)


def test_the_teacher_itself_has_no_distance_and_few_samples_have_no_subspace() -> None:
    features = draw(8, 5).float()
    assert float(geodesic_loss(features, features)) == pytest.approx(0, abs=1e-6)
    assert float(geodesic_loss(features[:2], features[2:4])) == 0
    assert float(geodesic_loss(torch.zeros(8, 5), features)) == 0


def test_gradients_are_finite_where_features_coincide() -> None:
    features = draw(8, 20).float().relu().requires_grad_()
    geodesic_loss(features, draw(8, 20).float().relu()).backward()
    assert features.grad.isfinite().all()
    assert features.grad.any()


def test_a_subspace_has_no_directions_of_rounding() -> None:
    low = draw(10, 2) @ draw(2, 6, seed=1)
    assert find_subspace(low, 8).shape == (6, 2)


def test_ddes_worked_numbers() -> None:
    z, of_others = tensor([[1.0, 0.5, -0.2]]), tensor([[[0.2, 0.9, 0.1], [0.0, 0.4, 0.8]]])
    label, counts = tensor([1]), torch.ones(1, 2, dtype=torch.bool)
    loss = shared_cross_entropy(z.softmax(1), of_others.softmax(2), counts, label)
    assert float(loss) == pytest.approx(1.003752, abs=1e-6)
    assert float(cross_entropy(z, label)) == pytest.approx(1.145911, abs=1e-6)
    weight, x, h = tensor([[1.0, 0], [1, 2], [-1, 1]]), tensor([2.0, 1]), tensor([1.0, 1])
    unit = torch.nn.functional.normalize(weight)
    direct = 2 * unit @ x / x.norm()
    assert direct.tolist() == pytest.approx([1.788854, 1.6, -0.632456], abs=1e-6)
    without = 2 * remove_direction(unit, h, 0.5) @ x / x.norm()
    assert without.tolist() == pytest.approx([1.118034, 0.7, -0.632456], abs=1e-6)


def test_neighbours_that_are_the_sample_itself_make_it_cross_entropy() -> None:
    z, labels = draw(4, 3), tensor([0, 1, 2, 1])
    p = z.softmax(1)
    counts = torch.ones(4, 2, dtype=torch.bool)
    loss = shared_cross_entropy(p, p[:, None].expand(-1, 2, -1), counts, labels)
    assert float(loss) == pytest.approx(float(cross_entropy(z, labels)))
    assert float(shared_cross_entropy(p, 0 * p[:, None], ~counts[:, :1], labels)) == pytest.approx(float(loss))


def test_no_share_of_a_direction_changes_no_bit_and_all_of_it_removes_it() -> None:
    weight, h = draw(3, 5), draw(5, seed=1)
    assert torch.equal(remove_direction(weight, h, 0.0), weight)
    assert (remove_direction(weight, h, 1.0) @ h).abs().max() < 1e-12


def test_the_nearest_others_by_cosine() -> None:
    features, others = draw(3, 4), draw(9, 4, seed=1)
    others[2] = 3 * features[0]
    places, counts = find_neighbours(features, others, 4)
    x, y = (v.numpy() / np.linalg.norm(v.numpy(), axis=1, keepdims=True) for v in (features, others))
    similarity = x @ y.T
    similarity[0, 2] = -2
    assert places.tolist() == np.argsort(-similarity, axis=1)[:, :4].tolist()
    assert counts.all()
    assert find_neighbours(features[:1], others[2:3], 4)[1].tolist() == [[False]]
