"""The overlap of low-rank factors' rows (O-LoRA, PILoRA)."""

from torch import Tensor


def measure_overlap(earlier: Tensor, A: Tensor) -> Tensor:
    """Return sum |A_i A_t^T| over all pairs of rows of A_i [t r, in], which are fixed, and A_t [r, in]."""
    return (earlier.detach() @ A.T).abs().sum()
