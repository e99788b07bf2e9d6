"""Fixed point in the ring Z_2^64: numbers as int64 whose additions wrap around, so that masks can hide them.

x is encoded as round(x * scale). The scale is the largest power of two that keeps sums of n numbers of at
most `limit` within +-2^62. So no sum of encoded numbers overflows, it is exact in any order, and the sum of n numbers
themselves is off by at most n / (2 scale).
"""

import math

import torch
from torch import Tensor

RANGE = 62  # bits of a sum's magnitude


def choose_scale(limit: float, clients: int) -> float:
    """Return the scale at which a sum over `clients` numbers of at most this magnitude fits."""
    return 2.0 ** (RANGE - math.ceil(math.log2(limit)) - math.ceil(math.log2(clients)))


def encode(X: Tensor, limit: float, clients: int) -> Tensor:
    """Encode one client's numbers as int64, integers unchanged; OverflowError for one beyond the limit, or NaN."""
    if not X.is_floating_point():
        return refuse_large(X.long(), 2**RANGE // clients)
    largest = float(X.abs().max()) if X.numel() else 0.0
    if not largest <= limit:
        raise OverflowError(f"{largest:.4g} is not within +-{limit:.4g}")
    return (X.double() * choose_scale(limit, clients)).round().long()


def refuse_large(X: Tensor, most: int) -> Tensor:
    if X.numel() and (int(X.max()) > most or int(X.min()) < -most):
        raise OverflowError(f"a whole number is not within +-{most}")
    return X


def decode(total: Tensor, dtype: torch.dtype, limit: float, clients: int) -> Tensor:
    """Decode the numbers of a sum over at most so many clients."""
    if not dtype.is_floating_point:
        return total.to(dtype)
    return (total.double() / choose_scale(limit, clients)).to(dtype)
