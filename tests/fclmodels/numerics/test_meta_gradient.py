"""Gradients through fine-tuning: the worked scalar case of both signs, a Neumann series in NumPy, divergences."""

from collections.abc import Sequence

import numpy as np
import pytest
import torch
from numpy.testing import assert_allclose
from torch import Tensor

from fclmodels.numerics.meta_gradient import differentiate_tuning, multiply_neumann, symmetric_divergence


def test_the_worked_divergence() -> None:
    p, q = (torch.tensor(0.0), torch.tensor(1.0)), (torch.tensor(1.0), torch.tensor(4.0))
    assert_allclose(symmetric_divergence(*p, *q, 0.0), 0.875, rtol=1e-6)
    assert_allclose(symmetric_divergence(*p, *q), 0.874990, atol=1e-6)
    assert_allclose(symmetric_divergence(*q, *p), 0.874990, atol=1e-6)


@pytest.mark.parametrize(
    ("against", "terms", "expected"), [(False, 1, -0.16), (True, 4, 0.55024), (False, 4, -0.55024)]
)
def test_the_worked_scalar_case(against: bool, terms: int, expected: float) -> None:
    """w0 = 0, L_T = (w - 2)^2 / 2, L_V = (w - 1)^2 / 2, rate 0.1, with one step the true gradient is -0.16."""
    scale = torch.ones((), requires_grad=True)
    (gradient,) = differentiate_tuning(
        lambda w: (w[0] - 2) ** 2 / 2,
        lambda w: (w[0] - 1) ** 2 / 2,
        [torch.zeros(())],
        [0.1 * scale],
        [scale],
        0.1,
        terms,
        against,
    )
    assert_allclose(gradient, expected, rtol=1e-5)


def test_what_a_validation_loss_has_of_a_parameter_itself_counts() -> None:
    share = torch.tensor(0.5, requires_grad=True)
    args = ([torch.zeros(())], [torch.tensor(0.1)], [share], 0.1, 1)
    (gradient,) = differentiate_tuning(lambda w: (w[0] - 2) ** 2 / 2, lambda w: w[0] * share, *args)
    assert_allclose(gradient, 0.2, rtol=1e-6)


def test_the_series_is_numpys() -> None:
    random = np.random.default_rng(0)
    A, v = random.normal(size=(3, 3)), random.normal(size=3)
    H = A @ A.T

    def loss(w: list[Tensor]) -> Tensor:
        return w[0] @ torch.tensor(H) @ w[0] / 2

    (total,) = multiply_neumann(loss, [torch.zeros(3, dtype=torch.float64)], [torch.tensor(v)], [0.1], 4)
    step = np.eye(3) - 0.1 * H
    assert_allclose(total, sum(np.linalg.matrix_power(step, j) @ v for j in range(4)), rtol=1e-10)
    rates = torch.tensor([0.1, 0.02, 0.3], dtype=torch.float64)
    (total,) = multiply_neumann(loss, [torch.zeros(3, dtype=torch.float64)], [torch.tensor(v)], [rates], 4)
    step = np.eye(3) - H @ np.diag(rates)
    assert_allclose(total, sum(np.linalg.matrix_power(step, j) @ v for j in range(4)), rtol=1e-10)


def test_echoes_go_by_the_rates_and_are_the_unrolled_gradient_where_slopes_stay() -> None:
    """A training loss that is linear, and one of small curvature, after three steps of other rates than 0.1."""
    scale = torch.tensor(1.0, dtype=torch.float64, requires_grad=True)
    for curvature, rtol in ((0.0, 1e-12), (1e-3, 5e-3)):
        rates = [0.02 * scale, 0.5 * scale]

        def train(w: Sequence[Tensor], c: float = curvature) -> Tensor:
            return 2 * w[0] - w[1] + c * (w[0] + w[1]) ** 2

        def val(w: Sequence[Tensor]) -> Tensor:
            return (w[0] - 1) ** 2 + (w[1] - 3) ** 2

        values: Sequence[Tensor] = [torch.zeros((), dtype=torch.float64, requires_grad=True) for _ in range(2)]
        path = [values]
        for _ in range(3):
            slopes = torch.autograd.grad(train(values), values, create_graph=True)
            values = [w - r * g for w, r, g in zip(values, rates, slopes, strict=True)]
            path.append(values)
        (expected,) = torch.autograd.grad(val(values), scale)
        before = [w.detach() for w in path[2]]
        (gradient,) = differentiate_tuning(train, val, before, [0.02 * scale, 0.5 * scale], [scale], None, 3)
        assert_allclose(gradient, expected, rtol=rtol)
