"""Products of large matrices on a CPU: in float32 by oneDNN, of symmetric and triangular ones in blocks.

torch uses MKL for them, which leaves AVX-512 unused on AMD and takes twice as long there. For a few rows, such as the
gradients of two tasks, it takes a fifth. Blocks save about half of the arithmetic.
"""

import torch
from torch import Tensor
from torch.nn.functional import pad

FEW = 7
ONEDNN = torch.backends.mkldnn.is_available()
# oneDNN compiles a kernel for each shape of a product and keeps it, half a megabyte, as long as the process runs.
STEP = 128
# Rows of a block: narrower ones save more, wider ones multiply faster.
BLOCK = 96


def product(A: Tensor, B: Tensor) -> Tensor:
    """Return A B for matrices [m, k] and [k, n] in any layout, without autograd."""
    is_large = min(len(A), B.shape[1]) >= FEW and A.shape[1] > 0
    if ONEDNN and is_large and A.dtype == torch.float32 and A.device.type == "cpu":
        # oneDNN is a thousand times slower where its second matrix is a slice with gaps in memory.
        if not (B.is_contiguous() or B.T.is_contiguous()):
            B = B.contiguous()
        return torch.ops.mkldnn._linear_pointwise(A, B.T, None, "none", [], "")
    return A @ B


def pad_columns(X: Tensor) -> Tensor:
    """Pad X [d, n] with columns of zeros to a multiple of STEP, so that matrices of any n have few shapes."""
    missing = -X.shape[1] % STEP
    return pad(X, (0, missing)) if missing else X


def gram_of(X: Tensor) -> Tensor:
    """Return X X^T [d, d] of X [d, n], in X's precision."""
    total = X.new_zeros(len(X), len(X))
    add_gram(total, X)
    mirror(total)
    return total


def add_gram(total: Tensor, X: Tensor) -> None:
    """Add X X^T to total on and above the diagonal: the products in X's precision, the sum in total's."""
    X = X.contiguous()
    for low, high in _blocks(len(total)):
        total[:high, low:high] += product(X[:high], X[low:high].T)


def mirror(total: Tensor) -> None:
    """Copy the sums of add_gram above the diagonal to below it."""
    for low, high in _blocks(len(total)):
        total[low:high, :low] = total[:low, low:high].T


def multiply_lower_(F: Tensor, Z: Tensor) -> Tensor:
    """Multiply F Z for a lower triangular F [d, d], written over Z."""
    # From the last rows on: those above do not need them.
    for low, high in reversed(_blocks(len(F))):
        Z[low:high] = product(F[low:high, :high], Z[:high])
    return Z


def _blocks(d: int) -> list[tuple[int, int]]:
    return [(low, min(low + BLOCK, d)) for low in range(0, d, BLOCK)]
