"""OCS's scores, CSReL's levelled choice, BCSR's projection and hypergradient: by hand and by other means."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from numpy.testing import assert_allclose
from scipy.optimize import minimize

from fclmodels.numerics.coreset_choice import (
    choose_levelled,
    compute_weight_gradient,
    project_onto_simplex,
    score_similarity,
)
from fclmodels.numerics.shares import split_evenly


def test_likeness_to_the_mean_less_that_to_others_and_to_what_is_stored() -> None:
    gradients = torch.tensor([[1.0, 0.0], [0.0, 1.0], [1.0, 1.0]])
    scores = score_similarity(lambda: gradients, torch.tensor([1.0, 0.0]), tau=0.1)
    assert_allclose(scores, [0.453553, 0.353553, 0.363604], atol=1e-6)


def test_likeness_is_of_directions_and_a_zero_gradient_has_none() -> None:
    gradients = torch.tensor([[3.0, 4.0], [0.0, 0.0]])
    assert_allclose(score_similarity(lambda: gradients, None, tau=0.1), [1.0, 0.0])


def test_the_largest_gains_join_and_classes_stay_level() -> None:
    gains = torch.tensor([0.1, 0.4, 1.0, 0.1])  # 2 - 1.9, .5 - .1, 1.2 - .2, .9 - .8
    one = {0: 0}, {0: 4}
    assert choose_levelled(gains, [0, 0, 0, 0], *one, k=2) == [2, 1]
    assert choose_levelled(gains, [1, 0, 0, 0], {0: 0, 1: 0}, {0: 3, 1: 1}, k=2) == [2, 0]
    gains[2] = -torch.inf
    assert choose_levelled(gains, [1, 0, 0, 0], {0: 1, 1: 0}, {0: 3, 1: 1}, k=2) == [1, 0]


@given(st.lists(st.integers(0, 3), min_size=1, max_size=12), st.integers(1, 5), st.randoms())
def test_choices_in_rounds_end_where_one_choice_does(labels: list[int], size: int, random: object) -> None:
    """As many of each class as an even share of all, whatever the rounds' size."""
    room = {label: labels.count(label) for label in set(labels)}
    gains, chosen, target = torch.arange(float(len(labels))), [], max(1, len(labels) // 2)
    while len(chosen) < target:
        now = gains.clone()
        now[chosen] = -torch.inf
        counts = {label: sum(labels[place] == label for place in chosen) for label in room}
        chosen += choose_levelled(now, labels, counts, room, min(size, target - len(chosen)))
    shares = dict(zip(room, split_evenly(target, list(room.values())), strict=True))
    assert {label: sum(labels[place] == label for place in chosen) for label in room} == shares


def test_the_nearest_point_of_the_simplex() -> None:
    assert_allclose(project_onto_simplex(torch.tensor([0.6, 0.5, -0.2])), [0.55, 0.45, 0], atol=1e-7)
    v = np.array([0.4, -1.2, 0.9, 0.35])
    nearest = minimize(
        lambda w: ((w - v) ** 2).sum(),
        np.full(4, 0.25),
        bounds=[(0, None)] * 4,
        constraints={"type": "eq", "fun": lambda w: w.sum() - 1},
    )
    assert_allclose(project_onto_simplex(torch.tensor(v)), nearest.x, atol=1e-3)


def test_the_weights_gradient_is_the_implicit_one_of_the_notes() -> None:
    """l_i = (theta - a_i)^2 / 2 after a step of 0.5 from theta = 0 with p = 1/3: theta = .277778, Q = -4.314558."""
    theta, a, p = (
        torch.zeros(1, dtype=torch.float64, requires_grad=True),
        torch.tensor([0.0, 1, 4]),
        torch.full((3,), 1 / 3),
    )
    p = p.double()

    def losses() -> torch.Tensor:
        return (theta - a) ** 2 / 2

    with torch.no_grad():
        theta += 0.5 * (p * a).mean()
    assert_allclose(theta.detach(), [0.277778], atol=1e-6)
    unused = torch.ones(2, dtype=torch.float64, requires_grad=True)
    gradient = compute_weight_gradient([theta, unused], losses, lambda: losses().mean(), p, step=0.5)
    assert_allclose(gradient, [0.399496, -1.03869, -5.353247], atol=1e-5)
    assert_allclose(project_onto_simplex(p - 0.3 * gradient), [0, 0, 1])


@pytest.mark.parametrize("n", [1, 5])
def test_equal_entries_share_the_simplex(n: int) -> None:
    assert_allclose(project_onto_simplex(torch.full((n,), 7.0)), np.full(n, 1 / n), rtol=1e-6)
