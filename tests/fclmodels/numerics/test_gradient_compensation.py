"""Gradient compensation against worked numbers of GLFC's and LGA's equations, which their releases' functions give too.

conditionWang/FCIL at 11e161a and JiahuaDong/LGA: efficient_old_class_weight and _compute_loss, run on these inputs.
"""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import tensor

from fclmodels.numerics.exemplar_losses import distil_targets
from fclmodels.numerics.gradient_compensation import compensate, measure_gaps, weigh_cross_entropy

Z = tensor([[1, -1, 0.5], [0.2, 0.3, -0.4], [-0.5, 1.5, 0], [0.1, 0, 2]])
Y = tensor([0, 2, 1, 2])
TEACHER = tensor([[0.9, -0.8], [0, 0.1], [-0.3, 1.2], [0.2, 0.1]])
NONE = Y[:0]


def test_glfcs_weights_and_losses() -> None:
    weights = compensate(measure_gaps(Z, Y), Y < 2)
    assert weights.tolist() == pytest.approx([1.191675, 1.667908, 0.808325, 0.332092], abs=1e-6)
    right = weigh_cross_entropy(Z, distil_targets(Y, 3, NONE, None), weights)
    relations = weigh_cross_entropy(Z, distil_targets(Y, 3, tensor([0, 1]), TEACHER))
    assert float(right) == pytest.approx(0.651023, abs=1e-6)
    assert float(relations) == pytest.approx(0.662151, abs=1e-6)
    assert float(right + relations) / 2 == pytest.approx(0.656587, abs=1e-6)


def test_lgas_gaps_and_its_weights_task_by_task() -> None:
    gaps = measure_gaps(Z, Y) ** (2 / 3)
    assert gaps.tolist() == pytest.approx([0.41665, 0.710341, 0.321655, 0.24221], abs=1e-6)
    assert compensate(gaps, Y).tolist() == pytest.approx([1, 1.49145, 1, 0.50855], abs=1e-5)


def test_lgas_losses_by_the_releases_weights() -> None:
    weights = tensor([2.128667, 1.49145, 0.871333, 0.50855])
    assert float(weigh_cross_entropy(Z, distil_targets(Y, 3, NONE, None), weights)) == pytest.approx(0.768468, abs=1e-5)
    targets = distil_targets(Y, 3, tensor([0, 1]), TEACHER)
    assert float(weigh_cross_entropy(Z, targets, weights)) == pytest.approx(0.881066, abs=1e-5)


@given(st.lists(st.tuples(st.floats(0.01, 1), st.integers(0, 3)), min_size=1, max_size=20))
def test_each_group_has_the_mean_weight_one_and_equal_gaps_all_weigh_one(samples: list[tuple[float, int]]) -> None:
    gaps, groups = tensor([g for g, _ in samples], dtype=torch.float64), tensor([group for _, group in samples])
    weights = compensate(gaps, groups)
    for group in groups.unique():
        assert float(weights[groups == group].mean()) == pytest.approx(1)
    assert torch.equal(compensate(torch.full_like(gaps, 0.5), groups), torch.ones_like(gaps))
