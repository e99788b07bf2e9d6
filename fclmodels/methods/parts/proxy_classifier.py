"""A classifier of cosine proxies beside the backbone, with distillation of block outputs (PODNet and AFC share it).

A client trains on the union of its rows and exemplars. With n old columns and m new ones, the loss is

    NCA + sqrt((n + m) / m) D

NCA of cosine_proxies.py, D a method's distance of block outputs from the last task's model. Outputs are as the blocks
return them (the releases: before the last ReLU). Proxies of old classes stay as they are, under weight decay too.

Answers are the nearest mean of exemplars (PODNet's NME); before a task's end the classifier's. How a federation has it
is our choice: before a task its clients send moments of their classes' features of length 1, from whose Gaussians the
server draws the new proxies (the release: k-means, which cannot be averaged, or this); after it they train the
classifier on their exemplars alone, the network fixed, and the server averages their updates once. As in the releases,
the first task has neither.

networks: `proxies`, with a place for each class of the stream.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Literal

import torch
from pydantic import Field, NonNegativeInt, PositiveFloat, PositiveInt
from torch import Tensor, nn

from fclmodels.backbones.inputs.block_outputs import capture_block_outputs
from fclmodels.backbones.model.network import Network, build_skeleton
from fclmodels.data.batches import Batch
from fclmodels.federation.client import Client
from fclmodels.federation.engine.cohort import Cohort
from fclmodels.federation.exchange import Answer, Exchange, Form
from fclmodels.federation.messages import Payload, make_outline
from fclmodels.federation.method import Obstacle
from fclmodels.federation.prediction import Prediction, Predictor
from fclmodels.federation.run_context import Run
from fclmodels.federation.server import Server
from fclmodels.federation.training.auxiliary_networks import Auxiliary, AuxiliaryNetworks
from fclmodels.federation.training.local_training import LocalTraining
from fclmodels.methods.fedavg import join_new_rows
from fclmodels.methods.parts.coreset_memory import embed
from fclmodels.methods.parts.exemplar_memory import ExemplarSettings
from fclmodels.methods.parts.joined_heads import count_columns, find_columns, list_task_columns
from fclmodels.methods.parts.rehearsal import LastModel
from fclmodels.methods.parts.replay_memory import unpack_samples
from fclmodels.numerics.cosine_proxies import CosineProxies, Nca, draw_proxies, nca_loss
from fclmodels.numerics.prototypes import fit_gaussians

PROXIES = "proxies"
FEATURES = "features"
NOISE = Obstacle("draws proxies from single classes' variances, which noise would drown", "Use icarl or fedproto")
CLAMP = 5.0  # of each gradient (the release's)
Outputs = dict[str, Tensor]
Compare = Callable[[Outputs, Outputs], Tensor]
Load = Callable[[Client, Payload], Network]


class ClassifierSettings(ExemplarSettings):
    exemplars: PositiveInt = Field(20, le=1_000_000, description="samples that each client keeps (see budget)")
    budget: Literal["total", "class"] = Field(
        "class", description="exemplars is a number for each class; total: for all so far, which share it alike"
    )
    blocks: tuple[str, ...] | None = Field(
        None,
        description="names of the blocks whose outputs are distilled; null: all, of a resnet its four stages",
    )
    proxies: PositiveInt = Field(10, le=1000, description="K, proxies of a class")
    nca: Nca = Field("paper", description="the loss: eq. 6, or the release's, whose margin does nothing")
    tune_epochs: NonNegativeInt = Field(
        20, le=10_000, description="epochs on exemplars alone that train the classifier after a task"
    )
    tune_lr: PositiveFloat = Field(0.05, le=1e3, description="their learning rate")


@dataclass(frozen=True)
class OldProxies:
    """The proxies [n, K, F] of old classes, in one training."""

    weight: Tensor


class ProxyClassifier:
    """The classifier that clients train beside the backbone, and the block outputs that they distil."""

    def __init__(self, settings: ClassifierSettings, run: Run, networks: AuxiliaryNetworks, load: Load) -> None:
        self.settings = settings
        self.run = run
        self.networks = networks
        self.load = load

    # On the server.

    def grow(self, server: Server, last: Server) -> Server:
        """Return the server with proxies for classes that the stream has got since too."""
        state, fresh = last.networks[PROXIES], self.networks.create_initial()[PROXIES]
        state = {**state, "weight": join_new_rows(state["weight"], fresh["weight"])}
        return replace(server, networks={**server.networks, PROXIES: state})

    def draw(self, server: Server, cohort: Cohort, exchange: Exchange) -> Server:
        """Return the server with the new classes' proxies drawn from the Gaussians of their clients' moments."""
        if server.task == 0:
            return server
        gaussians = fit_gaussians(cohort.ask(exchange, server).sum("moments"))
        new = list_task_columns(server.spec, torch.device("cpu"))[-1]
        new = new[gaussians.present[new]]
        random = self.run.make_generator("proxies", server.task)
        drawn = draw_proxies(gaussians.mu[new], gaussians.sigma2[new], self.settings.proxies, random)
        state = server.networks[PROXIES]
        state = {**state, "weight": state["weight"].index_copy(0, new, drawn)}
        return replace(server, networks={**server.networks, PROXIES: state})

    def tune(self, server: Server, cohort: Cohort, exchange: Exchange) -> Server:
        """Return the server with the classifier that clients have trained on exemplars alone."""
        if server.task == 0 or not self.settings.tune_epochs:
            return server
        replies = cohort.ask(exchange, server)
        total, moved = replies.sum("weight")["weight"].item(), replies.sum("tuned")
        state = {name: value + moved[name] / total for name, value in server.networks[PROXIES].items()}
        return replace(server, networks={**server.networks, PROXIES: state})

    def make_predictor(self, server: Server, network: Network) -> Predictor:
        """Return the classifier's predictor on a network in evaluation mode."""
        proxies, columns = self.load_proxies(server.networks[PROXIES]), count_columns(server.spec)
        return lambda inputs: Prediction(proxies(network.backbone(inputs), classes=columns))

    def load_proxies(self, state: dict[str, Tensor]) -> CosineProxies:
        """Return the classifier with this state; the next call changes it."""
        proxies = self.networks.load(self.networks.auxiliaries[0], state)
        assert isinstance(proxies, CosineProxies)
        return proxies

    # On a client.

    def hold_old(self, training: LocalTraining, payload: Payload) -> None:
        """Give a client's training the proxies of old classes, which come first."""
        old = int(list_task_columns(training.network.spec, self.run.device)[-1].min())
        training.add(OldProxies(payload[PROXIES].tensors["weight"][:old].to(self.run.device)))

    @torch.no_grad()
    def restore_old(self, training: LocalTraining) -> None:
        """Undo what weight decay did to old classes' proxies in a step."""
        if old := training.find_added(OldProxies):
            training.networks[PROXIES][0].get_parameter("weight")[: len(old.weight)] = old.weight

    def compute_loss(self, training: LocalTraining, batch: Batch, compare: Compare) -> Tensor:
        """Return NCA + sqrt((n + m) / m) D, by a method's D of block outputs and features from the teacher's."""
        network, teacher, proxies = training.network, training.find_added(LastModel), training.networks[PROXIES][0]
        assert isinstance(proxies, CosineProxies)
        outputs = self.run_blocks(network, batch)
        new = list_task_columns(network.spec, self.run.device)[-1]
        # New columns come last, or are all of them.
        loss = self.classify(network, proxies, outputs[FEATURES], batch, frozen=int(new.min()))
        if teacher is None or not len(teacher.old):
            return loss
        with torch.no_grad():
            targets = self.run_blocks(teacher.network, batch)
        return loss + (count_columns(network.spec) / len(new)) ** 0.5 * compare(outputs, targets)

    def run_blocks(self, network: Network, batch: Batch) -> Outputs:
        """Return the outputs of the blocks that are distilled, by name, and the features."""
        names = network.backbone.stage_names if self.settings.blocks is None else self.settings.blocks
        with capture_block_outputs(network.backbone, names) as outputs:
            features = network.backbone(batch.inputs)
        return {**outputs, FEATURES: features}

    def classify(
        self, network: Network, proxies: CosineProxies, features: Tensor, batch: Batch, frozen: int = 0
    ) -> Tensor:
        """Return the NCA loss, in which the proxies of the first `frozen` columns stay."""
        labels = find_columns(network.spec, batch.labels, batch.tasks)
        scores = proxies(features, frozen, count_columns(network.spec))
        return nca_loss(scores, labels, proxies.scale, self.settings.nca)

    def make_tune_form(self, task: int, round: int) -> Form:
        (update,) = self.networks.make_form().values()
        return {"tuned": update, "weight": make_outline("count", {"weight": ()}, torch.float64)}

    def tune_proxies(self, client: Client, payload: Payload) -> Answer:
        """Return how far a client's exemplars move the proxies on fixed features, times its weight."""
        network, samples = self.load(client, payload), unpack_samples(client.memory)
        start = payload[PROXIES].tensors
        proxies = self.load_proxies(start)
        proxies.requires_grad_(True)
        if samples is not None:
            features = embed(client, network, samples).to(self.run.device)
            labels = find_columns(network.spec, samples.labels, samples.tasks)
            self.descend(client, proxies, features, labels, count_columns(network.spec))
        weight = client.weight
        moved = {name: (p.detach() - start[name]) * weight for name, p in proxies.named_parameters()}
        return Answer({"tuned": moved, "weight": {"weight": torch.tensor(weight, dtype=torch.float64)}}, client.memory)

    def descend(self, client: Client, proxies: CosineProxies, features: Tensor, labels: Tensor, columns: int) -> None:
        """Train the proxies in place, by SGD in shuffled batches."""
        optimiser = torch.optim.SGD(proxies.parameters(), self.settings.tune_lr)
        random, size = client.make_generator("tune"), client.run.params.federation.batch_size
        for _ in range(self.settings.tune_epochs):
            for places in torch.randperm(len(labels), generator=random).split(size):
                optimiser.zero_grad()
                scores = proxies(features[places], classes=columns)
                nca_loss(scores, labels[places], proxies.scale, self.settings.nca).backward()
                optimiser.step()


def declare_proxies(run: Run, proxies: int) -> Auxiliary:
    """Return the classifier as a network beside the model, with a place for each class of the stream."""
    last = run.make_spec(len(run.splits.tasks))
    features = build_skeleton(run.make_spec(1)).backbone.features
    spec = {"classes": count_columns(last), "features": features, "proxies": proxies}
    return Auxiliary(PROXIES, spec, build_proxies, "averaged", run.params.optimizer)


def build_proxies(spec: Mapping[str, int]) -> CosineProxies:
    return CosineProxies(spec["classes"], spec["proxies"], spec["features"])


def omit_heads(parameters: dict[str, nn.Parameter]) -> dict[str, nn.Parameter]:
    """Return the backbone's parameters: the network's own heads have no part in it."""
    return {name: parameter for name, parameter in parameters.items() if not name.startswith("heads.")}


def clamp_gradients(training: LocalTraining) -> None:
    """Bring gradients within the release's bound, in place."""
    for gradient in training.gradients.values():
        gradient.clamp_(-CLAMP, CLAMP)
