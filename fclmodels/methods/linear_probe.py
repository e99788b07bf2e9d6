"""A linear probe: the head alone is trained, on the features of the frozen backbone, and averaged (FedAvg)."""

from typing import ClassVar

from torch import Tensor

from fclmodels.backbones.adapters.adapted import Adapted
from fclmodels.data.batches import Batch
from fclmodels.federation.run_context import Run
from fclmodels.federation.training.local_training import LocalTraining
from fclmodels.methods.fedavg import FedAvg
from fclmodels.methods.parts.frozen_backbone import FrozenBackbone
from fclmodels.settings.base import Settings as BaseSettings


class LinearProbe(FedAvg):
    """Trains the head alone on a frozen backbone's features."""

    name = "linear-probe"
    paper = "Communication-Efficient Learning of Deep Networks from Decentralized Data"

    attaches: ClassVar[type[Adapted]] = Adapted  # nothing

    class Settings(BaseSettings):
        pass

    def __init__(self, settings: Settings, run: Run) -> None:
        self.backbone = FrozenBackbone(settings, run, self.name, self.attaches)
        super().__init__(settings, self.backbone.run, self.backbone)

    def list_advice(self) -> list[str]:
        return self.backbone.list_advice()

    def compute_loss(self, training: LocalTraining, batch: Batch) -> Tensor:
        task, network = training.client.task, training.network
        features = self.backbone.compute_features(network, batch, task).features
        return self.compute_cross_entropy(network, features, batch.labels, task)
