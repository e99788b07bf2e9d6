"""Fine-tuning of a model that two small networks steer: a rate for each tensor, a share of mixing for each batch norm.

From a frozen model and a client's rows come the inputs (FedL2P): for each batch norm the mean over channels of the
symmetric divergence of the stored statistics and the client's, and for each convolution, batch norm and linear layer
the mean and the deviation of all numbers that enter it. Then

    w_j <- w_j - lr_j LR_j grad_j,      batch norm by (1 - beta_l) stored + beta_l present statistics,

present ones being the batch's while tuning, and in answers their mean over the batches that the model was tuned on.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.modules.batchnorm import _BatchNorm

from fclmodels.backbones.model.network import Network
from fclmodels.data.batches import Batch
from fclmodels.numerics.meta_gradient import symmetric_divergence

HIDDEN = 100
GAIN = 0.1
MOST_RATE = 1000.0
EPS = 1e-5
Weights = dict[str, Tensor]
Statistics = dict[str, tuple[Tensor, Tensor]]  # mean and variance by channel, of each batch norm


class Facts(NamedTuple):
    """What a client's rows look like to a frozen model."""

    divergences: Tensor  # [batch norms]
    moments: Tensor  # [2 layers], mean and deviation of what enters each


class Steering(nn.Module):
    """Both networks, and the rates lr_j that they scale."""

    def __init__(self, spec: Mapping[str, Any]) -> None:
        super().__init__()
        self.rates = nn.Parameter(torch.full((spec["tensors"],), float(spec["lr"])))
        self.for_rates = build_net(2 * spec["layers"], spec["tensors"], 1.0)
        self.for_norms = build_net(spec["norms"], spec["norms"], 0.5) if spec["norms"] else None

    def steer(self, facts: Facts) -> tuple[Tensor, Tensor]:
        """Return lr_j LR_j [tensors] and beta_l [batch norms]."""
        rates = self.rates * clamp_straight(self.for_rates(facts.moments), MOST_RATE)
        if self.for_norms is None:
            return rates, facts.divergences
        return rates, clamp_straight(self.for_norms(facts.divergences), 1.0)


def build_net(inputs: int, outputs: int, bias: float) -> nn.Sequential:
    """Return inputs-100-100-outputs with ReLU, of Xavier's normal weights times 0.1 and this bias in each layer."""
    layers = [nn.Linear(inputs, HIDDEN), nn.Linear(HIDDEN, HIDDEN), nn.Linear(HIDDEN, outputs)]
    for layer in layers:
        nn.init.xavier_normal_(layer.weight, gain=GAIN)
        nn.init.constant_(layer.bias, bias)
    return nn.Sequential(layers[0], nn.ReLU(), layers[1], nn.ReLU(), layers[2])


def clamp_straight(values: Tensor, most: float) -> Tensor:
    """Return values within 0 and `most`, with the gradients of values that are not clamped."""
    return values + (values.clamp(0, most) - values).detach()


def list_norms(network: Network) -> dict[str, _BatchNorm]:
    """Return the backbone's batch norms that have running statistics."""
    layers = network.backbone.named_modules()
    return {n: layer for n, layer in layers if isinstance(layer, _BatchNorm) and layer.running_mean is not None}


def list_layers(network: Network) -> dict[str, nn.Module]:
    """Return the layers of the backbone whose inputs are looked at, in the order in which the network names them."""
    kinds = nn.Conv2d | nn.Linear | _BatchNorm
    return {name: layer for name, layer in network.backbone.named_modules() if isinstance(layer, kinds)}


def list_tuned(network: Network, task: int) -> list[str]:
    """Return the names of the parameters that have a rate: the backbone's, and those of the task's head."""
    head = f"heads.{task if network.spec.head == 'per-task' else 0}."
    return [name for name, _ in network.named_parameters() if name.startswith(("backbone.", head))]


def describe_steering(network: Network, lr: float) -> dict[str, Any]:
    """Return the spec of the networks that steer this one."""
    sizes = {"layers": len(list_layers(network)) + 1, "norms": len(list_norms(network))}
    return {**sizes, "tensors": len(list_tuned(network, 0)), "lr": lr}


@torch.no_grad()
def look_at(network: Network, batches: Sequence[Tensor]) -> Facts:
    """Return the facts of inputs [n, ...] in batches, of a network in evaluation mode."""
    norms, layers = list_norms(network), list_layers(network)
    sums: dict[str, list[Tensor]] = {name: [] for name in [*layers, "head"]}
    channels: dict[str, list[Tensor]] = {name: [] for name in norms}

    def note(name: str, layer: nn.Module, args: tuple[Tensor, ...]) -> None:
        x = args[0].double()
        sums[name].append(torch.stack([torch.tensor(float(x.numel())).to(x), x.sum(), x.square().sum()]))
        if name in channels:
            count = torch.full((x.shape[1],), x.numel() / x.shape[1]).to(x)
            channels[name].append(torch.stack([count, x.sum((0, 2, 3)), x.square().sum((0, 2, 3))]))

    hooks = [layer.register_forward_pre_hook(partial(note, name)) for name, layer in layers.items()]
    try:
        for inputs in batches:
            note("head", network, (network.backbone(inputs),))
    finally:
        for hook in hooks:
            hook.remove()
    moments = [find_moments(torch.stack(parts).sum(0)) for parts in sums.values() if parts]
    statistics = {name: find_moments(torch.stack(parts).sum(0)) for name, parts in channels.items()}
    divergences = [
        symmetric_divergence(layer.running_mean, layer.running_var, *statistics[name], EPS).mean()
        for name, layer in norms.items()
        if layer.running_mean is not None and layer.running_var is not None
    ]
    deviations = [m for mean, var in moments for m in (mean, (var + EPS).sqrt())]
    return Facts(torch.stack(divergences) if divergences else torch.zeros(0), torch.stack(deviations))


def find_moments(sums: Tensor) -> tuple[Tensor, Tensor]:
    """Return mean and variance, from counts, sums and sums of squares."""
    count, total, squares = sums
    mean = total / count
    return mean.float(), (squares / count - mean.square()).clamp(min=0).float()


def normalise(x: Tensor, layer: nn.Module, share: Tensor, present: tuple[Tensor, Tensor]) -> Tensor:
    """Return batch norm of x [n, C, H, W] by (1 - share) stored + share present mean and variance."""
    assert isinstance(layer, _BatchNorm)
    assert layer.running_mean is not None
    assert layer.running_var is not None
    stored = layer.running_mean, layer.running_var
    mean, var = ((1 - share) * old + share * new for old, new in zip(stored, present, strict=True))
    out = (x - mean[:, None, None]) * (var + layer.eps).rsqrt()[:, None, None]
    return out * layer.weight[:, None, None] + layer.bias[:, None, None] if layer.affine else out


@contextmanager
def mix_norms(
    network: Network, shares: Tensor, statistics: Statistics | None, notes: dict[str, list[Tensor]] | None = None
) -> Iterator[None]:
    """Let batch norms mix stored statistics with these while open, or (None) with the batch's, which are noted."""

    def replace_output(name: str, share: Tensor, layer: nn.Module, args: tuple[Tensor, ...], output: Tensor) -> Tensor:
        x = args[0]
        present = statistics[name] if statistics else (x.mean((0, 2, 3)), x.var((0, 2, 3), correction=0))
        if notes is not None:
            notes.setdefault(name, []).append(torch.stack(present))
        return normalise(x, layer, share, present)

    norms = list_norms(network)
    hooks = [
        layer.register_forward_hook(partial(replace_output, name, share))
        for (name, layer), share in zip(norms.items(), shares, strict=True)
    ]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


class SteeredTuning:
    """Losses of a network with other values of its tuned parameters."""

    def __init__(self, network: Network, task: int, score: Callable[[Tensor, Batch], Tensor], facts: Facts) -> None:
        self.network = network.eval()
        self.names = list_tuned(network, task)
        self.score = score  # of features and a batch: the loss
        self.facts = facts

    def read(self) -> list[Tensor]:
        """Return the parameters as they are."""
        return [self.network.get_parameter(name).detach().clone() for name in self.names]

    def measure(
        self,
        batch: Batch,
        shares: Tensor,
        values: Sequence[Tensor],
        statistics: Statistics | None = None,
        notes: dict[str, list[Tensor]] | None = None,
    ) -> Tensor:
        """Return the loss of a batch at these values, with these present statistics or (None) the batch's own."""
        weights = {f"network.{name}": value for name, value in zip(self.names, values, strict=True)}
        with mix_norms(self.network, shares, statistics, notes):
            loss: Tensor = functional_call(_Scored(self), weights, (batch,))
        return loss

    @torch.no_grad()
    def record(self, batches: Sequence[Batch], shares: Tensor, values: Sequence[Tensor]) -> Statistics:
        """Return the mean over batches of their statistics at these values."""
        notes: dict[str, list[Tensor]] = {}
        for batch in batches:
            self.measure(batch, shares, values, notes=notes)
        means = {name: torch.stack(parts).mean(0) for name, parts in notes.items()}
        return {name: (mean[0], mean[1]) for name, mean in means.items()}

    def descend(self, values: list[Tensor], batches: Sequence[Batch], rates: Tensor, shares: Tensor) -> list[Tensor]:
        """Return the values after a step on each batch."""
        for batch in batches:
            at = [w.detach().requires_grad_(True) for w in values]
            gradients = torch.autograd.grad(self.measure(batch, shares, at), at, allow_unused=True)
            values = [
                w.detach() if g is None else w.detach() - r * g
                for w, r, g in zip(at, rates.detach(), gradients, strict=True)
            ]
        return values


class _Scored(nn.Module):
    def __init__(self, tuning: SteeredTuning) -> None:
        super().__init__()
        self.network = tuning.network
        self.score = tuning.score

    def forward(self, batch: Batch) -> Tensor:
        return self.score(self.network.backbone(batch.inputs), batch)
