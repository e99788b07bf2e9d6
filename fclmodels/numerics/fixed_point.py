"""Fixed point in the ring Z_2^64: numbers as int64 whose additions wrap around, so that masks can hide them.

x goes as round(x * scale). The scale is a power of two, as large as lets the sum of n numbers of at most `limit` stay
within +-2^62. So no sum of encoded numbers overflows, it is exact in any order, and the sum of n numbers themselves is
off by at most n / (2 scale).
"""

import math

import torch
from torch import Tensor

RANGE = 62  # bits of a sum's magnitude


def scale_for(limit: float, clients: int) -> float:
    """The scale at which the sum of so many numbers of at most this magnitude fits."""
    return 2.0 ** (RANGE - math.ceil(math.log2(limit)) - math.ceil(math.log2(clients)))


def encoded(X: Tensor, limit: float, clients: int) -> Tensor:
    """One client's numbers, int64; whole numbers as they are. What is beyond the limit, or no number, is an error."""
    if not X.is_floating_point():
        return whole(X.long(), 2**RANGE // clients)
    largest = float(X.abs().max()) if X.numel() else 0.0
    if not largest <= limit:
        raise OverflowError(f"{largest:.4g} is not within +-{limit:.4g}")
    return (X.double() * scale_for(limit, clients)).round().long()


def whole(X: Tensor, most: int) -> Tensor:
    if X.numel() and (int(X.max()) > most or int(X.min()) < -most):
        raise OverflowError(f"a whole number is not within +-{most}")
    return X


def decoded(total: Tensor, dtype: torch.dtype, limit: float, clients: int) -> Tensor:
    """The numbers of a sum over at most so many clients."""
    if not dtype.is_floating_point:
        return total.to(dtype)
    return (total.double() / scale_for(limit, clients)).to(dtype)
