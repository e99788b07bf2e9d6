"""Gradients of a loss after fine-tuning with respect to what steers the fine-tuning (FedL2P).

Steps w <- w - r * grad L_T(w), with rates r that depend on meta-parameters theta, end at w_n. Of a validation loss L_V
at w_n, through the last step alone and its echoes, steps before it with the same slopes and curvature:

    dL_V/dtheta = partial L_V / partial theta + v^T dw_n/dtheta,    v = sum_{j < terms} (I - H diag(r))^j dL_V/dw,

H the Hessian of L_T at w_n. With one term this is the gradient through the last step, and the unrolled one of all steps
where slopes and curvature stay. Products with H are taken by a second backward pass.
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor


def multiply_neumann(
    loss: Callable[[Sequence[Tensor]], Tensor],
    at: Sequence[Tensor],
    vector: Sequence[Tensor],
    steps: Sequence[Tensor | float],
    terms: int,
) -> list[Tensor]:
    """Return sum_{j < terms} (I - H diag(steps))^j v, with H the Hessian of a loss of tensors at some values."""
    total = term = list(vector)
    for _ in range(terms - 1):
        values = [w.detach().requires_grad_(True) for w in at]
        gradients = differentiate(loss(values), values, keep=True)
        product = sum((g * r * t).sum() for g, r, t in zip(gradients, steps, term, strict=True))
        assert isinstance(product, Tensor)
        curved = differentiate(product, values)
        term = [t - c for t, c in zip(term, curved, strict=True)]
        total = [s + t for s, t in zip(total, term, strict=True)]
    return total


def differentiate(value: Tensor, parameters: Sequence[Tensor], keep: bool = False) -> list[Tensor]:
    """Return the gradients of a value, zeros where it does not depend on a parameter; keep: to differentiate again."""
    if not value.requires_grad:
        return [torch.zeros_like(w) for w in parameters]
    gradients = torch.autograd.grad(value, parameters, create_graph=keep, retain_graph=True, allow_unused=True)
    return [torch.zeros_like(w) if g is None else g for g, w in zip(gradients, parameters, strict=True)]


def push(vector: Sequence[Tensor], through: Sequence[Tensor], parameters: Sequence[Tensor]) -> list[Tensor]:
    """Return v^T d(through)/d(parameters) by parameter."""
    product = sum((v.detach() * t).sum() for v, t in zip(vector, through, strict=True))
    assert isinstance(product, Tensor)
    return differentiate(product, parameters)


def symmetric_divergence(mean: Tensor, var: Tensor, other_mean: Tensor, other_var: Tensor, eps: float = 1e-5) -> Tensor:
    """Return (KL(p|q) + KL(q|p)) / 2 of normal distributions, by element; variances are meant plus eps."""
    p, q = var + eps, other_var + eps
    square = (mean - other_mean).square()
    return ((p + square) / q + (q + square) / p - 2) / 4


def differentiate_tuning(
    train_loss: Callable[[Sequence[Tensor]], Tensor],
    val_loss: Callable[[Sequence[Tensor]], Tensor],
    before: Sequence[Tensor],
    rates: Sequence[Tensor],
    meta: Sequence[Tensor],
    step: float | None,
    terms: int,
    against: bool = False,
) -> list[Tensor]:
    """Return dL_V/dtheta by parameter of `meta`, through the step w_n = w - r * grad L_T(w) from w `before`.

    step: in place of r in the series; None: r.

    against: subtract v^T d(grad L_T(w_n))/dtheta in place of adding v^T dw_n/dtheta, as FedL2P's release does: the
    implicit function's term, which is taken of w_n as a function of the rates and so turns their sign.
    """
    start = [w.detach().requires_grad_(True) for w in before]
    slopes = differentiate(train_loss(start), start, keep=True)
    after = [w.detach() - r * g for w, r, g in zip(before, rates, slopes, strict=True)]
    at = [w.detach().requires_grad_(True) for w in after]
    gradients = differentiate(val_loss(at), [*at, *meta])
    steps = [r.detach() if step is None else step for r in rates]
    vector = multiply_neumann(train_loss, at, gradients[: len(at)], steps, terms)
    if against:
        indirect = [-g for g in push(vector, differentiate(train_loss(after), after, keep=True), meta)]
    else:
        indirect = push(vector, after, meta)
    return [one + other for one, other in zip(gradients[len(at) :], indirect, strict=True)]
