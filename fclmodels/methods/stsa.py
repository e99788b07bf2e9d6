"""STSA: train on the first task, then a ridge head in closed form from sums that clients send once a task.

Guan et al. (WWW 2026). The first task is FedAvg: of a bottleneck beside each layer's perceptron of a frozen transformer
(AdaptFormer), or of a whole backbone (STSA's ResNet-18). From then on features are fixed, and after each task, the
first too, every client sends sums of its random features, of which the server makes the head of all tasks
(parts/closed_form_head.py): on these features the same as from all samples in one place. After the first task clients
send in a round the number 1 alone. `statistics: estimated` is STSA-E, whose server estimates the products from class
sums of small groups (parts/estimated_products.py), so that its head depends on who has which samples.

Where we choose: lambda is found on held-out rows (the release has 10^6); the head is linear, while the release's
predicts by cosine on the transformer, `cosine: true`; random features are drawn once by the run's seed; in STSA-E a
group counts for the classes that it has, which makes the estimate unbiased. `profile: release` sets its values on the
transformer; on a whole backbone, where the release's head is linear, it wants `cosine: false` beside it.
"""

from typing import ClassVar, Literal

from pydantic import Field
from torch import Tensor

from fclmodels.backbones.layers.norms import SharedPolicy
from fclmodels.backbones.model.network import Network
from fclmodels.backbones.model.prompt_adapters import AdaptFormer
from fclmodels.data.batches import Batch
from fclmodels.errors import UserError
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
from fclmodels.methods.parts.estimated_products import EstimatedProducts
from fclmodels.methods.parts.frozen_backbone import FrozenBackbone
from fclmodels.methods.parts.idle_rounds import answer_idly, make_idle_form
from fclmodels.methods.parts.trained_network import TrainedNetwork
from fclmodels.settings.base import Profiles

HEADS = {"exact": ClosedFormHead, "estimated": EstimatedProducts}


class Stsa(FedAvg):
    """Trains an adapter or the backbone on the first task, then fits a ridge head to sums of random features."""

    name = "stsa"
    paper = "STSA: Federated Class-Incremental Learning via Spatial-Temporal Statistics Aggregation"

    class Settings(ClosedFormSettings, AdaptFormer.Settings, FedAvg.Settings):
        profiles: ClassVar[Profiles] = {"release": {"random_features": 1250, "ridge": 1e6, "cosine": True}}
        profile: Literal["release"] | None = Field(
            None, description="settings that are not given are its release's; null: the defaults"
        )
        batch_norm: SharedPolicy = Field(
            "average", description="running statistics of a trained backbone: average over clients; batch: none; frozen"
        )
        trains: Literal["auto", "adapter", "backbone"] = Field(
            "auto", description="what the first task trains; auto: the adapter on a vit, else the whole backbone"
        )
        statistics: Literal["exact", "estimated"] = Field(
            "exact", description="sums of products, or their estimate from class sums of small groups (STSA-E)"
        )
        cosine: bool = Field(
            False, description="predict by the cosine of head and random features, as the release on a transformer"
        )

    settings: Settings

    def __init__(self, settings: Settings, run: Run) -> None:
        network = self.choose_network(settings, run)
        if settings.profile == "release" and settings.cosine and not isinstance(network, FrozenBackbone):
            raise UserError(
                "methods.stsa.profile: release predicts by cosine with an adapter; on a whole backbone its head is "
                "linear. Set methods.stsa.cosine: false beside it."
            )
        super().__init__(settings, network.run, network)
        self.head = HEADS[settings.statistics](
            settings, self.run, self.networks, self.load_network, self.compute_features, super().make_payload
        )
        self.declare(self.head.exchange)

    def choose_network(self, settings: Settings, run: Run) -> TrainedNetwork:
        """Return the network whose adapter, or whose backbone, the first task trains."""
        on_vit = run.params.model.backbone == "vit"
        if settings.trains == "backbone" or (settings.trains == "auto" and not on_vit):
            return TrainedNetwork(run, settings.batch_norm)
        return FrozenBackbone(settings, run, self.name, AdaptFormer)

    def list_advice(self) -> list[str]:
        return self.network.list_advice() if isinstance(self.network, FrozenBackbone) else []

    @property
    def obstacle_to_sums(self) -> Obstacle | None:
        if self.settings.statistics == "exact":
            return None
        return Obstacle("methods.stsa.statistics: estimated reads single groups", "Set statistics: exact")

    @property
    def obstacle_to_noise(self) -> Obstacle | None:
        if self.settings.statistics == "exact":
            return None
        return Obstacle("estimates products from single groups", "Set statistics: exact")

    @property
    def obstacle_to_robust_rules(self) -> Obstacle | None:
        return Obstacle("adds up products of features", "Use mean")

    # The first task is FedAvg's.

    def make_update_form(self, task: int, round: int) -> Form:
        return super().make_update_form(task, round) if task == 0 else make_idle_form()

    def make_payload(self, server: Server) -> Payload:
        return super().make_payload(server) if server.task == 0 else {}

    def train(self, client: Client, payload: Payload) -> Answer:
        return super().train(client, payload) if client.task == 0 else answer_idly(client, payload)

    def aggregate(self, server: Server, replies: Replies) -> Server:
        return super().aggregate(server, replies) if server.task == 0 else server

    # The head.

    def load_network(self, client: Client, payload: Payload) -> Network:
        """Return the network with the weights that the question brings."""
        return self.networks.load(self.run.make_spec(client.task + 1), payload["weights"].tensors)

    def compute_features(self, network: Network, batch: Batch) -> Tensor:
        """Return the features [B, F] of a batch."""
        features: Tensor = network.backbone(batch.inputs)
        return features

    def finish_task(self, server: Server, cohort: Cohort) -> Server:
        return self.head.finish_task(server, cohort)

    def find_head(self, server: Server) -> FittedHead | None:
        head = self.head.find_head(server)
        if head is None or not self.settings.cosine:
            return head
        # The logits of one sample are divided by one length, which leaves their order: only the rows' lengths count.
        lengths = head.weight.norm(dim=1, keepdim=True).clamp(min=1e-12)
        return FittedHead(head.weight / lengths, head.bias, head.projection)
