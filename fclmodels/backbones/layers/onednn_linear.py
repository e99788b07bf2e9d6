"""A fully connected layer with oneDNN's large products: where MKL leaves a CPU's AVX-512 unused, they take half the
time forwards and backwards (numerics/products.py). Sums are taken in another order, so the last bits differ from
torch's.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from fclmodels.numerics.products import ONEDNN, product

LEAST = 2**23  # multiplications of a product below which the overhead in Python is larger than the gain
ROWS = 16  # oneDNN keeps a kernel for each number of rows, so batches that are no multiple are torch's


class Linear(nn.Linear):
    """nn.Linear, large products by oneDNN."""

    may_leave_torch: ClassVar[bool] = True

    def forward(self, x: Tensor) -> Tensor:
        if not self._is_large(x):
            return super().forward(x)
        return _Products.apply(x, self.weight, self.bias)

    def _is_large(self, x: Tensor) -> bool:
        is_float = x.dtype == self.weight.dtype == torch.float32 and not torch.is_autocast_enabled("cpu")
        has_size = x.numel() * self.out_features >= LEAST and len(x) % ROWS == 0
        return ONEDNN and self.may_leave_torch and x.ndim == 2 and is_float and has_size and x.device.type == "cpu"


@contextmanager
def differentiate_twice() -> Iterator[None]:
    """Use torch's products while open, whose gradients have gradients."""
    Linear.may_leave_torch = False
    try:
        yield
    finally:
        Linear.may_leave_torch = True


class _Products(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(x, weight)
        y = product(x, weight.T)
        return y if bias is None else y.add_(bias)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, delta: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        x, weight = ctx.saved_tensors
        needs_x, needs_weight, needs_bias = ctx.needs_input_grad
        return (
            product(delta, weight) if needs_x else None,
            product(delta.T, x) if needs_weight else None,
            delta.sum(0) if needs_bias else None,
        )
