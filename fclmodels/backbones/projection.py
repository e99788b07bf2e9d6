"""Training steps without what acts on protected spans, at the least arithmetic (GPM; FedProTIP eq. 4; FOT eq. 6).

A layer's weight gradient is G = delta X^T: delta [out, n] of its outputs, X [d, n] of its inputs, n columns a batch.
Projected it is G - G O O^T = delta X*^T with X* = X - O O^T X, the same to rounding. So the narrower of G [out, d] and
X^T [n, d] is projected, onto the complement of O where that has fewer columns than O.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from math import prod
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from fclmodels.backbones.capture import Layer
from fclmodels.numerics.products import filled, product
from fclmodels.numerics.subspace import complement, project


def split_by_width(bases: dict[str, Tensor]) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Bases of at most d/2 columns as they are, and the complements [d, d - r] of the wider ones."""
    wide = {name for name, basis in bases.items() if 2 * basis.shape[1] > basis.shape[0]}
    return (
        {name: basis for name, basis in bases.items() if name not in wide},
        {name: complement(bases[name]) for name in wide},
    )


@dataclass(frozen=True)
class Protected:
    """A layer and the span that it is kept clear of: by an orthonormal basis [d, r], or one of its complement."""

    layer: Layer
    basis: Tensor | None
    complement: Tensor | None

    def free(self, rows: Tensor) -> Tensor:
        """Rows [m, d] without their part in the span."""
        if self.basis is not None:
            return project(rows, self.basis)
        assert self.complement is not None
        return product(product(rows, self.complement), self.complement.T)

    def project_(self, change: Tensor) -> None:
        """Take out of a tensor of the weight's shape what acts on the span; taps without data are left alone."""
        live = self.layer.live(change)
        live.copy_(self.free(self.layer.matrix(change)).view_as(live))

    def weight_gradient(self, x: Tensor, delta: Tensor) -> Tensor:
        """The projected gradient of the weight, from a batch's input and the gradient of its output.

        Where these come in lower precision the rest is in the weight's: what is left in the span must be rounding.
        """
        x, delta = (t.to(self.layer.module.weight.dtype) for t in (x, delta))
        outputs = delta.flatten(0, -2).T if self.layer.taps is None else delta.transpose(0, 1).flatten(1)
        return self.as_weight(product(outputs, self.free(self.layer.columns(x).T)))

    def as_weight(self, matrix: Tensor) -> Tensor:
        """A matrix [out, d] in the weight's shape; 0 at taps without data."""
        shape = (len(matrix), *self.layer.module.weight.shape[1:])
        if matrix.numel() == prod(shape):
            return matrix.view(shape)
        weight = matrix.new_zeros(shape)
        live = self.layer.live(weight)
        live.copy_(matrix.view_as(live))
        return weight

    def has_fewer_columns(self, batch_size: int) -> bool:
        """Whether such a batch has fewer columns than the layer has outputs."""
        module = self.layer.module
        ungrouped = isinstance(module, nn.Linear) or module.groups == 1
        return ungrouped and batch_size * self.layer.columns_a_sample < len(module.weight)


class Projection:
    """Keeps the training of a network clear of the spans of some of its layers; the others are free."""

    def __init__(self, layers: dict[str, Layer], bases: dict[str, Tensor], complements: dict[str, Tensor]) -> None:
        bases, complements = ({name: filled(basis) for name, basis in side.items()} for side in (bases, complements))
        self.protected = {
            layer.weight: Protected(layer, bases.get(name), complements.get(name))
            for name, layer in layers.items()
            if name in complements or (name in bases and bases[name].shape[1])
        }
        self._done_in_backward: set[str] = set()

    @contextmanager
    def within(self, network: nn.Module, batch_size: int) -> Iterator[None]:
        """While open, the backward pass forms the projected gradient itself where a batch has few columns.

        That is all of these weights' gradient as long as the loss depends on them through their layers alone.
        """
        few = {name: span for name, span in self.protected.items() if span.has_fewer_columns(batch_size)}
        modules = {name: network.get_submodule(span.layer.name) for name, span in few.items()}
        self._done_in_backward = set(few)
        try:
            for name, module in modules.items():
                vars(module)["forward"] = partial(_forward, module.forward, network.get_parameter(name), few[name])
            yield
        finally:
            self._done_in_backward = set()
            for module in modules.values():
                vars(module).pop("forward", None)

    @torch.no_grad()
    def gradients(self, gradients: dict[str, Tensor]) -> None:
        """Project gradients by weight, in place, but those that the backward pass has projected."""
        for name, span in self.protected.items():
            if name in gradients and name not in self._done_in_backward:
                span.project_(gradients[name])

    @torch.no_grad()
    def steps(self, steps: dict[str, Tensor]) -> dict[str, Tensor]:
        """Whole steps by weight, projected; those of free tensors are the same tensors."""
        projected = {name: steps[name].clone() for name in steps if name in self.protected}
        for name, step in projected.items():
            self.protected[name].project_(step)
        return {**steps, **projected}

    @torch.no_grad()
    def protected_part(self, weights: dict[str, Tensor]) -> dict[str, Tensor]:
        """C = W O O^T of each protected weight: what no projected step changes. 0 at taps without data."""
        parts = {}
        for name, span in self.protected.items():
            W = span.layer.matrix(weights[name])
            parts[name] = span.as_weight(W - span.free(W))
        return parts


def project_update(
    update: dict[str, Tensor], layers: dict[str, Layer], bases: dict[str, Tensor], complements: dict[str, Tensor]
) -> dict[str, Tensor]:
    """The update with each protected layer's part out of its span; the rest is the same tensors."""
    return Projection(layers, bases, complements).steps(update)


def _forward(own: Callable[[Tensor], Tensor], weight: Tensor, span: Protected, x: Tensor) -> Tensor:
    """A layer's own forward pass, whose graph reaches x and the bias; the weight is reached by _WeightGradient."""
    if not weight.requires_grad:
        return own(x)
    weight.requires_grad_(False)
    try:
        y = own(x)
    finally:
        weight.requires_grad_(True)
    return _WeightGradient.apply(y, weight, x, span)


class _WeightGradient(torch.autograd.Function):
    """The identity on a layer's output, that gives the weight its projected gradient."""

    @staticmethod
    def forward(ctx: Any, y: Tensor, weight: Tensor, x: Tensor, span: Protected) -> Tensor:
        ctx.save_for_backward(x)
        ctx.span = span
        # Returned as it is, and a later in-place activation may still write over it.
        ctx.mark_dirty(y)
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, delta: Tensor) -> tuple[Tensor, Tensor, None, None]:
        (x,) = ctx.saved_tensors
        return delta, ctx.span.weight_gradient(x, delta), None, None
