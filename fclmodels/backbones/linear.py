"""A fully connected layer whose large products are oneDNN's: on a CPU where MKL leaves AVX-512 unused, forwards and
backwards in half the time (numerics/products.py). Other sums in other order, so the last bits are other ones than
torch's.
"""

from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from fclmodels.numerics.products import ONEDNN, product

LEAST = 2**23  # multiplications of a product below which the layer's own Python would take longer
ROWS = 16  # oneDNN keeps a kernel for each number of rows, so batches that are no multiple are torch's


class Linear(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        if not self._gains(x):
            return super().forward(x)
        return _Products.apply(x, self.weight, self.bias)

    def _gains(self, x: Tensor) -> bool:
        plain = x.ndim == 2 and x.dtype == self.weight.dtype == torch.float32 and not torch.is_autocast_enabled("cpu")
        large = x.numel() * self.out_features >= LEAST and len(x) % ROWS == 0
        return ONEDNN and plain and large and x.device.type == "cpu"


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
        of_x, of_weight, of_bias = ctx.needs_input_grad
        return (
            product(delta, weight) if of_x else None,
            product(delta.T, x) if of_weight else None,
            delta.sum(0) if of_bias else None,
        )
