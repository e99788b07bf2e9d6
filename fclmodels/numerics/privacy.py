"""The Gaussian mechanism: clipping, noise, what a noisy matrix still tells, and what noise is worth.

What it is applied to, and against whom, is in federation/private.py.
"""

import torch
from torch import Tensor


def clipped(X: Tensor, bound: float) -> Tensor:
    """CLIP of eq. 14: X at the Frobenius norm `bound` where it has more."""
    return X * (bound / X.norm()).clamp(max=1)


def gaussian(like: Tensor, deviation: float, generator: torch.Generator) -> Tensor:
    """Noise of this standard deviation for each number of a tensor."""
    drawn = torch.randn(like.shape, generator=generator, dtype=like.dtype, device=generator.device)
    return drawn.to(like.device) * deviation


def without_noise(sigma: Tensor, shape: tuple[int, ...], deviation: float) -> Tensor:
    """Singular values [k] of a noisy matrix [d, s], k = min(d, s), less the energy that noise is expected to give.

    Of the noise's d s deviation^2 each of them has max(d, s) deviation^2. Noise spreads unevenly, so much of it is left
    where it has more; so from the largest on only as much is kept as all of them have together without noise.
    """
    energies = sigma.double().square() - max(shape) * deviation**2
    kept = energies.clamp(min=0).cumsum(0).clamp(max=energies.sum().clamp(min=0))
    return kept.diff(prepend=kept.new_zeros(1)).sqrt().to(sigma.dtype)


def epsilon(noise_multiplier: float, sample_rate: float, releases: int, delta: float) -> float:
    """The epsilon that goes with delta for a client that joins each of so many releases with that probability."""
    from opacus.accountants import RDPAccountant  # loads some 1,400 modules, so only where it is asked

    accountant = RDPAccountant()
    for _ in range(releases):
        accountant.step(noise_multiplier=noise_multiplier, sample_rate=sample_rate)
    return float(accountant.get_epsilon(delta))
