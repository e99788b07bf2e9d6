"""A part of the model that never travels, neither up nor down: each client has a bias of its own in the head."""

from fclmodels.backbones.model.network import Network
from fclmodels.backbones.model.spec import ModelSpec
from fclmodels.federation.run_context import Run
from fclmodels.methods.fedavg import FedAvg
from fclmodels.methods.parts.trained_network import TrainedNetwork


class OwnBias(TrainedNetwork):
    """Backbone and head train; the head's bias stays with its client, which begins with what the seed draws."""

    @property
    def is_personal(self) -> bool:
        return True

    def list_personal_names(self, network: Network) -> set[str]:
        return {"heads.0.bias"}

    def list_undownloaded_names(self, spec: ModelSpec) -> set[str]:
        return {"heads.0.bias"}


class PersonalBias(FedAvg):
    """FedAvg whose clients keep the bias of the head."""

    name = "personal-bias"
    paper = "none"

    def __init__(self, settings: FedAvg.Settings, run: Run) -> None:
        super().__init__(settings, run, OwnBias(run, "average"))
