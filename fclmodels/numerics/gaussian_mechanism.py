"""The Gaussian mechanism: clipping, noise, singular values of a noisy matrix, and epsilon.

federation/protection/privacy.py says where it is applied, and against whom it protects.
"""

import torch
from torch import Tensor


def clip_norm(X: Tensor, bound: float) -> Tensor:
    """Return X, scaled to the Frobenius norm `bound` where its own is larger (CLIP of eq. 14)."""
    return X * (bound / X.norm()).clamp(max=1)


def draw_noise(like: Tensor, deviation: float, generator: torch.Generator) -> Tensor:
    """Draw noise of this standard deviation, of the shape of a tensor."""
    noise = torch.randn(like.shape, generator=generator, dtype=like.dtype, device=generator.device)
    return noise.to(like.device) * deviation


def remove_noise(sigma: Tensor, shape: tuple[int, ...], deviation: float) -> Tensor:
    """Return singular values [k] of a noisy matrix [d, s], k = min(d, s), without the expected energy of the noise.

    Of the noise's d s deviation^2 each of them has max(d, s) deviation^2. Noise spreads unevenly, so that much of it
    remains in some: from the largest on, no more energy is kept than all have together without noise.
    """
    energies = sigma.double().square() - max(shape) * deviation**2
    cumulative = energies.clamp(min=0).cumsum(0).clamp(max=energies.sum().clamp(min=0))
    return cumulative.diff(prepend=cumulative.new_zeros(1)).sqrt().to(sigma.dtype)


def compute_epsilon(noise_multiplier: float, sample_rate: float, releases: int, delta: float) -> float:
    """Return the epsilon for a client that joins each of `releases` releases with probability `sample_rate`."""
    from opacus.accountants import RDPAccountant  # loads some 1,400 modules, so only where it is needed

    accountant = RDPAccountant()
    for _ in range(releases):
        accountant.step(noise_multiplier=noise_multiplier, sample_rate=sample_rate)
    return float(accountant.get_epsilon(delta))
