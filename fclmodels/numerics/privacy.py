"""The Gaussian mechanism over clients (FOT, appendix H), and what it is worth by a kept accountant.

The server sees a sum over C clients. What each adds has a norm of at most `bound`, and the sum gets noise of standard
deviation noise_multiplier * bound: every client draws the share 1/sqrt(C) of it, so all C must answer, and under secure
aggregation nobody sees less noise. Here noise comes from the run's seed, as all randomness does, so that a simulation
can be repeated; who deploys this draws it from a source that nobody else knows.
"""

import torch
from torch import Tensor


def clipped(X: Tensor, bound: float) -> Tensor:
    """CLIP of eq. 14: X at the Frobenius norm `bound` where it has more."""
    return X * (bound / X.norm()).clamp(max=1)


def noise_share(like: Tensor, deviation: float, clients: int, generator: torch.Generator) -> Tensor:
    """One client's part of noise that has this standard deviation in the sum over so many clients."""
    drawn = torch.randn(like.shape, generator=generator, dtype=like.dtype, device=generator.device)
    return drawn.to(like.device) * (deviation / clients**0.5)


def without_noise(sigma: Tensor, shape: tuple[int, ...], deviation: float) -> Tensor:
    """Singular values [k] of a noisy matrix [d, s], k = min(d, s), less the energy that noise is expected to give.

    Of the noise's d s deviation^2 each of them has max(d, s) deviation^2. Noise spreads unevenly, so much of it is left
    where it has more; so from the largest on only as much is kept as all of them have together without noise.
    """
    energies = sigma.double().square() - max(shape) * deviation**2
    kept = energies.clamp(min=0).cumsum(0).clamp(max=energies.sum().clamp(min=0))
    return kept.diff(prepend=kept.new_zeros(1)).sqrt().to(sigma.dtype)


def epsilon(noise_multiplier: float, sample_rate: float, releases: int, rounds: int, delta: float) -> float:
    """The epsilon that goes with delta for a client that may join so many rounds, each of so many releases.

    Releases of a round are of the same Poisson sample of clients. So they are one Gaussian mechanism whose noise
    multiplier is 1/sqrt(releases) of theirs: accounted one by one, each would count the sample's amplification anew.
    """
    from opacus.accountants import RDPAccountant  # loads some 1,400 modules, so only where it is asked

    accountant = RDPAccountant()
    for _ in range(rounds if releases else 0):
        accountant.step(noise_multiplier=noise_multiplier / releases**0.5, sample_rate=sample_rate)
    return float(accountant.get_epsilon(delta))
