"""Gradients of single samples, for a batch: their squares summed, as in a Fisher matrix's diagonal, or their norms.

One backward pass of the batch gives the gradient of each layer's output. A sample's gradient of a weight is the product
of that with the sample's own input (Goodfellow 2015, arXiv 1510.01799), so no sample needs a pass of its own. Samples
must not affect each other: the network is in evaluation mode, with running statistics.
"""

from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.func import functional_call, vjp, vmap
from torch.nn import functional as F

# Numbers in the gradients of the samples that are treated at once.
CHUNK = 2**24
InputsAndOutputs = dict[str, tuple[Tensor, Tensor]]  # input and output of each layer


def sum_squared_gradients(
    network: nn.Module, names: Collection[str], samples: int, scores: Callable[[], Tensor]
) -> dict[str, Tensor]:
    """Return sum_i (d score_i / d W)^2 for the parameters of these names.

    scores: runs the network and returns a number a sample, [samples]. Parameters without effect on them have zeros.
    """
    parameters = dict(network.named_parameters())
    squares = {name: torch.zeros_like(parameters[name]) for name in names}
    passes = _differentiate_outputs(network, names, samples, scores)
    with torch.no_grad():
        for name, (layer, x, flow) in passes.items():
            for a, d in _split_samples(layer, x, flow):
                for own, square in _sum_squares(layer, a, d).items():
                    if (parameter := _join(name, own)) in squares:
                        squares[parameter] += square
    return squares


def sample_gradient_norms(
    network: nn.Module, names: Collection[str], samples: int, scores: Callable[[], Tensor]
) -> Tensor:
    """Return ||d score_i / d W|| of each sample over the parameters of these names: [samples].

    scores: as for `sum_squared_gradients`. In a linear layer with one position it is ||d|| ||x||: no gradient is made.
    """
    parameter = next(network.parameters())
    squares = torch.zeros(samples, dtype=parameter.dtype, device=parameter.device)
    passes = _differentiate_outputs(network, names, samples, scores)
    with torch.no_grad():
        for name, (layer, x, flow) in passes.items():
            own_names = [own for own, _ in layer.named_parameters(recurse=False) if _join(name, own) in names]
            parts = _split_samples(layer, x, flow)
            squares += torch.cat([_compute_square_norms(layer, a, d, own_names) for a, d in parts])
    return squares.sqrt()


def _join(layer: str, own: str) -> str:
    return f"{layer}.{own}" if layer else own


def _differentiate_outputs(
    network: nn.Module, names: Collection[str], samples: int, scores: Callable[[], Tensor]
) -> dict[str, tuple[nn.Module, Tensor, Tensor]]:
    """Return each layer that has some of these parameters, its input, and the gradient of its output."""
    for name, parameter in network.named_parameters():
        parameter.requires_grad_(name in names)
    layers = dict(network.named_modules())
    owners = {name.rpartition(".")[0] for name in names}
    with _note_passes({name: layers[name] for name in owners}, samples) as passes:
        total = scores().sum()
    if not passes:
        return {}
    flows = torch.autograd.grad(total, [output for _, output in passes.values()])
    return {name: (layers[name], x, flow) for (name, (x, _)), flow in zip(passes.items(), flows, strict=True)}


def _split_samples(layer: nn.Module, x: Tensor, flow: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield a layer's input and its output's gradient, for as many samples as are treated at once."""
    few = _count_at_once(layer, flow)
    yield from zip(x.split(few), flow.split(few), strict=True)


@contextmanager
def _note_passes(layers: dict[str, nn.Module], samples: int) -> Iterator[InputsAndOutputs]:
    """Note, while open, the input and output of each layer that runs."""
    passes: InputsAndOutputs = {}

    def note(name: str, args: tuple[Tensor, ...], output: Tensor) -> Tensor:
        if name in passes:
            raise ValueError(f"{name} runs twice on a sample: its two inputs cannot be told apart")
        # Inputs that all samples share, such as positions, come once: each sample gets its own copy.
        x, output = (t.expand(samples, *t.shape[1:]) for t in (args[0].detach(), output))
        passes[name] = x, output
        # The network may change its copy in place.
        return output.clone()

    hooks = [
        module.register_forward_hook(lambda _, args, output, name=name: note(name, args, output))
        for name, module in layers.items()
    ]
    try:
        yield passes
    finally:
        for hook in hooks:
            hook.remove()


def _count_at_once(layer: nn.Module, flow: Tensor) -> int:
    """Return the number of samples whose gradients may exist at once, a convolution's input unfolded."""
    if isinstance(layer, nn.Linear) and flow.ndim == 2:
        return len(flow)
    numbers = sum(p.numel() for p in layer.parameters(recurse=False))
    if isinstance(layer, nn.Conv2d):
        numbers = max(numbers, layer.weight[0].numel() * flow[0, 0].numel())
    return max(1, CHUNK // numbers)


def _sum_squares(layer: nn.Module, x: Tensor, flow: Tensor) -> dict[str, Tensor]:
    """Return sums by the layer's own names, from its input [B, ...] and its output's gradient [B, ...]."""
    if (factors := _collect_factors(layer, x, flow)) is not None:
        assert isinstance(layer, nn.Linear | nn.Conv2d)
        D, X = factors
        squares = {"weight": sum_squared_products(D, X).view_as(layer.weight)}
        return squares if layer.bias is None else {**squares, "bias": D.sum(2).square().sum(0)}
    return {name: gradients.square().sum(0) for name, gradients in _compute_gradients_by_sample(layer, x, flow).items()}


def _compute_square_norms(layer: nn.Module, x: Tensor, flow: Tensor, names: Collection[str]) -> Tensor:
    """Return ||d score_i / d W||^2 over the layer's parameters of these own names: [B]."""
    if (factors := _collect_factors(layer, x, flow)) is not None:
        D, X = factors
        squares = {"weight": compute_square_products(D, X), "bias": D.sum(2).square().sum(1)}
    else:
        gradients = _compute_gradients_by_sample(layer, x, flow)
        squares = {name: of_name.flatten(1).square().sum(1) for name, of_name in gradients.items()}
    return torch.stack([squares[name] for name in names]).sum(0)


def _collect_factors(layer: nn.Module, x: Tensor, flow: Tensor) -> tuple[Tensor, Tensor] | None:
    """Return D [B, out, positions] and X [B, in, positions] of a layer W x + b; a sample's gradient of W is D_i X_i^T.

    None for other layers.
    """
    if isinstance(layer, nn.Linear):
        return _move_features_first(flow), _move_features_first(x)
    if isinstance(layer, nn.Conv2d) and layer.groups == 1 and not isinstance(layer.padding, str):
        return flow.flatten(2), F.unfold(x, layer.kernel_size, layer.dilation, layer.padding, layer.stride)
    return None


def _move_features_first(t: Tensor) -> Tensor:
    """Return [B, ..., F] as [B, F, positions]."""
    return t.reshape(len(t), -1, t.shape[-1]).mT


def sum_squared_products(D: Tensor, X: Tensor) -> Tensor:
    """Return sum_i (D_i X_i^T)^2, squared by element, for D [B, m, p] and X [B, n, p]: [m, n]."""
    if D.shape[2] == 1:
        return D[:, :, 0].square().T @ X[:, :, 0].square()
    return torch.bmm(D, X.mT).square_().sum(0)


def compute_square_products(D: Tensor, X: Tensor) -> Tensor:
    """Return ||D_i X_i^T||^2 for D [B, m, p] and X [B, n, p]: [B]."""
    if D.shape[2] == 1:
        return D.square().sum((1, 2)) * X.square().sum((1, 2))
    return torch.bmm(D, X.mT).square_().sum((1, 2))


def _compute_gradients_by_sample(layer: nn.Module, x: Tensor, flow: Tensor) -> dict[str, Tensor]:
    """Return the gradients of each sample [B, ...] by the layer's own names: backwards through it alone, by vmap."""
    parameters = {name: p.detach() for name, p in layer.named_parameters(recurse=False)}

    def differentiate(x: Tensor, flow: Tensor) -> dict[str, Tensor]:
        backwards = vjp(lambda own: functional_call(layer, own, (x[None],)), parameters)[1]
        (gradients,) = backwards(flow[None])
        return dict(gradients)

    return vmap(differentiate)(x, flow)
