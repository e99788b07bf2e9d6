"""FedAvg of the tensors that a task adds to an adapter, and of the head: the base of methods with an adapter a task.

Tensors of other tasks (`backbone.prompts.<task>.*`) stay as they are and take part; clients download them once a task.
"""

from dataclasses import replace
from typing import ClassVar

from torch import Tensor, nn

from fclmodels.backbones.adapters.adapted import PROMPTS, Adapted
from fclmodels.backbones.adapters.low_rank import LowRank
from fclmodels.backbones.model.network import Network
from fclmodels.federation.client import Client
from fclmodels.federation.messages import Part, Payload
from fclmodels.federation.run_context import Run
from fclmodels.federation.server import Server
from fclmodels.methods.fedavg import FedAvg
from fclmodels.methods.parts.frozen_backbone import FrozenBackbone, get_backbone
from fclmodels.methods.parts.trained_network import Weights
from fclmodels.settings.base import Settings as BaseSettings

BACKBONE = "backbone."
OWN = "own-fixed"  # the part with the task's own tensors that do not train


class TaskAdapter(FrozenBackbone):
    """Of the adapter only the present task's tensors train, or those of them whose names end as `moving` says."""

    moving: tuple[str, ...] = ("",)

    def select_trainable(self, network: Network, task: int, freeze: bool) -> dict[str, nn.Parameter]:
        parameters = super().select_trainable(network, task, freeze)
        return {name: parameter for name, parameter in parameters.items() if not self.is_fixed(name, task)}

    def is_fixed(self, name: str, task: int) -> bool:
        """Return whether a tensor stays the same while a task is trained."""
        is_own = name.startswith(f"{PROMPTS}.{task}.") and name.endswith(self.moving)
        return name.startswith(f"{PROMPTS}.") and not is_own

    def merge(self, server: Server, network: Network) -> Server:
        """Return the server with every tensor of the model, factors of its maps merged into the backbone's weights."""
        adapted = get_backbone(network)
        if not isinstance(adapted, LowRank):
            return replace(server, weights=self.list_all_weights(server.weights))
        merged = {name: tensor.detach() for name, tensor in adapted.merge().items()}
        heads = {name: tensor for name, tensor in server.weights.items() if not name.startswith(BACKBONE)}
        plain = {BACKBONE + name: merged.get(name, w).cpu() for name, w in self.frozen.state_dict().items()}
        return replace(server, spec=replace(server.spec, adapter=None), weights={**plain, **heads})


class AdapterTraining(FedAvg):
    """FedAvg with the part TaskAdapter."""

    attaches: ClassVar[type[Adapted]]
    part: ClassVar[type[TaskAdapter]] = TaskAdapter
    network: TaskAdapter

    def __init__(self, settings: BaseSettings, run: Run) -> None:
        backbone = self.part(settings, run, self.name, self.attaches)
        super().__init__(settings, backbone.run, backbone)

    def list_advice(self) -> list[str]:
        return self.network.list_advice()

    def make_payload(self, server: Server) -> Payload:
        """Return the weights; those that stay the same during the task in two parts: other tasks', and its own."""
        payload = super().make_payload(server)
        weights = payload["weights"].tensors
        fixed = {name: tensor for name, tensor in weights.items() if self.network.is_fixed(name, server.task)}
        own = {name: tensor for name, tensor in fixed.items() if name.startswith(f"{PROMPTS}.{server.task}.")}
        parts = {"fixed": {name: tensor for name, tensor in fixed.items() if name not in own}, OWN: own}
        moving = {name: tensor for name, tensor in weights.items() if name not in fixed}
        once = {name: Part("weights", tensors, once=True) for name, tensors in parts.items() if tensors}
        return {**payload, "weights": Part("weights", moving), **once}

    def join_own_weights(self, client: Client, payload: Payload) -> dict[str, Tensor]:
        fixed = [payload[name].tensors for name in ("fixed", OWN) if name in payload]
        own = super().join_own_weights(client, payload)
        return {name: w for tensors in (*fixed, own) for name, w in tensors.items()}

    def serve(self, server: Server) -> Server:
        """Return the model that answers; low-rank factors are merged, so that it is the plain backbone with a head."""
        server = replace(server, weights=self.find_answering_weights(server))
        return self.network.merge(server, self.networks.load(server.spec, server.weights))

    def find_answering_weights(self, server: Server) -> Weights:
        """Return the weights of the model that answers."""
        return server.weights
