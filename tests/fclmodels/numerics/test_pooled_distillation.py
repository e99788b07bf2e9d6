"""PODNet's and AFC's distances and the NCA loss: the worked numbers, and NumPy.

The releases' own functions give them too: pod and nca of arthurdouillard/incremental_learning.pytorch at c09fc54, pod
of kminsoo/AFC at 94cecc9, run on these inputs.
"""

import numpy as np
import pytest
import torch
from torch import Tensor, tensor

from fclmodels.numerics import pooled_distillation as pooled
from fclmodels.numerics.cosine_proxies import CosineProxies, draw_proxies, nca_loss, pool_similarities


def draw(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def test_podnets_worked_numbers() -> None:
    maps = tensor([[[[1.0, 2.0], [0.0, 1.0]]]])
    ones = torch.ones(1, 1, 2, 2)
    assert float(pooled.measure_pooled_distance(maps, ones)) == pytest.approx(0.579568, abs=1e-6)
    assert float(pooled.measure_angle(maps.flatten(1), ones.flatten(1))) == pytest.approx(0.183503, abs=1e-6)


def test_pooled_outputs_in_numpy() -> None:
    own, other = draw(3, 4, 5, 6), draw(3, 4, 5, 6, seed=1)

    def pool(maps: Tensor) -> np.ndarray:
        squares = maps.double().numpy() ** 2
        vector = np.concatenate([squares.sum(3).reshape(3, -1), squares.sum(2).reshape(3, -1)], axis=1)
        return vector / np.linalg.norm(vector, axis=1, keepdims=True)

    expected = np.linalg.norm(pool(own) - pool(other), axis=1).mean()
    assert float(pooled.measure_pooled_distance(own, other)) == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("shape", [(3, 4, 5, 6), (3, 7, 4), (3, 8)])
def test_equal_outputs_have_no_distance(shape: tuple[int, ...]) -> None:
    """Maps, tokens and vectors."""
    output = draw(*shape)
    assert pooled.measure_pooled_distance(output, output) == 0
    assert pooled.measure_channel_distance(output, output, None) == 0
    assert pooled.measure_pooled_distance(output, draw(*shape, seed=1)) > 0
    assert pooled.measure_channel_distance(output, draw(*shape, seed=1), None) > 0


def test_afcs_worked_numbers() -> None:
    gradients = tensor([[[[1.0, 0], [0, 2]], [[0.5, 0.5], [0, 0]]], [[[0, 1], [0, 0]], [[1, 0], [0, 0]]]])
    importance = pooled.sum_importance(gradients)
    assert (importance / 2).tolist() == [3, 0.75]
    importance = (importance / importance.mean()).float()
    assert importance.tolist() == pytest.approx([1.6, 0.4])
    own = tensor([[[[1.0, 2], [0, 1]], [[1, 0], [1, 1]]]])
    other = tensor([[[[1.0, 1], [1, 1]], [[1, 1], [1, 0]]]])
    assert float(pooled.measure_channel_distance(own, other, importance)) == pytest.approx(0.775593, abs=1e-6)
    apart = [float(pooled.measure_channel_distance(own[:, [c]], other[:, [c]], None)) for c in (0, 1)]
    assert apart == pytest.approx([0.765367, 0.816497], abs=1e-6)


def test_equal_importance_is_none() -> None:
    own, other = draw(3, 4, 5, 6), draw(3, 4, 5, 6, seed=1)
    weighed = pooled.measure_channel_distance(own, other, torch.ones(4))
    assert torch.equal(weighed, pooled.measure_channel_distance(own, other, None))


def test_the_papers_and_the_releases_nca() -> None:
    scores, label, scale = tensor([[0.5, 0.2, -0.1]]), tensor([1]), tensor(1.0)
    assert float(nca_loss(scores, label, scale)) == pytest.approx(1.337488, abs=1e-6)
    assert float(nca_loss(scores, label, scale, "release")) == pytest.approx(1.235627, abs=1e-6)
    assert nca_loss(tensor([[-0.5, 1.0]]), label, scale) == 0  # beyond the margin: the hinge


def test_scores_of_proxies() -> None:
    assert float(pool_similarities(tensor([[[0.9, 0.5]]]))) == pytest.approx(0.739475, abs=1e-6)
    proxies, features = CosineProxies(3, 4, 5), draw(6, 5)
    theta, h = (x.detach().double().numpy() for x in (proxies.weight, features))
    s = np.einsum(
        "bf,ckf->bck", h / np.linalg.norm(h, axis=1)[:, None], theta / np.linalg.norm(theta, axis=2)[..., None]
    )
    share = np.exp(s) / np.exp(s).sum(2, keepdims=True)
    assert proxies(features).detach().numpy() == pytest.approx((share * s).sum(2), rel=1e-5, abs=1e-6)
    scores = proxies(features, frozen=1, classes=2)
    assert scores.shape == (6, 2)
    scores.sum().backward()
    assert [bool(row.any()) for row in proxies.weight.grad] == [False, True, False]


def test_drawn_proxies_lie_about_their_classes() -> None:
    means, variances = draw(2, 5).double(), torch.full((2, 5), 0.01, dtype=torch.float64)
    drawn = draw_proxies(means, variances, 2000, torch.Generator().manual_seed(0))
    assert torch.allclose(drawn.norm(dim=2), torch.ones(2, 2000))
    directions = torch.nn.functional.normalize(means)
    assert (torch.nn.functional.normalize(drawn.mean(1)).double() * directions).sum(1).min() > 0.999
    assert torch.equal(draw_proxies(means, 0 * variances, 3, torch.Generator())[0, 2], directions[0].float())
