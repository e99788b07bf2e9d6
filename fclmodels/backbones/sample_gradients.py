"""Squares of the gradients of single samples, summed over a batch: what the diagonal of a Fisher matrix is made of.

One backward pass of the batch tells what flows back to each layer's output. A sample's gradient of a weight is the
product of that with the sample's own input (Goodfellow 2015, arXiv 1510.01799), so no sample is taken by itself.
Samples must not meet in the network: it is to be in evaluation mode, with statistics of its own.
"""

from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.func import functional_call, vjp, vmap
from torch.nn import functional as F

# Numbers that the gradients of a few samples may be at once.
CHUNK = 2**24
Seen = dict[str, tuple[Tensor, Tensor]]  # input and output of each layer


def squared_gradients(
    network: nn.Module, names: Collection[str], samples: int, scores: Callable[[], Tensor]
) -> dict[str, Tensor]:
    """sum_i (d score_i / d W)^2 for the parameters of these names.

    scores: runs the network and returns a number a sample, [samples]. What they do not depend on has zeros.
    """
    parameters = dict(network.named_parameters())
    for name, parameter in parameters.items():
        parameter.requires_grad_(name in names)
    squares = {name: torch.zeros_like(parameters[name]) for name in names}
    layers = dict(network.named_modules())
    owners = {name.rpartition(".")[0] for name in names}
    with _watched({name: layers[name] for name in owners}, samples) as seen:
        total = scores().sum()
    if not seen:
        return squares
    flows = torch.autograd.grad(total, [output for _, output in seen.values()])
    with torch.no_grad():
        for (layer, (x, _)), flow in zip(seen.items(), flows, strict=True):
            few = _at_once(layers[layer], flow)
            for a, d in zip(x.split(few), flow.split(few), strict=True):
                for own, square in _squares(layers[layer], a, d).items():
                    if f"{layer}.{own}" in squares:
                        squares[f"{layer}.{own}"] += square
    return squares


@contextmanager
def _watched(layers: dict[str, nn.Module], samples: int) -> Iterator[Seen]:
    """While open, the input of each layer that works, and its output, are noted."""
    seen: Seen = {}

    def note(name: str, args: tuple[Tensor, ...], output: Tensor) -> Tensor:
        if name in seen:
            raise ValueError(f"{name} works twice on a sample: its two inputs cannot be told apart")
        # What is the same for all samples, such as positions, comes once: each gets its own copy of it.
        x, output = (t.expand(samples, *t.shape[1:]) for t in (args[0].detach(), output))
        seen[name] = x, output
        # The network may change what it goes on with in place.
        return output.clone()

    hooks = [
        module.register_forward_hook(lambda _, args, output, name=name: note(name, args, output))
        for name, module in layers.items()
    ]
    try:
        yield seen
    finally:
        for hook in hooks:
            hook.remove()


def _at_once(layer: nn.Module, flow: Tensor) -> int:
    """Of how many samples the gradients may exist at the same time, a convolution's input unfolded."""
    if isinstance(layer, nn.Linear) and flow.ndim == 2:
        return len(flow)
    numbers = sum(p.numel() for p in layer.parameters(recurse=False))
    if isinstance(layer, nn.Conv2d):
        numbers = max(numbers, layer.weight[0].numel() * flow[0, 0].numel())
    return max(1, CHUNK // numbers)


def _squares(layer: nn.Module, x: Tensor, flow: Tensor) -> dict[str, Tensor]:
    """By the layer's own names, from its input [B, ...] and what flows back to its output [B, ...]."""
    if isinstance(layer, nn.Linear):
        return _of_products(layer, _features_first(flow), _features_first(x))
    if isinstance(layer, nn.Conv2d) and layer.groups == 1 and not isinstance(layer.padding, str):
        unfolded = F.unfold(x, layer.kernel_size, layer.dilation, layer.padding, layer.stride)
        return _of_products(layer, flow.flatten(2), unfolded)
    return _by_autograd(layer, x, flow)


def _features_first(t: Tensor) -> Tensor:
    """[B, ..., F] as [B, F, positions]."""
    return t.reshape(len(t), -1, t.shape[-1]).mT


def _of_products(layer: nn.Linear | nn.Conv2d, flow: Tensor, x: Tensor) -> dict[str, Tensor]:
    """A layer whose output is W x + b at each position: flow [B, out, positions], x [B, in, positions]."""
    squares = {"weight": squared_products(flow, x).view_as(layer.weight)}
    return squares if layer.bias is None else {**squares, "bias": flow.sum(2).square().sum(0)}


def squared_products(D: Tensor, X: Tensor) -> Tensor:
    """sum_i (D_i X_i^T)^2, squared by element, for D [B, m, p] and X [B, n, p]: [m, n]."""
    if D.shape[2] == 1:
        return D[:, :, 0].square().T @ X[:, :, 0].square()
    return torch.bmm(D, X.mT).square_().sum(0)


def _by_autograd(layer: nn.Module, x: Tensor, flow: Tensor) -> dict[str, Tensor]:
    """Any other layer: backwards through it alone, by vmap."""
    parameters = {name: p.detach() for name, p in layer.named_parameters(recurse=False)}

    def of_sample(x: Tensor, flow: Tensor) -> dict[str, Tensor]:
        backwards = vjp(lambda own: functional_call(layer, own, (x[None],)), parameters)[1]
        (gradients,) = backwards(flow[None])
        return dict(gradients)

    return {name: gradients.square().sum(0) for name, gradients in vmap(of_sample)(x, flow).items()}
