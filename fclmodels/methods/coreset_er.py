"""FL with a coreset: FedAvg whose clients replay the samples that a rule has chosen (STAMP, Figure 4).

STAMP's rivals there are rules of choice within "vanilla FL": OCS, CSReL, BCSR, and SRe2L, whose recovery of images is
here and whose soft labels are not. Each client chooses `budget` samples of each class when a task has ended, on the
final global model (coreset_memory.py), and replays them as `er` does, with equal weight. How the paper lets old samples
back into training is not said, so that is ours; `random` is the rule that the others have to beat.
"""

from torch import Tensor

from fclmodels.data.batches import Batch
from fclmodels.federation.client import Client
from fclmodels.federation.engine.cohort import Cohort
from fclmodels.federation.exchange import Answer, Exchange
from fclmodels.federation.messages import Payload
from fclmodels.federation.run_context import Run
from fclmodels.federation.server import Server
from fclmodels.federation.training.local_training import LocalTraining
from fclmodels.methods.fedavg import FedAvg
from fclmodels.methods.parts.coreset_memory import CoresetMemory, CoresetSettings
from fclmodels.methods.parts.replay_memory import descend_both, start_replay


class CoresetEr(FedAvg):
    """Each client trains on its new samples and on a chosen few of each old class, with equal weight."""

    name = "coreset-er"
    paper = "Exploiting Client Heterogeneity for Forgetting Mitigation in Federated Continual Learning"

    class Settings(CoresetSettings, FedAvg.Settings):
        pass

    settings: Settings
    trains_earlier_heads = True

    def __init__(self, settings: Settings, run: Run) -> None:
        super().__init__(settings, run)
        self.coreset = CoresetMemory(settings, run, self.name, self.networks)
        self.store = self.declare(Exchange("coreset", self.make_payload, self.store_coreset))

    def finish_task(self, server: Server, cohort: Cohort) -> Server:
        cohort.ask(self.store, server)
        return server

    def store_coreset(self, client: Client, payload: Payload) -> Answer:
        """Return the memory with the task's coreset; the answer itself is empty."""
        network = self.networks.load(self.run.make_spec(client.task + 1), self.join_own_weights(client, payload)).eval()
        return Answer({}, self.coreset.add_task(client, network))

    def start_training(self, training: LocalTraining, payload: Payload) -> None:
        start_replay(training)

    def compute_loss(self, training: LocalTraining, batch: Batch) -> Tensor:
        return descend_both(self, training, batch, self.compute_cross_entropy)
