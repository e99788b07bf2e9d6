"""Losses of images that are made from a network alone: worked numbers, NumPy, and what they mean over heads."""

from itertools import pairwise

import numpy as np
import pytest
import torch
from numpy.testing import assert_allclose
from scipy.special import log_softmax
from torch import Tensor

from fclmodels.numerics.data_free import (
    measure_statistics_gap,
    oppose,
    remember_statistics,
)
from fclmodels.numerics.distillation import distillation_loss

RUNNING = [(torch.tensor([0.0, 1.0]), torch.tensor([1.0, 4.0]))]
FIRST = [(torch.tensor([0.3, 1.4]), torch.tensor([1.6, 3.2]))]
SECOND = [(torch.tensor([-0.1, 0.8]), torch.tensor([0.9, 4.4]))]


def draw(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape)))


def test_worked_numbers_of_statistics_with_and_without_a_past() -> None:
    assert float(measure_statistics_gap(FIRST, RUNNING, None, 0.9)) == pytest.approx(1.5, abs=1e-6)
    past = remember_statistics(FIRST, None, 0.9)
    assert float(measure_statistics_gap(SECOND, RUNNING, past, 0.9)) == pytest.approx(1.290167, abs=1e-6)
    mean, variance = remember_statistics(SECOND, past, 0.9)[0]
    assert_allclose(mean, [0.9 * 0.3 - 0.1 * 0.1, 0.9 * 1.4 + 0.1 * 0.8], rtol=1e-6)
    assert_allclose(variance, [0.9 * 1.6 + 0.1 * 0.9, 0.9 * 3.2 + 0.1 * 4.4], rtol=1e-6)


def test_worked_number_of_the_students_errors() -> None:
    t, s = torch.tensor([[2.0, 0.0], [0.0, 1.0]]), torch.tensor([[1.0, 0.0], [1.0, 0.0]])
    assert float(oppose(s, t, [2])) == pytest.approx(-0.033565, abs=1e-6)


def test_worked_number_of_the_clients_distillation() -> None:
    s, t = torch.tensor([[1.0, 0.0], [0.0, 1.0]]), torch.tensor([[2.0, 0.0], [1.0, 1.0]])
    assert float(distillation_loss(s, t, 2.0)) == pytest.approx(0.028637, abs=1e-6)


def test_with_several_heads_each_counts_by_itself() -> None:
    """Against NumPy: the students' errors head by head."""
    sizes, logits, other = [2, 3, 1], draw(5, 6), draw(6, 6)[:5]
    ends, total = np.cumsum([0, *sizes]), 0.0
    for start, end in pairwise(ends):
        t, s = (log_softmax(z[:, start:end].double().numpy(), axis=1) for z in (logits, other))
        agree = t.argmax(1) == s.argmax(1)
        total -= ((np.exp(t) * (t - s)).sum(1) * agree).mean()
    assert_allclose(oppose(other, logits, sizes), total, rtol=1e-5)
