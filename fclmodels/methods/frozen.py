"""Methods on a frozen backbone: only what they attach to it and the head are trained and travel.

Every client has the backbone before the run (PIP Algorithm 1, line 2): read from `model.weights`, in evaluation mode,
without gradients. No message, no server state and no checkpoint holds it; a published model does.
"""

from dataclasses import replace
from functools import cached_property
from typing import Any, ClassVar

from torch import Tensor, nn

from fclmodels.backbones.adapters import Adapted, grow_prompts
from fclmodels.backbones.base import FeatureNet
from fclmodels.backbones.network import FROZEN, Network, build
from fclmodels.backbones.spec import ModelSpec
from fclmodels.errors import UserError
from fclmodels.federation.client import Client
from fclmodels.federation.run import Run
from fclmodels.federation.server import Server
from fclmodels.methods.base import Memory
from fclmodels.methods.fedavg import FedAvg
from fclmodels.settings import Settings as BaseSettings


class Frozen(FedAvg):
    attaches: ClassVar[type[Adapted]] = Adapted

    class Settings(BaseSettings):
        pass

    settings: Settings  # type: ignore[assignment]  # batch_norm has no meaning where nothing of the backbone moves

    def __init__(self, settings: BaseSettings, run: Run) -> None:
        self.settings = settings  # type: ignore[assignment]
        super().__init__(settings, replace(run, adapter=self.adapter))
        if run.params.model.freeze:
            raise UserError(f"model.freeze: methods.{self.name} freezes the whole backbone. Leave it out.")

    @property
    def adapter(self) -> dict[str, Any]:
        """What is attached to the backbone, with its settings among the method's own."""
        told = set(self.attaches.Settings.model_fields)
        return {"kind": self.attaches.kind, **self.settings.model_dump(mode="json", include=told)}

    def advice(self) -> list[str]:
        if self.run.params.model.weights is None:
            return ["model.weights is not set: the frozen backbone is as it was drawn. fcl pretrain makes one"]
        return []

    # The network: the frozen part is put in once, by `prepare`.

    @cached_property
    def frozen(self) -> FeatureNet:
        """The backbone, read or drawn once."""
        return backbone_of(build(self.run.spec(1), self.run.generator("init"))).frozen.to(self.run.device)

    def prepare(self, network: nn.Module) -> None:
        assert isinstance(network, Network)
        backbone_of(network).frozen = self.frozen

    def built(self, spec: ModelSpec) -> dict[str, Tensor]:
        return {name: t for name, t in super().built(spec).items() if not name.startswith(FROZEN)}

    def model(self, server: Server) -> dict[str, Tensor]:
        frozen = {FROZEN + name: tensor.cpu() for name, tensor in self.frozen.state_dict().items()}
        return {**server.weights, **frozen}

    def start_task(self, server: Server, task: int) -> Server:
        started = super().start_task(server, task)
        learned = len(server.spec.tasks), len(started.spec.tasks)
        return replace(
            started, weights=grow_prompts(started.weights, self.adapter, *learned, self.run.generator("prompts", task))
        )

    def trainable(self, network: Network, task: int) -> dict[str, nn.Parameter]:
        own_head = f"heads.{task}." if network.spec.head == "per-task" else "heads."
        return {n: p for n, p in network.named_parameters() if n.startswith(("backbone.prompts.", own_head))}

    def set_modes(self, network: Network, task: int) -> None:
        network.train()  # which leaves the backbone in evaluation mode

    @property
    def personal(self) -> bool:
        return False

    def own(self, client: Client, network: Network) -> Memory:
        return {}


def backbone_of(network: Network) -> Adapted:
    assert isinstance(network.backbone, Adapted)
    return network.backbone
