"""Losses over exemplars against the worked numbers of their papers' equations and NumPy."""

import numpy as np
import pytest
import torch
from scipy.optimize import minimize
from scipy.special import expit, log_softmax, softmax
from torch import Tensor, tensor

from fclmodels.numerics import exemplar_losses as losses
from fclmodels.numerics.gradient_compensation import weigh_cross_entropy


def draw(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def test_icarls_worked_number() -> None:
    z, teacher = tensor([[1.0, -0.5, 0.3, -1.2]]), tensor([[0.8, -0.2]])
    loss = weigh_cross_entropy(z, losses.distil_targets(tensor([3]), 4, tensor([0, 1]), teacher))
    assert float(loss) == pytest.approx(0.910021, abs=1e-6)


def test_targets_of_old_columns_are_the_teachers_for_all_samples() -> None:
    """Also an exemplar's own label."""
    z, teacher, labels, old = draw(5, 4), draw(5, 2, seed=1), tensor([0, 2, 3, 1, 2]), tensor([2, 0])
    targets = np.eye(4)[labels.numpy()]
    targets[:, [2, 0]] = expit(teacher.double().numpy())
    p = expit(z.double().numpy())
    expected = -(targets * np.log(p) + (1 - targets) * np.log(1 - p)).mean()
    assert float(weigh_cross_entropy(z, losses.distil_targets(labels, 4, old, teacher))) == pytest.approx(
        expected, rel=1e-6
    )


GROUPS = [tensor([0, 1]), tensor([2, 3])]


def test_ss_ils_worked_numbers() -> None:
    z = tensor([[0.2, -0.1, 0.5, 0.3, 1.0, 0.4], [0.9, 0.6, -0.2, 0.1, 0.7, -0.3]])
    teacher = tensor([[0.1, 0.0, 0.4, 0.2], [1.0, 0.5, -0.1, 0.0]])
    assert float(losses.separated_cross_entropy(z, tensor([4, 1]), tensor([4, 5]))) == pytest.approx(0.831472, abs=1e-6)
    assert float(losses.distil_by_task(z, teacher, GROUPS, 2.0)) == pytest.approx(0.007461, abs=1e-6)


def test_each_side_by_itself_in_numpy() -> None:
    z, labels, new = draw(6, 5), tensor([4, 1, 0, 2, 3, 1]), tensor([3, 1])
    sides = [[1, 3], [0, 2, 4]]
    expected = [
        -log_softmax(row[side])[side.index(label)]
        for row, label in zip(z.double().numpy(), labels.tolist(), strict=True)
        for side in sides
        if label in side
    ]
    assert float(losses.separated_cross_entropy(z, labels, new)) == pytest.approx(np.mean(expected), rel=1e-6)


def test_what_is_distilled_task_by_task_is_zero_for_the_teacher_and_without_groups() -> None:
    z = draw(4, 6)
    assert float(losses.distil_by_task(z, z[:, :4], GROUPS, 2.0)) == pytest.approx(0, abs=1e-6)
    assert float(losses.distil_by_task(z, z + 1, [], 2.0)) == 0


def test_bics_worked_numbers() -> None:
    z, teacher, y = tensor([[1.0, -0.5, 0.3, 2.0]]), tensor([[0.8, -0.2]]), tensor([2])
    distance = losses.soft_cross_entropy(z[:, :2], teacher, 2.0)
    right = torch.nn.functional.cross_entropy(z, y)
    assert float(distance) == pytest.approx(0.670027, abs=1e-6)
    assert float(right) == pytest.approx(2.190203, abs=1e-6)
    assert float((distance + right) / 2) == pytest.approx(1.430115, abs=1e-6)
    corrected = losses.correct_logits(z, tensor([2, 3]), tensor(0.8), tensor(-0.1))
    assert corrected[0].tolist() == pytest.approx([1, -0.5, 0.14, 1.5])
    assert float(torch.nn.functional.cross_entropy(corrected, y)) == pytest.approx(2.052410, abs=1e-6)


def test_a_correction_by_one_and_zero_changes_no_bit() -> None:
    z = draw(5, 4)
    assert torch.equal(losses.correct_logits(z, tensor([1, 3]), tensor(1.0), tensor(0.0)), z)


def test_the_fitted_correction_is_that_of_least_cross_entropy() -> None:
    z, labels, new = 2 * draw(200, 5), tensor([0, 1, 2, 3, 4]).repeat(40), tensor([3, 4])
    z[:, new] += 1.5

    def loss(correction: np.ndarray) -> float:
        corrected = z.double().numpy().copy()
        corrected[:, new] = correction[0] * corrected[:, new] + correction[1]
        return -np.log(softmax(corrected, axis=1)[np.arange(200), labels.numpy()]).mean()

    best = minimize(loss, [1.0, 0.0], tol=1e-10).x
    scale, shift = losses.fit_correction(z, labels, new, 2000, 0.05)
    assert [float(scale), float(shift)] == pytest.approx(best, abs=1e-3)
