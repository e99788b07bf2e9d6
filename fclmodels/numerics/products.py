"""Products of large float32 matrices on a CPU by oneDNN.

torch gives them to MKL, which leaves AVX-512 unused on AMD and takes twice as long there.
"""

import torch
from torch import Tensor

ONEDNN = torch.backends.mkldnn.is_available()


def product(A: Tensor, B: Tensor) -> Tensor:
    """A B for matrices [m, k] and [k, n] in whatever layout, without autograd."""
    if ONEDNN and A.dtype == torch.float32 and A.device.type == "cpu" and A.shape[1]:
        # oneDNN is a thousand times slower where its second matrix is a slice with gaps in memory.
        if not (B.is_contiguous() or B.T.is_contiguous()):
            B = B.contiguous()
        return torch.ops.mkldnn._linear_pointwise(A, B.T, None, "none", [], "")
    return A @ B
