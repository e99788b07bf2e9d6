"""Distillation against NumPy, and where it is least."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from numpy.testing import assert_allclose
from scipy.special import log_softmax, softmax

from fclmodels.numerics.distillation import distillation_loss


def logits(seed: int, samples: int, classes: int) -> np.ndarray:
    return np.random.default_rng(seed).normal(0, 3, (samples, classes))


@given(st.integers(0, 99), st.integers(1, 5), st.integers(1, 7), st.sampled_from([0.5, 1.0, 2.0, 10.0]))
def test_it_is_the_mean_kullback_leibler_divergence_of_softened_answers(
    seed: int, samples: int, classes: int, temperature: float
) -> None:
    student, teacher = logits(seed, samples, classes), logits(seed + 1000, samples, classes)
    p, log_q = softmax(teacher / temperature, 1), log_softmax(student / temperature, 1)
    expected = (p * (log_softmax(teacher / temperature, 1) - log_q)).sum(1).mean()
    assert_allclose(distillation_loss(torch.tensor(student), torch.tensor(teacher), temperature), expected, atol=1e-12)


@pytest.mark.parametrize("temperature", [1.0, 2.0])
def test_its_gradient_is_that_of_li_and_hoiems_cross_entropy(temperature: float) -> None:
    """(q - p) / T / B, as that of -sum p' log q' in eq. 2 with y'^(1/T) normalised."""
    student = torch.tensor(logits(0, 4, 3), requires_grad=True)
    teacher = torch.tensor(logits(1, 4, 3))
    distillation_loss(student, teacher, temperature).backward()
    p, q = (softmax(t.detach().numpy(), 1) ** (1 / temperature) for t in (teacher, student))
    p, q = p / p.sum(1, keepdims=True), q / q.sum(1, keepdims=True)
    assert_allclose(student.grad, (q - p) / temperature / 4, atol=1e-12)


def test_it_is_nothing_where_the_student_answers_alike() -> None:
    teacher = torch.tensor(logits(0, 4, 3))
    assert float(distillation_loss(teacher + 7, teacher, 2.0)) == pytest.approx(0, abs=1e-12)
    assert float(distillation_loss(-teacher, teacher, 2.0)) > 0.1


def test_sure_teachers_and_students_give_finite_losses() -> None:
    sure = torch.tensor([[1e4, -1e4, 0.0]], requires_grad=True)
    loss = distillation_loss(sure, -sure.detach(), 2.0)
    loss.backward()
    assert float(loss.detach()) == pytest.approx(1e4)
    assert sure.grad is not None
    assert sure.grad.isfinite().all()
