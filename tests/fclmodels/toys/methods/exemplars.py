"""A class-balanced memory whose samples join the task's own in each epoch (iCaRL's epochs)."""

from collections.abc import Iterator

from torch import Tensor, nn

from fclmodels.backbones.model.network import Network
from fclmodels.data.batches import Batch
from fclmodels.federation.client import Client
from fclmodels.federation.engine.cohort import Cohort
from fclmodels.federation.exchange import Answer, Exchange
from fclmodels.federation.messages import Payload
from fclmodels.federation.run_context import Run
from fclmodels.federation.server import Server
from fclmodels.federation.training.local_training import LocalTraining
from fclmodels.methods.fedavg import FedAvg
from fclmodels.methods.parts.exemplar_memory import ExemplarMemory, ExemplarSettings, iterate_joined_epochs
from fclmodels.methods.parts.replay_memory import unpack_samples


class Exemplars(FedAvg):
    """FedAvg whose clients train on exemplars of earlier classes too."""

    name = "exemplars"
    paper = "none"

    class Settings(FedAvg.Settings, ExemplarSettings):
        exemplars: int = 5

    settings: Settings

    def __init__(self, settings: Settings, run: Run) -> None:
        super().__init__(settings, run)
        self.memory = ExemplarMemory(settings)
        self.select = self.declare(Exchange("select", self.make_payload, self.select_exemplars))

    def finish_task(self, server: Server, cohort: Cohort) -> Server:
        cohort.ask(self.select, server)
        return server

    def select_exemplars(self, client: Client, payload: Payload) -> Answer:
        network = self.networks.load(self.run.make_spec(client.task + 1), payload["weights"].tensors).eval()
        return Answer({}, self.memory.add_task(client, network))

    def yield_epochs(self, training: LocalTraining) -> Iterator[Iterator[Batch]]:
        return iterate_joined_epochs(training.client, unpack_samples(training.client.memory))

    def compute_loss(self, training: LocalTraining, batch: Batch) -> Tensor:
        return self.compute_cross_entropy_by_task(
            training.network, training.compute_features(batch), batch.labels, batch.tasks
        )

    def select_trainable(self, network: Network, task: int) -> dict[str, nn.Parameter]:
        """Return earlier tasks' own heads too: exemplars go through them."""
        return {**super().select_trainable(network, task), **dict(network.heads.named_parameters("heads"))}
