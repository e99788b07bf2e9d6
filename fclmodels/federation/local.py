"""The one local training loop. A method bends it with four hooks instead of copying it.

- `loss(training, batch)`: the loss of a batch; FedAvg's is cross entropy.
- `gradient(training)`: after the backward pass; may change the gradients in place.
- `step(training, steps)`: the optimiser's whole proposed step {name: tensor}, so momentum, Adam and weight decay
  are in it; returns the step that is taken. It costs a copy of the model, so where no method bends it it is None.
- `after(training)`: after each step; may change the parameters in place.
"""

from collections.abc import Collection
from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from fclmodels.backbones.network import Network
from fclmodels.data.batches import Batch
from fclmodels.federation.client import Client
from fclmodels.federation.kept import activations
from fclmodels.randomness import ambient
from fclmodels.settings import OptimizerSettings

if TYPE_CHECKING:
    from fclmodels.methods.base import Method


class LocalTraining:
    """One client's training in one round, from the weights `start` on; hooks see it whole."""

    def __init__(self, method: "Method", client: Client, network: Network, start: dict[str, Tensor]) -> None:
        self.method = method
        self.client = client
        self.network = network
        self.start = start
        self.parameters = method.trainable(network, client.task)
        lower = client.run.params.optimizer.precision == "bfloat16"
        self.precision = partial(torch.autocast, client.run.device.type, torch.bfloat16, enabled=lower)
        keeps = client.run.params.model.keep_frozen
        self.below = activations(client, network, self.parameters) if keeps else None

    def run(self) -> float:
        """Train all local epochs; the mean loss over samples. The network holds the result."""
        client = self.client
        for name, parameter in self.network.named_parameters():
            parameter.requires_grad_(name in self.parameters)
        optimiser = make_optimiser(client.run.params.optimizer, list(self.parameters.values()), client.round)
        total, samples = torch.zeros((), device=client.run.device), 0
        with ambient(client.run.seed, "dropout", client.task, client.round, client.index, device=client.run.device):
            for epoch in client.epochs():
                for batch in epoch:
                    total += self._train_on(batch, optimiser) * len(batch.labels)
                    samples += len(batch.labels)
        return float(total) / max(samples, 1)

    def _train_on(self, batch: Batch, optimiser: torch.optim.Optimizer) -> Tensor:
        optimiser.zero_grad()
        with self.precision():
            loss = self.method.loss(self, batch)
        loss.backward()
        self.method.gradient(self)
        if self.method.step is None:
            optimiser.step()
        else:
            before = {name: parameter.detach().clone() for name, parameter in self.parameters.items()}
            optimiser.step()
            self._take(before, self.method.step(self, self._since(before)))
        self.method.after(self)
        return loss.detach()

    def features(self, batch: Batch) -> Tensor:
        """Those of the batch; of its own samples from the first block on that may change, where what is below is kept.

        What a client replays passes the whole network.
        """
        backbone = self.network.backbone
        if self.below is None or batch.samples is None:
            return backbone(batch.inputs)
        return backbone.onwards(self.below.of(batch), self.below.blocks)

    @property
    def gradients(self) -> dict[str, Tensor]:
        """After the backward pass, by name; what the loss does not reach has none."""
        return {name: p.grad for name, p in self.parameters.items() if p.grad is not None}

    def gradients_of(self, loss: Tensor, names: Collection[str] | None = None) -> dict[str, Tensor]:
        """Those of another loss than the step's, over all parameters or some; what it does not reach has none."""
        over = {name: p for name, p in self.parameters.items() if names is None or name in names}
        found = torch.autograd.grad(loss, list(over.values()), allow_unused=True)
        return {name: g for name, g in zip(over, found, strict=True) if g is not None}

    @torch.no_grad()
    def update(self) -> dict[str, Tensor]:
        """How far training has moved each trainable parameter.

        It is written over the last gradients, whose memory is free now: a model's worth less to allocate a client.
        """
        places = {name: torch.empty_like(p) if p.grad is None else p.grad for name, p in self.parameters.items()}
        return {name: torch.sub(p, self.start[name], out=places[name]) for name, p in self.parameters.items()}

    @torch.no_grad()
    def _since(self, origin: dict[str, Tensor]) -> dict[str, Tensor]:
        moved = torch._foreach_sub(list(self.parameters.values()), [origin[name] for name in self.parameters])
        return dict(zip(self.parameters, moved, strict=True))

    @torch.no_grad()
    def _take(self, before: dict[str, Tensor], steps: dict[str, Tensor]) -> None:
        for name, parameter in self.parameters.items():
            parameter.copy_(before[name] + steps[name])


def make_optimiser(settings: OptimizerSettings, parameters: list[nn.Parameter], round: int) -> torch.optim.Optimizer:
    """A new one for a round of a task; its learning rate has fallen by lr_decay each round."""
    lr, decay = settings.lr * settings.lr_decay**round, settings.weight_decay
    if settings.kind == "sgd":
        return torch.optim.SGD(parameters, lr, settings.momentum, weight_decay=decay, fused=True)
    kind = torch.optim.Adam if settings.kind == "adam" else torch.optim.AdamW
    return kind(parameters, lr, weight_decay=decay, fused=True)
