"""FedAS: received backbones are aligned to a client's own, and clients count by Fisher traces (Yang et al., CVPR 2024).

A client keeps a head of its own, which it sends and never downloads, and its model as it last trained it. In a round
(equations from the release; the paper's text was not at hand) it

1. takes the mean feature P_y of each of its classes on its own last backbone, in evaluation mode;
2. moves the received backbone by an epoch of SGD on sum_y MSE(f(x), P_y), over a batch's classes y and their samples;
3. trains that backbone with its own head, as FedAvg does;
4. takes T = sum over batches of ||grad of the batch's mean cross entropy||^2 over all parameters, in evaluation mode.

The server's model is W = sum_k T_k w_k / sum_k T_k: T takes the place of `federation.weighting`. A client predicts with
the model that it last trained (readings personal_*); the server's model has the mean head.

In the release all clients of a round align one and the same object in turn; here each has its own. Ours: a client that
has trained nothing yet aligns to nothing, P is of the present task's rows, rows of new classes begin as the run's seed
draws them, and T lies within 1e-6 and 1e9, which is all that bounds a client's share of the mean. memory: `personal`
(head), `base` (all else).
"""

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Literal, NamedTuple

import torch
from pydantic import Field, NonNegativeFloat, PositiveInt
from torch import Tensor

from fclmodels.backbones.layers.norms import SharedPolicy
from fclmodels.backbones.model.network import Network, build_skeleton
from fclmodels.backbones.model.spec import ModelSpec
from fclmodels.federation.client import Client
from fclmodels.federation.engine.replies import Replies
from fclmodels.federation.exchange import Form, Memory
from fclmodels.federation.messages import Part, Payload
from fclmodels.federation.prediction import Predictor, predict_by_heads
from fclmodels.federation.protection.reply_checks import MOST_SAMPLES
from fclmodels.federation.run_context import Run
from fclmodels.federation.server import Server
from fclmodels.federation.training.local_training import LocalTraining
from fclmodels.federation.training.optimisers import Sgd
from fclmodels.methods.fedavg import FedAvg
from fclmodels.methods.parts.class_sums import add_up_classes
from fclmodels.methods.parts.trained_network import TrainedNetwork
from fclmodels.randomness import seed_torch

HEADS = "heads."
LEAST = 1e-6  # of T, so that clients that have learned all by heart still have a mean


class OwnHead(TrainedNetwork):
    """Backbone and heads train; heads stay with their client, which sends them and downloads none."""

    @property
    def is_personal(self) -> bool:
        return True

    def list_personal_names(self, network: Network) -> set[str]:
        return {name for name in network.state_dict() if name.startswith(HEADS)}

    def list_undownloaded_names(self, spec: ModelSpec) -> set[str]:
        return {name for name in build_skeleton(spec).state_dict() if name.startswith(HEADS)}


class Trace(NamedTuple):
    """T of a client that has just trained."""

    weight: float


class FedAs(FedAvg):
    """Clients align the server's backbone to their own, keep their heads, and count by what their models still lack."""

    name = "fedas"
    paper = "FedAS: Bridging Inconsistency in Personalized Federated Learning"
    has_global_model = True

    class Settings(FedAvg.Settings):
        batch_norm: SharedPolicy = Field(
            "average", description="running statistics: average over clients; batch: none; frozen after task 1"
        )
        align_lr: NonNegativeFloat = Field(0.01, le=1e6, description="learning rate of the alignment; 0: none")
        align_batch: PositiveInt = Field(16, le=100_000, description="batch size of the alignment (release: 16)")
        fisher: Literal["sum", "mean"] = Field(
            "sum", description="T sums over batches (release), so that it grows with a client's data; or their mean"
        )

    settings: Settings

    def __init__(self, settings: Settings, run: Run) -> None:
        super().__init__(settings, run, OwnHead(run, settings.batch_norm))

    # On the server.

    def bound_client_weight(self, task: int) -> float:
        return MOST_SAMPLES

    def aggregate(self, server: Server, replies: Replies) -> Server:
        """Return the server after a round: heads too go the way to their mean, of which eta_g is taken."""
        moved, total = super().aggregate(server, replies), replies.sum("weight")["weight"].item()
        share = self.find_server_lr(server.task)
        heads = {n: server.weights[n].lerp(T_h / total, share) for n, T_h in replies.sum("heads").items()}
        return replace(moved, weights={**moved.weights, **heads})

    def make_update_form(self, task: int, round: int) -> Form:
        network = self.networks.build(self.run.make_spec(task + 1))
        heads = {
            name: p.to("meta") for name, p in self.select_trainable(network, task).items() if name.startswith(HEADS)
        }
        return {**super().make_update_form(task, round), "heads": Part("weights", heads, over="weight")}

    # On a client.

    def prepare_training(self, client: Client, payload: Payload) -> LocalTraining:
        means = self.measure_means(client, payload)
        training = super().prepare_training(client, payload)
        if means:
            self.align(training, means)
        return training

    def measure_means(self, client: Client, payload: Payload) -> dict[int, Tensor]:
        """Return P_y [F] by label, on the client's own last backbone; none before it has trained one."""
        if "base" not in client.memory or not self.settings.align_lr:
            return {}
        spec = self.run.make_spec(client.task + 1)
        network = self.networks.load(spec, self.select_own_weights(client, payload))
        batches = self.run.batches.iterate_ordered(client.rows, self.run.params.evaluation.batch_size)
        total = add_up_classes(network, batches, client.task)
        triples = zip(spec.tasks[client.task], total["weight"], total["sum"], strict=True)
        return {label: (sum_ / weight).float().to(self.run.device) for label, weight, sum_ in triples if weight > 0}

    def align(self, training: LocalTraining, means: dict[int, Tensor]) -> None:
        """Move the received backbone towards these means, in place."""
        client, network = training.client, training.network
        for name, parameter in network.named_parameters():
            parameter.requires_grad_(name in training.parameters)
        moving = [p for name, p in training.parameters.items() if not name.startswith(HEADS)]
        optimiser = Sgd(moving, self.settings.align_lr, 0.0, 0.0)
        key = ("align", client.task, client.round, client.index)
        with seed_torch(self.run.seed, *key, device=self.run.device):
            random = client.make_generator("align")
            for batch in self.run.batches.iterate_shuffled(client.rows, self.settings.align_batch, random):
                optimiser.zero_grad()
                measure_misalignment(network.backbone(batch.inputs), batch.labels, means).backward()
                optimiser.step()
        optimiser.zero_grad()

    def compute_client_weight(self, training: LocalTraining) -> float:
        """Return T of the client's trained model."""
        client, network = training.client, training.network.eval()
        batches = self.run.batches.iterate_ordered(client.rows, self.run.params.federation.batch_size)
        losses = (
            self.compute_cross_entropy(network, network.backbone(batch.inputs), batch.labels, client.task)
            for batch in batches
        )
        traces = measure_traces(losses, list(training.parameters.values()))
        total = sum(traces) / (len(traces) if self.settings.fisher == "mean" else 1)
        weight = min(max(total, LEAST), MOST_SAMPLES)
        training.add(Trace(weight))
        return weight

    def make_further_parts(self, training: LocalTraining, payload: Payload) -> Mapping[str, Mapping[str, Tensor]]:
        """Return the client's heads, times T."""
        trace = training.find_added(Trace)
        assert trace is not None
        heads = {name: p for name, p in training.parameters.items() if name.startswith(HEADS)}
        return {"heads": {name: p.detach() * trace.weight for name, p in heads.items()}}

    def remember(self, training: LocalTraining) -> Memory:
        state, memory = training.network.state_dict(), super().remember(training)
        base = {name: tensor.clone() for name, tensor in state.items() if name not in memory["personal"]}
        return {**memory, "base": base}

    def select_own_weights(self, client: Client, payload: Payload) -> dict[str, Tensor]:
        """Return the model that a client last trained; what it has not trained is as it begins."""
        return {**self.join_own_weights(client, payload), **client.memory.get("base", {})}

    def make_client_predictor(self, client: Client, payload: Payload) -> Predictor:
        weights = self.select_own_weights(client, payload)
        return predict_by_heads(self.networks.load(self.run.make_spec(client.task + 1), weights))


def measure_misalignment(features: Tensor, labels: Tensor, means: dict[int, Tensor]) -> Tensor:
    """Return sum_y MSE(f, P_y) of features [B, F], over the classes of the batch that have a mean."""
    squares = [
        (features[labels == label] - means[label].to(features)).square().mean()
        for label in labels.unique().tolist()
        if label in means
    ]
    return torch.stack(squares).sum() if squares else features.sum() * 0


def measure_traces(losses: Iterable[Tensor], parameters: list[torch.nn.Parameter]) -> list[float]:
    """Return the squared length of each loss's gradient."""
    traces = []
    for loss in losses:
        gradients = torch.autograd.grad(loss, parameters, allow_unused=True)
        norms = torch._foreach_norm([g for g in gradients if g is not None])
        traces.append(float(torch.stack(norms).double().square().sum()))
    return traces
