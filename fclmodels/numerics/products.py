"""Products of large float32 matrices on a CPU by oneDNN.

torch gives them to MKL, which leaves AVX-512 unused on AMD and takes twice as long there. For a few rows, such as the
gradients of two tasks, it takes a fifth.
"""

import torch
from torch import Tensor
from torch.nn.functional import pad

FEW = 7
ONEDNN = torch.backends.mkldnn.is_available()
# oneDNN compiles a kernel for each shape of a product and keeps it, half a megabyte, as long as the process runs.
STEP = 128


def product(A: Tensor, B: Tensor) -> Tensor:
    """A B for matrices [m, k] and [k, n] in whatever layout, without autograd."""
    large = min(len(A), B.shape[1]) >= FEW and A.shape[1] > 0
    if ONEDNN and large and A.dtype == torch.float32 and A.device.type == "cpu":
        # oneDNN is a thousand times slower where its second matrix is a slice with gaps in memory.
        if not (B.is_contiguous() or B.T.is_contiguous()):
            B = B.contiguous()
        return torch.ops.mkldnn._linear_pointwise(A, B.T, None, "none", [], "")
    return A @ B


def filled(X: Tensor) -> Tensor:
    """X [d, n] and columns of zeros up to a multiple of STEP, so that matrices of any n come in few shapes."""
    missing = -X.shape[1] % STEP
    return pad(X, (0, missing)) if missing else X
