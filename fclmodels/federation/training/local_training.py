"""The one local training loop. A method bends it with hooks instead of copying it.

- `start_training(training, payload)`: gives the training what it needs besides the network (`add`, `enclose`).
- `compute_loss(training, batch)`: the loss of a batch; FedAvg's is cross entropy.
- `change_gradients(training)`: after the backward pass; may change the gradients in place.
- `step(training, steps)`: gets the optimiser's proposed step {name: tensor}, with momentum, Adam and weight decay in
  it; returns the step to take. It costs a copy of the model, so it is None unless a method needs it.
- `finish_step(training)`: after each step; may change the parameters in place.
- `finish_training(training)`: after the last step; may change the parameters in place.
"""

from collections.abc import Collection, Sequence
from contextlib import AbstractContextManager, ExitStack
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import torch
from torch import Tensor, nn

from fclmodels.backbones.model.network import Network
from fclmodels.data.batches import Batch
from fclmodels.federation.client import Client
from fclmodels.federation.training.auxiliary_networks import Auxiliary
from fclmodels.federation.training.optimisers import (
    Optimiser,
    make_optimiser,
    read_optimiser_state,
    restore_optimiser,
)
from fclmodels.randomness import seed_torch
from fclmodels.settings.schema import OptimizerSettings

if TYPE_CHECKING:
    from fclmodels.federation.method import Method

T = TypeVar("T")


class ParameterGroup(NamedTuple):
    """Parameters by name, and the settings of the optimiser that trains them."""

    names: Sequence[str]
    optimizer: OptimizerSettings


class LocalTraining:
    """One client's training in one round, from the weights `start` on; each hook gets it."""

    def __init__(self, method: "Method", client: Client, network: Network, start: dict[str, Tensor]) -> None:
        self.method = method
        self.client = client
        self.network = network
        self.start = start
        self.parameters = method.select_trainable(network, client.task)
        use_bfloat16 = client.run.params.optimizer.precision == "bfloat16"
        self.precision = partial(torch.autocast, client.run.device.type, torch.bfloat16, enabled=use_bfloat16)
        self.frozen_activations = None
        if client.run.params.model.keep_frozen:
            from fclmodels.federation.training.frozen_activations import compute_activations

            self.frozen_activations = compute_activations(client, network, self.parameters)
        self.networks: dict[str, tuple[nn.Module, Auxiliary]] = {}  # beside the model, by name
        self._optimisers: list[Optimiser] = []
        self._epochs = 0  # of this round that are over
        self._schedules: list[tuple[Optimiser, OptimizerSettings]] = []
        self._parts: dict[type, object] = {}
        self._contexts: list[AbstractContextManager[object]] = []

    def add(self, part: object) -> None:
        """Hold an object of a method for its hooks, which get it back by its class."""
        self._parts[type(part)] = part

    def find_added(self, kind: type[T]) -> T | None:
        """Return the object of this class that was added; None in a training that has none (a monitor's, say)."""
        part = self._parts.get(kind)
        assert part is None or isinstance(part, kind)
        return part

    def enclose(self, context: AbstractContextManager[object]) -> None:
        """Take all local steps inside of this context."""
        self._contexts.append(context)

    def run(self) -> float:
        """Train all local epochs; return the mean loss over samples. The network holds the result."""
        client = self.client
        for name, parameter in self.network.named_parameters():
            parameter.requires_grad_(name in self.parameters)
        optimisers = self.make_optimisers()
        total, samples = torch.zeros((), device=client.run.device), 0
        key = ("dropout", client.task, client.round, client.index)
        with ExitStack() as contexts, seed_torch(client.run.seed, *key, device=client.run.device):
            for context in self._contexts:
                contexts.enter_context(context)
            for done, epoch in enumerate(self.method.yield_epochs(self)):
                self._begin_epoch(done)
                for batch in epoch:
                    total += self.take_step(batch, optimisers) * len(batch.labels)
                    samples += len(batch.labels)
        self.method.finish_training(self)
        return float(total) / max(samples, 1)

    def take_step(self, batch: Batch, optimisers: Sequence[Optimiser]) -> Tensor:
        """Take one step on a batch; return its loss."""
        for optimiser in optimisers:
            optimiser.zero_grad()
        with self.precision():
            loss = self.method.compute_loss(self, batch)
        loss.backward()
        self.method.change_gradients(self)
        if (clip := self.client.run.params.optimizer.clip) is not None:
            nn.utils.clip_grad_norm_(self.parameters.values(), clip)
        if self.method.step is None:
            for optimiser in optimisers:
                optimiser.step()
        else:
            before = {name: parameter.detach().clone() for name, parameter in self.parameters.items()}
            for optimiser in optimisers:
                optimiser.step()
            self.move_from(before, self.method.step(self, self.measure_movement(before)))
        self.method.finish_step(self)
        return loss.detach()

    def collect_optimiser_memory(self) -> dict[str, Any]:
        """Return the optimisers' states as a client remembers them until the task ends."""
        states = [read_optimiser_state(optimiser) for optimiser in self._optimisers]
        return {"optimisers": {"task": self.client.task, "states": states}}

    def _restore_optimisers(self, optimisers: list[Optimiser]) -> None:
        saved = self.client.memory.get("optimisers", {"task": -1})
        if saved["task"] == self.client.task:
            for optimiser, state in zip(optimisers, saved["states"], strict=True):
                restore_optimiser(optimiser, state)

    def make_optimisers(self) -> list[Optimiser]:
        """Return the optimisers of this round: of the method's groups, of all other parameters, of networks beside."""
        settings, groups = self.client.run.params.optimizer, self.method.group_parameters(self)
        grouped = {name for group in groups for name in group.names}
        others = [parameter for name, parameter in self.parameters.items() if name not in grouped]
        members = [(settings, others)] if others else []
        members += [(group.optimizer, [self.parameters[name] for name in group.names]) for group in groups]
        for module, auxiliary in self.networks.values():
            if auxiliary.optimizer is not None:
                members.append((auxiliary.optimizer, list(module.parameters())))
        optimisers = [make_optimiser(of, parameters, *self.progress) for of, parameters in members]
        self._schedules = [(optimiser, of) for optimiser, (of, _) in zip(optimisers, members, strict=True)]
        if self.method.keeps_optimisers:
            self._restore_optimisers(optimisers)
            self._optimisers = optimisers
        return optimisers

    @property
    def progress(self) -> tuple[int, int]:
        """The rounds and the local epochs of the task that are over; outside of rounds as in the first."""
        rounds = max(self.client.round, 0)
        return rounds, rounds * self.client.run.params.federation.local_epochs + self._epochs

    @property
    def lr(self) -> float:
        """The present learning rate of the clients' optimiser."""
        return self.client.run.params.optimizer.compute_lr(*self.progress)

    def _begin_epoch(self, epochs: int) -> None:
        """Set the learning rates for the epoch after so many of this round."""
        self._epochs = epochs
        for optimiser, settings in self._schedules:
            for group in optimiser.param_groups:
                group["lr"] = settings.compute_lr(*self.progress)

    def compute_features(self, batch: Batch, *further: Tensor) -> Tensor:
        """Return the features [B, F] of a batch, and of further inputs that pass with it.

        Where activations of frozen blocks are cached, the client's samples pass the others alone.
        """
        backbone, cache = self.network.backbone, self.frozen_activations
        if cache is None or batch.samples is None:
            return backbone(torch.cat([batch.inputs, *further]) if further else batch.inputs)
        below = [cache.gather_rows(batch, backbone), *(cache.compute(inputs, backbone) for inputs in further)]
        return backbone.run_rest(torch.cat(below) if further else below[0], cache.blocks)

    @property
    def gradients(self) -> dict[str, Tensor]:
        """The gradients after the backward pass, by name; a parameter that the loss does not reach has none."""
        return {name: p.grad for name, p in self.parameters.items() if p.grad is not None}

    def compute_gradients(self, loss: Tensor, names: Collection[str] | None = None) -> dict[str, Tensor]:
        """Return the gradients of another loss than the step's, of all parameters or some, where it reaches them."""
        parameters = {name: p for name, p in self.parameters.items() if names is None or name in names}
        gradients = torch.autograd.grad(loss, list(parameters.values()), allow_unused=True)
        return {name: g for name, g in zip(parameters, gradients, strict=True) if g is not None}

    @torch.no_grad()
    def update(self) -> dict[str, Tensor]:
        """Return how far training has moved each trainable parameter.

        It is written over the last gradients, whose memory is free now: a model's worth less to allocate a client.
        """
        places = {name: torch.empty_like(p) if p.grad is None else p.grad for name, p in self.parameters.items()}
        return {name: torch.sub(p, self.start[name], out=places[name]) for name, p in self.parameters.items()}

    @torch.no_grad()
    def measure_movement(self, origin: dict[str, Tensor]) -> dict[str, Tensor]:
        """Return how far each parameter is from where it was, in new tensors."""
        moved = torch._foreach_sub(list(self.parameters.values()), [origin[name] for name in self.parameters])
        return dict(zip(self.parameters, moved, strict=True))

    @torch.no_grad()
    def move_from(self, before: dict[str, Tensor], steps: dict[str, Tensor]) -> None:
        """Put each parameter a step from where it was before."""
        for name, parameter in self.parameters.items():
            parameter.copy_(before[name] + steps[name])
