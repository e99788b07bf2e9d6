"""A ridge head on random features of a frozen backbone, from sums alone: the idea of RanPAC, federated (ours).

RanPAC (McDonnell et al. 2023) trains an adapter on the first task, then maps its features by a random matrix and a ReLU
and fits a linear head by ridge regression. Here nothing is trained: after each task every client sends two sums, once,
and the server solves one linear system (parts/closed_form_head.py). The head is that of ridge regression on all samples
of all tasks in one place, to rounding, however clients share them: nothing is forgotten. For a given lambda tasks and
their order do not matter either; `lambda: auto` is found on the last task. Clients download nothing but the question.

In a round clients send the number 1 alone, so that `federation.rounds: 1` loses nothing. A client that is lost when the
sums are asked for is missing in them. Any backbone serves, of images or texts, as it is drawn or from `model.weights`.
"""

from torch import Tensor

from fclmodels.backbones.model.network import Network
from fclmodels.data.batches import Batch
from fclmodels.federation.client import Client
from fclmodels.federation.engine.cohort import Cohort
from fclmodels.federation.engine.replies import Replies
from fclmodels.federation.exchange import Answer, Form
from fclmodels.federation.messages import Payload
from fclmodels.federation.method import Obstacle
from fclmodels.federation.prediction import FittedHead
from fclmodels.federation.run_context import Run
from fclmodels.federation.server import Server
from fclmodels.methods.fedavg import FedAvg
from fclmodels.methods.parts.closed_form_head import ClosedFormHead, ClosedFormSettings
from fclmodels.methods.parts.frozen_backbone import FrozenBackbone
from fclmodels.methods.parts.idle_rounds import answer_idly, make_idle_form


class Ridge(FedAvg):
    """Fits a ridge head on random features of a frozen backbone, from sums that each client sends once a task."""

    name = "ridge"
    paper = "RanPAC: Random Projections and Pre-trained Models for Continual Learning"

    class Settings(ClosedFormSettings):
        pass

    def __init__(self, settings: Settings, run: Run) -> None:
        self.backbone = FrozenBackbone(settings, run, self.name)
        super().__init__(settings, self.backbone.run, self.backbone)
        self.head = ClosedFormHead(
            settings, self.run, self.networks, self.load_network, self.compute_features, self.make_payload
        )
        self.declare(self.head.exchange)

    def list_advice(self) -> list[str]:
        return self.backbone.list_advice()

    @property
    def obstacle_to_robust_rules(self) -> Obstacle | None:
        return Obstacle("adds up products of features", "Use mean")

    def load_network(self, client: Client, payload: Payload) -> Network:
        """Return the frozen network, which no client downloads."""
        return self.networks.build(self.run.make_spec(client.task + 1))

    def compute_features(self, network: Network, batch: Batch) -> Tensor:
        """Return the features [B, F] of a batch on the frozen backbone."""
        return self.backbone.compute_features(network, batch, None).features

    def make_payload(self, server: Server) -> Payload:
        return {}

    def make_update_form(self, task: int, round: int) -> Form:
        return make_idle_form()

    def train(self, client: Client, payload: Payload) -> Answer:
        return answer_idly(client, payload)

    def aggregate(self, server: Server, replies: Replies) -> Server:
        return server

    def finish_task(self, server: Server, cohort: Cohort) -> Server:
        return self.head.finish_task(server, cohort)

    def find_head(self, server: Server) -> FittedHead | None:
        return self.head.find_head(server)
