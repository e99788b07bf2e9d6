"""Projection of training steps out of protected spans, at the least arithmetic (GPM; FedProTIP eq. 4; FOT eq. 6).

A layer's weight gradient is G = delta X^T: delta [out, n] of its outputs, X [d, n] of its inputs, n columns a batch.
Projected it is G - G O O^T = delta X*^T with X* = X - O O^T X, the same to rounding. So the narrower of G [out, d] and
X^T [n, d] is projected, onto the complement of O where that has fewer columns than O.

Of a grouped convolution each group's gradient is projected by the group's own basis, all groups in one batched product.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from math import prod
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from fclmodels.backbones.inputs.layer_capture import Layer
from fclmodels.numerics.products import pad_columns, product
from fclmodels.numerics.subspace import complement, project


def split_by_width(bases: dict[str, Tensor]) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Return the bases of at most d/2 columns, and the complements [d, d - r] of the wider ones."""
    wide = {name for name, basis in bases.items() if 2 * basis.shape[1] > basis.shape[0]}
    return (
        {name: basis for name, basis in bases.items() if name not in wide},
        {name: complement(bases[name]) for name in wide},
    )


@dataclass(frozen=True)
class ProtectedLayer:
    """A layer and the span that its steps must not act on, by one of two bases."""

    layer: Layer
    basis: Tensor | None  # orthonormal, of the span [d, r]
    complement: Tensor | None  # orthonormal, of the span's complement [d, d - r]

    def remove_span(self, rows: Tensor) -> Tensor:
        """Return rows [m, d] without their part in the span."""
        if self.basis is not None:
            return project(rows, self.basis)
        assert self.complement is not None
        return product(product(rows, self.complement), self.complement.T)

    def project_(self, change: Tensor) -> None:
        """Remove the part that acts on the span from a tensor of the weight's shape; taps without data stay."""
        live = self.layer.select_live(change)
        live.copy_(self.remove_span(self.layer.to_matrix(change)).view_as(live))

    def project_weight_gradient(self, x: Tensor, delta: Tensor) -> Tensor:
        """Return the projected gradient of the weight, from a batch's input and the gradient of its output.

        Where these have lower precision the products have the weight's: only rounding may remain in the span.
        """
        x, delta = (t.to(self.layer.module.weight.dtype) for t in (x, delta))
        outputs = delta.flatten(0, -2).T if self.layer.taps is None else delta.transpose(0, 1).flatten(1)
        return self.to_weight(product(outputs, self.remove_span(self.layer.unfold(x).T)))

    def to_weight(self, matrix: Tensor) -> Tensor:
        """Return a matrix [out, d] in the weight's shape, 0 at taps without data."""
        shape = (len(matrix), *self.layer.module.weight.shape[1:])
        if matrix.numel() == prod(shape):
            return matrix.view(shape)
        weight = matrix.new_zeros(shape)
        live = self.layer.select_live(weight)
        live.copy_(matrix.view_as(live))
        return weight

    def has_fewer_columns(self, batch_size: int) -> bool:
        """Return whether a batch of this size has fewer columns than the layer has outputs."""
        return batch_size * self.layer.columns_per_sample < self.layer.outputs


@dataclass(frozen=True)
class ProtectedGroups:
    """A grouped convolution, and the spans that steps of its groups must not act on.

    Group g's part G_g [out/groups, d] of a step becomes a_g G_g + b_g G_g M_g M_g^T: by a basis M of its span a = 1
    and b = -1, by one of the span's complement a = 0 and b = 1, where nothing is protected a = 1 and b = 0. Columns of
    zeros fill up the narrower M: groups x d x r numbers, r being the most columns of a group, which are at most d/2.
    """

    layer: Layer  # one of the groups
    columns: Tensor  # M [groups, d, r]
    factors: Tensor  # a and b [2, groups, 1, 1]

    @staticmethod
    def of(groups: Mapping[int, ProtectedLayer]) -> "ProtectedGroups":
        """Join the protected ones among the groups of a convolution."""
        layer = next(iter(groups.values())).layer
        matrices = {group: span.basis if span.basis is not None else span.complement for group, span in groups.items()}
        like = next(matrix for matrix in matrices.values() if matrix is not None)
        columns = like.new_zeros(layer.groups, layer.width, max(len(m.T) for m in matrices.values() if m is not None))
        factors = like.new_tensor([1.0, 0.0])[:, None].repeat(1, layer.groups)
        for group, matrix in matrices.items():
            assert matrix is not None
            columns[group, :, : len(matrix.T)] = matrix
            factors[:, group] = like.new_tensor([1, -1] if groups[group].basis is not None else [0, 1])
        return ProtectedGroups(layer, columns, factors[:, :, None, None])

    def project_(self, change: Tensor) -> None:
        """Remove the parts that act on the spans from a tensor of the weight's shape; taps without data stay."""
        live = self.layer.select_taps(change)
        G = live.reshape(self.layer.groups, self.layer.outputs, self.layer.width)
        keeps, adds = self.factors
        live.copy_((keeps * G + adds * torch.bmm(torch.bmm(G, self.columns), self.columns.mT)).view_as(live))


class Projection:
    """Keeps training from acting on the spans of some layers of a network."""

    def __init__(self, layers: dict[str, Layer], bases: dict[str, Tensor], complements: dict[str, Tensor]) -> None:
        self.protected: dict[str, ProtectedLayer | ProtectedGroups] = {}
        groups: dict[str, dict[int, ProtectedLayer]] = {}
        for name, layer in layers.items():
            if name in complements or (name in bases and bases[name].shape[1]):
                sides = bases.get(name), complements.get(name)
                if layer.groups == 1:
                    padded = (None if side is None else pad_columns(side) for side in sides)
                    self.protected[layer.weight] = ProtectedLayer(layer, *padded)
                else:
                    groups.setdefault(layer.weight, {})[layer.group] = ProtectedLayer(layer, *sides)
        self.protected |= {name: ProtectedGroups.of(spans) for name, spans in groups.items()}
        self._projected_in_backward: set[str] = set()

    @contextmanager
    def project_in_backward(self, network: nn.Module, batch_size: int) -> Iterator[None]:
        """Let the backward pass compute the projected gradient itself while open, where a batch has few columns.

        That is the whole gradient of these weights as long as the loss depends on them through their layers alone.
        """
        few = {
            name: span
            for name, span in self.protected.items()
            if isinstance(span, ProtectedLayer) and span.has_fewer_columns(batch_size)
        }
        modules = {name: network.get_submodule(span.layer.module_name) for name, span in few.items()}
        self._projected_in_backward = set(few)
        try:
            for name, module in modules.items():
                vars(module)["forward"] = partial(_forward, module.forward, network.get_parameter(name), few[name])
            yield
        finally:
            self._projected_in_backward = set()
            for module in modules.values():
                vars(module).pop("forward", None)

    @torch.no_grad()
    def project_gradients(self, gradients: dict[str, Tensor]) -> None:
        """Project gradients by weight, in place, except those that the backward pass has projected."""
        for name, span in self.protected.items():
            if name in gradients and name not in self._projected_in_backward:
                span.project_(gradients[name])

    @torch.no_grad()
    def project_steps(self, steps: dict[str, Tensor]) -> dict[str, Tensor]:
        """Return projected steps by weight; those of other tensors are the same tensors."""
        projected = {name: steps[name].clone() for name in steps if name in self.protected}
        for name, step in projected.items():
            self.protected[name].project_(step)
        return {**steps, **projected}

    @torch.no_grad()
    def compute_protected_part(self, weights: dict[str, Tensor]) -> dict[str, Tensor]:
        """Return C = W O O^T of each protected weight, which no projected step changes; 0 at taps without data."""
        projected = {name: weights[name].clone() for name in self.protected}
        for name, span in self.protected.items():
            span.project_(projected[name])
        return {name: weights[name] - rest for name, rest in projected.items()}


def project_update(
    update: dict[str, Tensor], layers: dict[str, Layer], bases: dict[str, Tensor], complements: dict[str, Tensor]
) -> dict[str, Tensor]:
    """Return the update projected out of each protected layer's span; other tensors are the same tensors."""
    return Projection(layers, bases, complements).project_steps(update)


def _forward(own: Callable[[Tensor], Tensor], weight: Tensor, span: ProtectedLayer, x: Tensor) -> Tensor:
    """Run a layer's own forward pass on x and the bias; _WeightGradient gives the weight its gradient."""
    if not weight.requires_grad:
        return own(x)
    weight.requires_grad_(False)
    try:
        y = own(x)
    finally:
        weight.requires_grad_(True)
    return _WeightGradient.apply(y, weight, x, span)


class _WeightGradient(torch.autograd.Function):
    """The identity on a layer's output; backwards it gives the weight its projected gradient."""

    @staticmethod
    def forward(ctx: Any, y: Tensor, weight: Tensor, x: Tensor, span: ProtectedLayer) -> Tensor:
        ctx.save_for_backward(x)
        ctx.span = span
        # y is returned as it is, and a later in-place activation may write over it.
        ctx.mark_dirty(y)
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, delta: Tensor) -> tuple[Tensor, Tensor, None, None]:
        (x,) = ctx.saved_tensors
        return delta, ctx.span.project_weight_gradient(x, delta), None, None
