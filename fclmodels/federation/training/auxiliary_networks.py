"""Networks beside the model: a generator, a flow, a meta-network.

A method declares each once: how it is built, how clients train it, and where it lives. Its state is part of the
server's (`Server.networks`) or, where it stays with the clients, of their memories (`networks`). A client's training
has it in `training.networks`.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn

from fclmodels.federation.client import Client
from fclmodels.federation.exchange import Form
from fclmodels.federation.messages import Part, Payload
from fclmodels.randomness import seed_torch
from fclmodels.settings.schema import OptimizerSettings

State = dict[str, Tensor]


@dataclass(frozen=True)
class Auxiliary:
    """The declaration of a network beside the model."""

    name: str
    spec: Mapping[str, Any]  # values of JSON, from which `build` makes the network
    build: Callable[[Mapping[str, Any]], nn.Module]
    # averaged: clients train it, the server averages. server: clients download it, the server alone trains it.
    # client: each client has its own, which never travels.
    place: Literal["averaged", "server", "client"]
    optimizer: OptimizerSettings | None = None  # its own in local training; None: that does not train it

    def __post_init__(self) -> None:
        if self.place == "server" and self.optimizer is not None:
            raise ValueError(f"{self.name}: clients train it, and nobody gets what they learn. Place it elsewhere.")

    @property
    def update_part(self) -> str:
        """The name of the part with a client's update of it."""
        return f"{self.name}-update"


class AuxiliaryNetworks:
    """All auxiliary networks of a method, each built once a process."""

    def __init__(self, auxiliaries: list[Auxiliary], seed: int, device: torch.device) -> None:
        self.auxiliaries = auxiliaries
        self.seed = seed
        self.device = device
        self._modules: dict[str, nn.Module] = {}
        self._initial: dict[str, State] = {}

    def list_by_place(self, *places: str) -> list[Auxiliary]:
        """Return those that live at these places."""
        return [auxiliary for auxiliary in self.auxiliaries if auxiliary.place in places]

    def create_initial(self) -> dict[str, State]:
        """Return the initial states of those that the server has, by the run's seed."""
        return {a.name: self._draw(a) for a in self.list_by_place("averaged", "server")}

    def load(self, auxiliary: Auxiliary, state: Mapping[str, Tensor]) -> nn.Module:
        """Return the network with this state; the next call changes it."""
        self._draw(auxiliary)
        module = self._modules[auxiliary.name]
        module.load_state_dict(state)
        return module

    def make_payload(self, networks: Mapping[str, State]) -> Payload:
        """Return the parts that clients download."""
        return {a.name: Part("generator", networks[a.name]) for a in self.list_by_place("averaged", "server")}

    def make_form(self) -> Form:
        """Return the outlines of clients' updates of those that are averaged."""
        return {
            a.update_part: Part("update", _make_outline(self._draw(a)), over="weight", of=a.name)
            for a in self.list_by_place("averaged")
        }

    def start(self, client: Client, payload: Payload) -> dict[str, tuple[nn.Module, Auxiliary]]:
        """Return the networks that a client trains with, from what it was sent and what it remembers."""
        states = {
            a.name: payload[a.name].tensors for a in self.list_by_place("averaged", "server") if a.name in payload
        }
        own = client.memory.get("networks", {})
        for auxiliary in self.list_by_place("client"):
            states[auxiliary.name] = own.get(auxiliary.name) or self._draw(auxiliary)
        modules = {a.name: (self.load(a, states[a.name]), a) for a in self.auxiliaries if a.name in states}
        for module, auxiliary in modules.values():
            is_trained = auxiliary.optimizer is not None
            module.train(is_trained).requires_grad_(is_trained)
        return modules

    def collect_updates(
        self, networks: Mapping[str, tuple[nn.Module, Auxiliary]], payload: Payload, weight: float
    ) -> dict[str, State]:
        """Return a client's weighted updates of those that are averaged, by part."""
        parts: dict[str, State] = {}
        for module, auxiliary in networks.values():
            if auxiliary.place == "averaged":
                start = payload[auxiliary.name].tensors
                state = module.state_dict()
                moved = {n: (state[n] - start[n]) * weight for n in state if state[n].is_floating_point()}
                parts[auxiliary.update_part] = moved
        return parts

    def make_memory(self, networks: Mapping[str, tuple[nn.Module, Auxiliary]]) -> dict[str, dict[str, State]]:
        """Return what a client remembers of those that stay with it."""
        own = {name: copy_state(module) for name, (module, a) in networks.items() if a.place == "client"}
        return {"networks": own} if own else {}

    def average(self, networks: Mapping[str, State], sums: Mapping[str, State], share: float) -> dict[str, State]:
        """Return the server's networks after a round, from summed updates by part, times this share."""
        moved = dict(networks)
        for auxiliary in self.list_by_place("averaged"):
            changes, state = sums[auxiliary.update_part], networks[auxiliary.name]
            moved[auxiliary.name] = {**state, **{n: state[n].add(c, alpha=share) for n, c in changes.items()}}
        return moved

    def _draw(self, auxiliary: Auxiliary) -> State:
        """Return the network's initial state, by the run's seed and its name, on the CPU."""
        if auxiliary.name not in self._modules:
            on_cpu = torch.device("cpu")
            # So that it can be trained, even if a predictor is the first to need it.
            with torch.inference_mode(False), seed_torch(self.seed, "auxiliary", auxiliary.name, device=on_cpu):
                module = auxiliary.build(auxiliary.spec)
                self._initial[auxiliary.name] = copy_state(module)
                self._modules[auxiliary.name] = module.to(self.device)
        return self._initial[auxiliary.name]


def copy_state(module: nn.Module) -> State:
    """Return a module's state on the CPU, in tensors that later training does not change."""
    return {name: tensor.detach().to("cpu", copy=True) for name, tensor in module.state_dict().items()}


def _make_outline(state: Mapping[str, Tensor]) -> State:
    return {name: tensor.to("meta") for name, tensor in state.items() if tensor.is_floating_point()}
