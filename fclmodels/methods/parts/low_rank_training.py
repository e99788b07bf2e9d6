"""FedAvg of a task's low-rank factors and of the head on a frozen transformer: the base of methods with a pair a task.

Earlier tasks' factors stay as they are and take part; clients download them once a task. A served model has all of them
merged into its weights, and is the plain backbone with a head.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import ClassVar

from torch import Tensor, nn

from fclmodels.backbones.model.adapted import Adapted
from fclmodels.backbones.model.low_rank import ROOT, LowRank
from fclmodels.backbones.model.network import Network
from fclmodels.federation.client import Client
from fclmodels.federation.messages import Part, Payload
from fclmodels.federation.run_context import Run
from fclmodels.federation.server import Server
from fclmodels.methods.fedavg import FedAvg
from fclmodels.methods.parts.frozen_backbone import FrozenBackbone, get_backbone
from fclmodels.settings.base import Settings as BaseSettings

BACKBONE = "backbone."


class PairATask(FrozenBackbone):
    """Of the adapter only the present task's factors train, or those of them that `factors` names."""

    factors: tuple[str, ...] = ("A", "B")

    def trainable(self, network: Network, task: int, freeze: bool) -> dict[str, nn.Parameter]:
        own = f"{ROOT}.{task}."
        return {
            name: parameter
            for name, parameter in super().trainable(network, task, freeze).items()
            if not name.startswith(f"{ROOT}.") or (name.startswith(own) and name.endswith(self.factors))
        }

    def is_fixed(self, name: str, task: int) -> bool:
        """Return whether a tensor stays the same during a task, as factors of other tasks do."""
        return name.startswith(f"{ROOT}.") and not (name.startswith(f"{ROOT}.{task}.") and name.endswith(self.factors))


class LowRankTraining(FedAvg):
    """FedAvg with the part PairATask."""

    attaches: ClassVar[type[Adapted]] = LowRank
    pairs: ClassVar[type[PairATask]] = PairATask

    class Settings(LowRank.Settings):
        pass

    settings: Settings
    network: PairATask

    def __init__(self, settings: BaseSettings, run: Run) -> None:
        backbone = self.pairs(settings, run, self.name, self.attaches)
        super().__init__(settings, backbone.run, backbone)

    def advice(self) -> list[str]:
        return self.network.advice()

    def payload(self, server: Server) -> Payload:
        """Return the weights; those that stay the same during the task in a part of their own."""
        payload = super().payload(server)
        weights = payload["weights"].tensors
        fixed = {name: tensor for name, tensor in weights.items() if self.network.is_fixed(name, server.task)}
        if not fixed:
            return payload
        moving = {name: tensor for name, tensor in weights.items() if name not in fixed}
        return {**payload, "weights": Part("weights", moving), "fixed": Part("weights", fixed, once=True)}

    def client_weights(self, client: Client, payload: Payload) -> dict[str, Tensor]:
        fixed = payload["fixed"].tensors if "fixed" in payload else {}
        return {**fixed, **super().client_weights(client, payload)}

    def serve(self, server: Server) -> Server:
        """Return the plain backbone with all factors merged, and the head."""
        network = self.networks.load(server.spec, server.weights)
        adapted = get_backbone(network)
        assert isinstance(adapted, LowRank)
        frozen: Mapping[str, Tensor] = adapted.frozen.state_dict()
        merged = {name: tensor.detach() for name, tensor in adapted.merge().items()}
        heads = {name: tensor for name, tensor in server.weights.items() if not name.startswith(BACKBONE)}
        plain = {BACKBONE + name: merged.get(name, tensor).cpu() for name, tensor in frozen.items()}
        return replace(server, spec=replace(server.spec, adapter=None), weights={**plain, **heads})
