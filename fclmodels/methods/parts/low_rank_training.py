"""FedAvg of a task's low-rank factors and of the head on a frozen transformer: the base of methods with a pair a task.

A served model has the factors of all tasks merged into its weights, and is the plain backbone with a head.
"""

from collections.abc import Mapping
from dataclasses import replace

from torch import Tensor

from fclmodels.backbones.adapters.low_rank import LowRank
from fclmodels.federation.server import Server
from fclmodels.methods.parts.frozen_backbone import get_backbone
from fclmodels.methods.parts.task_adapters import AdapterTraining

BACKBONE = "backbone."


class LowRankTraining(AdapterTraining):
    """FedAvg with the part TaskAdapter, whose tensors are low-rank factors."""

    attaches = LowRank

    class Settings(LowRank.Settings):
        pass

    settings: Settings

    def serve(self, server: Server) -> Server:
        """Return the plain backbone with all factors merged, and the head."""
        adapted = get_backbone(self.networks.load(server.spec, server.weights))
        assert isinstance(adapted, LowRank)
        frozen: Mapping[str, Tensor] = adapted.frozen.state_dict()
        merged = {name: tensor.detach() for name, tensor in adapted.merge().items()}
        heads = {name: tensor for name, tensor in server.weights.items() if not name.startswith(BACKBONE)}
        plain = {BACKBONE + name: merged.get(name, tensor).cpu() for name, tensor in frozen.items()}
        return replace(server, spec=replace(server.spec, adapter=None), weights={**plain, **heads})
