"""FedAvg of prompts, their keys and the head on a frozen transformer: the base of Fed-L2P and Fed-DualP."""

from typing import ClassVar

from torch import Tensor

from fclmodels.backbones.adapters.adapted import Adapted
from fclmodels.data.batches import Batch
from fclmodels.federation.exchange import Memory
from fclmodels.federation.messages import Payload
from fclmodels.federation.method import Obstacle
from fclmodels.federation.run_context import Run
from fclmodels.federation.training.local_training import LocalTraining
from fclmodels.methods.fedavg import FedAvg
from fclmodels.methods.parts.frozen_backbone import FrozenBackbone
from fclmodels.methods.parts.prompt_training import PromptSettings, PromptTraining


class FedPrompts(FedAvg):
    """FedAvg with the parts FrozenBackbone and PromptTraining."""

    attaches: ClassVar[type[Adapted]]

    class Settings(PromptSettings):
        pass

    settings: Settings

    def __init__(self, settings: Settings, run: Run) -> None:
        backbone = FrozenBackbone(settings, run, self.name, self.attaches, settings.head)
        super().__init__(settings, backbone.run, backbone)
        self.prompts = PromptTraining(settings, backbone)

    @property
    def obstacle_to_noise(self) -> Obstacle | None:
        return self.prompts.obstacle_to_noise

    def list_advice(self) -> list[str]:
        return self.prompts.list_advice()

    def compute_client_weight(self, training: LocalTraining) -> float:
        return self.prompts.weigh(training.client)

    def bound_client_weight(self, task: int) -> float:
        return super().bound_client_weight(task) * self.prompts.bound_weight(task)

    def remember(self, training: LocalTraining) -> Memory:
        return {**super().remember(training), **self.prompts.make_memory(training.client)}

    def start_training(self, training: LocalTraining, payload: Payload) -> None:
        self.prompts.start(training, payload)

    def compute_loss(self, training: LocalTraining, batch: Batch) -> Tensor:
        return self.prompts.compute_loss(training, batch, self.compute_head_loss)

    def compute_head_loss(self, training: LocalTraining, features: Tensor, labels: Tensor) -> Tensor:
        """Return the cross entropy of a batch's features [B, F] and labels [B]."""
        return self.compute_cross_entropy(training.network, features, labels, training.client.task)
