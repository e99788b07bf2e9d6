"""Optimisers of local training and of work on the server, and their states as trees.

SGD is torch's fused step without torch's class around it: the same bits, without a third of a small step's time, and
without the compiler that `torch.optim.Optimizer` imports, which takes each process a second to begin with.
"""

from collections.abc import Sequence
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.optim.sgd import sgd

from fclmodels.settings.schema import OptimizerSettings
from fclmodels.storage.trees import Tree


class Optimiser(Protocol):
    """Steps of parameters down their gradients; those of torch.optim are such."""

    param_groups: list[dict[str, Any]]

    def zero_grad(self) -> None: ...
    def step(self) -> Any: ...
    def state_dict(self) -> dict[str, Any]: ...
    def load_state_dict(self, state_dict: dict[str, Any]) -> None: ...


class Sgd:
    """Moves parameters by -lr m, m <- momentum m + g + weight_decay w."""

    def __init__(self, parameters: Sequence[nn.Parameter], lr: float, momentum: float, weight_decay: float) -> None:
        self.parameters = list(parameters)
        self.param_groups: list[dict[str, Any]] = [{"lr": lr, "momentum": momentum, "weight_decay": weight_decay}]
        self.buffers: list[Tensor | None] = [None] * len(self.parameters)

    def zero_grad(self) -> None:
        for parameter in self.parameters:
            parameter.grad = None

    @torch.no_grad()
    def step(self) -> None:
        moving = [place for place, parameter in enumerate(self.parameters) if parameter.grad is not None]
        fresh = [place for place in moving if self.buffers[place] is None]
        if not fresh or len(fresh) == len(moving):
            self._step_some(moving)
        else:  # torch takes buffers of all parameters, or of none
            self._step_some(fresh)
            self._step_some(sorted({*moving} - {*fresh}))

    def _step_some(self, places: list[int]) -> None:
        parameters: list[Tensor] = [self.parameters[place] for place in places]
        buffers = [self.buffers[place] for place in places]
        gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
        sgd(
            parameters,
            gradients,
            buffers,
            fused=True,
            dampening=0,
            nesterov=False,
            maximize=False,
            **self.param_groups[0],
        )
        for place, buffer in zip(places, buffers, strict=True):
            self.buffers[place] = buffer

    def state_dict(self) -> dict[str, Any]:
        """Return the buffers in the form of torch's optimisers."""
        state = {place: {"momentum_buffer": m} for place, m in enumerate(self.buffers) if m is not None}
        return {"state": state, "param_groups": self.param_groups}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        for place, state in state_dict["state"].items():
            self.buffers[place] = state["momentum_buffer"].clone()


def make_optimiser(
    settings: OptimizerSettings, parameters: list[nn.Parameter], round: int, epochs: int = 0
) -> Optimiser:
    """Return a new optimiser for a task's state after so many rounds, or local epochs, as `lr_decay` counts in."""
    lr, decay = settings.compute_lr(round, epochs), settings.weight_decay
    if settings.kind == "sgd":
        return Sgd(parameters, lr, settings.momentum, decay)
    kind = torch.optim.Adam if settings.kind == "adam" else torch.optim.AdamW
    return kind(parameters, lr, weight_decay=decay, fused=True)


def read_optimiser_state(optimiser: Optimiser) -> Tree:
    """Return the state of an optimiser as a tree: moments and counts, by the place of each parameter."""
    return {str(place): state for place, state in optimiser.state_dict()["state"].items()}


def restore_optimiser(optimiser: Optimiser, tree: Tree) -> None:
    """Let an optimiser go on from such a state; its settings stay."""
    state = {int(place): values for place, values in tree.items()}
    optimiser.load_state_dict({"state": state, "param_groups": optimiser.state_dict()["param_groups"]})
