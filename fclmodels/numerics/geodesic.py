"""Distillation along the geodesic between two subspaces of features (GeoDL: Simon, Koniusz, Harandi 2021).

G = integral over nu in [0, 1] of Pi(nu) Pi(nu)^T, Pi the geodesic from span(P) to span(Q). With principal angles t_j,
the principal vectors A [F, k] of P and the unit residuals R [F, k] of Q's,

    G = sum_j a_j A_j A_j^T + b_j (A_j R_j^T + R_j A_j^T) + c_j R_j R_j^T
    a = (1 + sin 2t / 2t) / 2     b = (1 - cos 2t) / 4t     c = (1 - sin 2t / 2t) / 2

It stays in factors: F x F is never made. The release inverts by one step of Newton's method and adds random numbers;
here all is exact.
"""

from typing import NamedTuple

import torch
from torch import Tensor

LEAST = 1e-6  # a singular value or an angle below which directions are rounding


class Geodesic(NamedTuple):
    """G in factors."""

    A: Tensor  # [F, k]
    R: Tensor  # [F, k]
    a: Tensor  # [k]
    b: Tensor
    c: Tensor

    def multiply(self, x: Tensor, y: Tensor) -> Tensor:
        """Return x_i^T G y_i [B] of rows [B, F]."""
        xa, xr, ya, yr = x @ self.A, x @ self.R, y @ self.A, y @ self.R
        return (self.a * xa * ya + self.b * (xa * yr + xr * ya) + self.c * xr * yr).sum(1)


def find_geodesic(P: Tensor, Q: Tensor) -> Geodesic:
    """Return the geodesic between the spans of orthonormal P and Q [F, k]."""
    U, cosines, Vh = torch.linalg.svd(P.T @ Q)
    A, towards = P @ U, Q @ Vh.T
    residual = towards - A * cosines
    sines = residual.norm(dim=0)
    t = torch.atan2(sines, cosines)
    R = torch.where(sines > LEAST, residual / sines.clamp(min=LEAST), 0.0)
    wide = torch.where(t > LEAST, t, 1.0)
    ratio = torch.where(t > LEAST, (2 * t).sin() / (2 * wide), 1.0)
    b = torch.where(t > LEAST, (1 - (2 * t).cos()) / (4 * wide), 0.0)
    return Geodesic(A, R, (1 + ratio) / 2, b, (1 - ratio) / 2)


def find_subspace(features: Tensor, most: int) -> Tensor:
    """Return the leading principal directions [F, k] of features [B, F], at most so many and none of rounding."""
    _, sigma, Vh = torch.linalg.svd(features - features.mean(0), full_matrices=False)
    return Vh[: min(most, int((sigma > LEAST * sigma[0].clamp(min=LEAST)).sum()))].T


def geodesic_loss(features: Tensor, targets: Tensor) -> Tensor:
    """Return the mean of 1 - h*^T G h / sqrt(h*^T G h* h^T G h), from features h and the teacher's h* [B, F].

    G, without gradients, is between the PCA subspaces of both, of B - 2 dimensions at most; 0 where these have none.
    """
    with torch.no_grad():
        most = min(len(features) - 2, features.shape[1])
        P, Q = (find_subspace(x.double(), most) for x in (targets, features))
        k = min(P.shape[1], Q.shape[1])
    if k < 1:
        return features.new_zeros(())
    with torch.no_grad():
        G = find_geodesic(P[:, :k], Q[:, :k])
    h, h_old = features.double(), targets.double()
    tiny = torch.finfo(h.dtype).tiny
    lengths = (G.multiply(h, h) * G.multiply(h_old, h_old)).clamp(min=tiny).sqrt()
    return (1 - G.multiply(h_old, h) / lengths).mean().to(features)
