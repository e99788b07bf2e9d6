"""What images without data should be like: the worked numbers, NumPy, and where nothing is to be said."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.testing import assert_allclose
from scipy.ndimage import correlate
from scipy.stats import norm

from fclmodels.numerics.image_priors import (
    blur,
    measure_certainty,
    measure_divergence,
    measure_imbalance,
    measure_roughness,
)

LOGITS = torch.tensor([[2.0, 0], [1, 3], [0, 1]])


def test_terms_of_logits_by_hand() -> None:
    assert measure_certainty(LOGITS).item() == pytest.approx(0.692314, abs=1e-6)
    assert measure_imbalance(LOGITS).item() == pytest.approx(0.017184, abs=1e-6)
    assert measure_imbalance(torch.zeros(3, 4)).item() == pytest.approx(0, abs=1e-6)
    assert measure_imbalance(torch.tensor([[1000.0, 0]])).item() == 1
    assert measure_imbalance(torch.tensor([[7.0]])).item() == 0  # one class is no choice


def test_divergence_by_hand_goes_from_running_statistics_to_the_batchs() -> None:
    running = [(torch.tensor([0.0, 1]), torch.tensor([1.0, 4]))]
    batch = [(torch.tensor([0.3, 1.4]), torch.tensor([1.6, 3.2]))]
    assert measure_divergence(batch, running).item() == pytest.approx(0.057028, abs=1e-6)
    assert measure_divergence(running, batch).item() == pytest.approx(0.070785, abs=1e-6)
    # Layers count alike, however many channels they have.
    same = (torch.zeros(5), torch.ones(5))
    assert measure_divergence([*batch, same], [*running, same]).item() == pytest.approx(0.028514, abs=1e-6)


@settings(max_examples=20)
@given(st.floats(-2, 2), st.floats(0.3, 3), st.floats(-2, 2), st.floats(0.3, 3))
def test_divergence_against_an_integral(mean: float, sd: float, running_mean: float, running_sd: float) -> None:
    x = np.linspace(-40, 40, 4001)
    p, q = norm(running_mean, running_sd), norm(mean, sd)
    integral = np.trapezoid(p.pdf(x) * (p.logpdf(x) - q.logpdf(x)), x)
    of = [
        (torch.tensor([m]).double(), torch.tensor([s * s]).double())
        for m, s in ((mean, sd), (running_mean, running_sd))
    ]
    assert measure_divergence(of[:1], of[1:]).item() == pytest.approx(integral, rel=1e-5, abs=1e-6)


def test_the_blur_of_an_impulse_by_hand() -> None:
    impulse = torch.zeros(1, 1, 7, 7)
    impulse[0, 0, 3, 3] = 1
    assert blur(impulse)[0, 0, 3, 3].item() == pytest.approx(0.092198, abs=1e-6)
    assert measure_roughness(impulse).item() == pytest.approx(0.017715, abs=1e-6)


def test_the_blur_against_scipy_in_each_channel() -> None:
    images = torch.randn(2, 3, 6, 8, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    steps = np.arange(5) - 2
    window = np.exp(-(steps[:, None] ** 2 + steps**2) / 4)
    expected = [[correlate(c.numpy(), window / window.sum(), mode="mirror") for c in image] for image in images]
    assert_allclose(blur(images).numpy(), expected, rtol=1e-6)
