"""Losses over exemplars against the worked numbers of their papers' equations and NumPy."""

import numpy as np
import pytest
import torch
from scipy.special import expit
from torch import Tensor, tensor

from fclmodels.numerics import exemplar_losses as losses


def draw(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def test_icarls_worked_number() -> None:
    z, teacher = tensor([[1.0, -0.5, 0.3, -1.2]]), tensor([[0.8, -0.2]])
    loss = losses.binary_distillation_loss(z, tensor([3]), tensor([0, 1]), teacher)
    assert float(loss) == pytest.approx(0.910021, abs=1e-6)


def test_targets_of_old_columns_are_the_teachers_for_all_samples() -> None:
    """Also an exemplar's own label."""
    z, teacher, labels, old = draw(5, 4), draw(5, 2, seed=1), tensor([0, 2, 3, 1, 2]), tensor([2, 0])
    targets = np.eye(4)[labels.numpy()]
    targets[:, [2, 0]] = expit(teacher.double().numpy())
    p = expit(z.double().numpy())
    expected = -(targets * np.log(p) + (1 - targets) * np.log(1 - p)).mean()
    assert float(losses.binary_distillation_loss(z, labels, old, teacher)) == pytest.approx(expected, rel=1e-6)
