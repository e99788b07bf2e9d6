"""SCR+FL: supervised contrastive replay, averaged by FedAvg, with prototypes over all clients (Mai et al. 2021).

A client's batch are new samples and `replayed` of its stored ones (replay_memory.py). Each has two views: as it is, and
strongly altered (strong_views.py). Features go through a projection, a perceptron that is averaged as the network is,
to z of length 1. Of all 2B views i, with P(i) the other views of i's class (Khosla et al. 2020, eq. 2):

    L = mean_i  -1/|P(i)| sum_{p in P(i)} log( exp(z_i z_p / tau) / sum_{a != i} exp(z_i z_a / tau) )

No head is trained: after a task each client, also one that had nothing of it, sends the sums of its stored samples'
features (stored_means.py), and the nearest mean answers, also for old classes on the present model. FedProTIP (Table 5)
averages prototypes over clients and keeps samples local; that a client's mean counts by its number of samples is ours.

In the release a batch enters the memory at once, and there is no step while that is empty; here a task's samples enter
at its end, as ER's do, and the first task trains on new samples alone (ours). Its further pass over the memory after a
task, with a tenth of the gradients, is left out. A class of which no client stores samples is never the answer; the
release draws its mean. During a task (`monitors.accuracy`) the means are the last task's, and new classes have none.

knowledge: `means` {weight [C, F], bias [C]} as a head.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from pydantic import Field, PositiveFloat, PositiveInt
from torch import Tensor, nn
from torch.nn.functional import normalize, pad

from fclmodels.backbones.layers.norms import SharedPolicy
from fclmodels.backbones.model.network import Network
from fclmodels.data.batches import Batch
from fclmodels.data.sample_kind import TEXTS, find_kind
from fclmodels.errors import UserError
from fclmodels.federation.client import Client
from fclmodels.federation.engine.cohort import Cohort
from fclmodels.federation.exchange import Answer, Exchange, Form
from fclmodels.federation.messages import Payload
from fclmodels.federation.prediction import FittedHead
from fclmodels.federation.run_context import Run
from fclmodels.federation.server import Server
from fclmodels.federation.training.auxiliary_networks import Auxiliary
from fclmodels.federation.training.local_training import LocalTraining
from fclmodels.methods.fedavg import FedAvg
from fclmodels.methods.parts.joined_heads import count_columns
from fclmodels.methods.parts.replay_memory import ReplaySettings, add_task, unpack_samples
from fclmodels.methods.parts.stored_means import fit_directions, outline_sums, sum_features
from fclmodels.methods.parts.strong_views import draw_strong_view
from fclmodels.numerics.fitted_heads import NEVER


class Scr(FedAvg):
    """Clients pull samples of a class together and classes apart; the nearest mean feature over all clients answers."""

    name = "scr"
    paper = "Supervised Contrastive Replay: Revisiting the Nearest Class Mean Classifier"

    class Settings(ReplaySettings, FedAvg.Settings):
        batch_norm: SharedPolicy = Field(
            "average", description="running statistics: average over clients; batch: none; frozen after task 1"
        )
        replayed: PositiveInt = Field(100, le=100_000, description="stored samples in each step, at most")
        temperature: PositiveFloat = Field(
            0.1, le=100, description="tau; the paper's configurations, the release's README has 0.07"
        )
        projection: PositiveInt = Field(
            128, le=100_000, description="outputs of the projection, which only training uses"
        )

    settings: Settings
    uses_frozen_activations = False

    def __init__(self, settings: Settings, run: Run) -> None:
        if find_kind(run.splits.shape) is TEXTS:
            raise UserError("methods.scr alters images for second views, these samples are texts. Use er.")
        super().__init__(settings, run)
        self.store = self.declare(Exchange("remember", lambda: {}, self.store_samples))
        means = Exchange("means", self.make_means_payload, self.add_up_features, self.make_means_form)
        self.ask_means = self.declare(means)

    def list_auxiliary_networks(self) -> list[Auxiliary]:
        features = self.networks.build(self.run.make_spec(1)).backbone.features
        spec = {"features": features, "outputs": self.settings.projection}
        return [Auxiliary("projection", spec, build_projection, "averaged", self.run.params.optimizer)]

    # On the server.

    def finish_task(self, server: Server, cohort: Cohort) -> Server:
        cohort.ask(self.store)
        replies = cohort.ask(self.ask_means, server, clients=cohort.everyone)
        means = fit_directions(replies.sum("means"), replies.compute_noise("means"))
        return replace(server, knowledge={**server.knowledge, "means": means})

    def make_means_payload(self, server: Server) -> Payload:
        """Return the model alone: the projection is for training."""
        return {"weights": self.make_payload(server)["weights"]}

    def find_head(self, server: Server) -> FittedHead | None:
        """Return the means, with columns that never answer for classes that came since; None in the first task."""
        if (means := server.knowledge.get("means")) is None:
            return None
        new = count_columns(server.spec) - len(means["bias"])
        return FittedHead(pad(means["weight"], (0, 0, 0, new)), pad(means["bias"], (0, new), value=NEVER))

    # On a client.

    def select_trainable(self, network: Network, task: int) -> dict[str, nn.Parameter]:
        """Return the backbone's parameters: no loss goes through a head."""
        return {name: p for name, p in super().select_trainable(network, task).items() if name.startswith("backbone.")}

    def start_training(self, training: LocalTraining, payload: Payload) -> None:
        training.add(Views(training.client, self.settings.replayed))

    def compute_loss(self, training: LocalTraining, batch: Batch) -> Tensor:
        views, (projection, _) = training.find_added(Views), training.networks["projection"]
        one, other, labels = views.draw(batch) if views else (batch.inputs, batch.inputs, batch.labels)
        outputs = [normalize(projection(training.network.backbone(inputs))) for inputs in (one, other)]
        return contrast(torch.cat(outputs), labels.repeat(2), self.settings.temperature)

    def store_samples(self, client: Client, payload: Payload) -> Answer:
        """Return the memory with samples of the task; the answer itself is empty."""
        return Answer({}, add_task(client, self.settings))

    def make_means_form(self, task: int, round: int) -> Form:
        tasks = task + 1 if self.settings.memory_of == "each-task" else 1
        return {"means": outline_sums(self.networks.build(self.run.make_spec(task + 1)), tasks * self.settings.memory)}

    def add_up_features(self, client: Client, payload: Payload) -> Answer:
        """Return the sums of a client's stored samples' features, and their numbers."""
        network = self.networks.load(self.run.make_spec(client.task + 1), payload["weights"].tensors).eval()
        return Answer({"means": sum_features(client, network, client.memory)}, client.memory)


class Views:
    """Draws both views of a batch and of stored samples, in one training."""

    def __init__(self, client: Client, replayed: int) -> None:
        self.batches = client.run.batches
        self.samples = unpack_samples(client.memory)
        self.replayed = replayed
        self.random = client.make_generator("replay")
        self.augmenting = self.batches.make_device_generator(self.random)

    def draw(self, batch: Batch) -> tuple[Tensor, Tensor, Tensor]:
        """Return inputs of the first and the second view, and labels, of the batch and then of stored samples."""
        assert batch.samples is not None
        raw = replace(batch, inputs=self.batches.splits.images[batch.samples.cpu()].to(batch.inputs.device))
        if self.samples is None:
            return batch.inputs, self.alter(raw), batch.labels
        places = torch.randperm(len(self.samples.labels), generator=self.random)[: self.replayed]
        stored = self.samples.take(places)
        first = torch.cat([batch.inputs, self.batches.augment_raw(stored, self.augmenting).inputs])
        both = Batch.concatenate([raw, stored])
        return first, self.alter(both), both.labels

    def alter(self, raw: Batch) -> Tensor:
        """Return the second view of raw samples, as inputs."""
        return self.batches.prepare_inputs(replace(raw, inputs=draw_strong_view(raw.inputs, self.augmenting))).inputs


def build_projection(spec: Mapping[str, Any]) -> nn.Module:
    width = spec["features"]
    return nn.Sequential(nn.Linear(width, width), nn.ReLU(), nn.Linear(width, spec["outputs"]))


def contrast(views: Tensor, labels: Tensor, temperature: float) -> Tensor:
    """Return the supervised contrastive loss, a mean over views [N, P] of length 1, each with another of its label."""
    itself = torch.eye(len(labels), dtype=torch.bool, device=labels.device)
    alike = (labels[:, None] == labels) & ~itself
    similar = views @ views.T / temperature
    log_p = similar - similar.masked_fill(itself, -torch.inf).logsumexp(1, keepdim=True)
    return -((log_p * alike).sum(1) / alike.sum(1)).mean()
