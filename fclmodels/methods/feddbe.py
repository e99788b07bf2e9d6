"""FedDBE, FedAvg with DBE: a client's bias in features has a vector of its own (Zhang et al., NeurIPS 2023).

Features f [F] pass to the head h as f + p, with p a vector that each client trains beside the model and never sends.
The running mean r of the features is drawn to g, the mean over all clients before they learned from each other:

    L = CE(h(f(x) + p)) + kappa mean_d (r_d - g_d)^2 / 2,    r <- (1 - mu) r + mu mean_batch(f),

where r starts at 0 in each local training, and gradients pass through the present batch's share alone. Before the first
task (or, ours, before each) all its clients train once without DBE and send n_k r_k; g = sum n_k r_k / n, and those
models are thrown away. The server averages models as FedAvg does. A client's own model is h(f(x) + p), the server's
h(f(x)); the readings personal_* are of the former.

With kappa 0, the release's default, nothing draws r to g, and with p's rate 0 too this is FedAvg to the bit. Published
runs have kappa 50 and mu 1, or kappa 1 and mu 0.1. knowledge: `consensus` {mean g}. memory: `shift` p.
"""

from dataclasses import replace
from typing import Literal

import torch
from pydantic import Field, NonNegativeFloat
from torch import Tensor, nn

from fclmodels.backbones.layers.norms import SharedPolicy
from fclmodels.data.batches import Batch
from fclmodels.federation.client import Client
from fclmodels.federation.engine.cohort import Cohort
from fclmodels.federation.exchange import Answer, Exchange, Form, Memory
from fclmodels.federation.messages import Part, Payload, make_outline
from fclmodels.federation.prediction import Prediction, Predictor, predict_by_heads
from fclmodels.federation.run_context import Run
from fclmodels.federation.server import Server
from fclmodels.federation.training.local_training import LocalTraining
from fclmodels.methods.fedavg import FedAvg
from fclmodels.methods.parts.joined_heads import join_heads
from fclmodels.methods.parts.trained_network import SharedNetwork


class RunningMean:
    """r, the running mean of features in one training."""

    def __init__(self, momentum: float) -> None:
        self.momentum = momentum
        self.value: Tensor | None = None

    def follow(self, features: Tensor) -> Tensor:
        """Return r after a batch's features [B, F], through which gradients pass for this batch alone."""
        mean = features.float().mean(0)
        before = torch.zeros_like(mean) if self.value is None else self.value
        moved = (1 - self.momentum) * before + self.momentum * mean
        self.value = moved.detach()
        return moved


class Shift:
    """p [F], and g [F] that the running mean is drawn to, in one training."""

    def __init__(self, vector: Tensor, consensus: Tensor) -> None:
        self.vector = nn.Parameter(vector.clone())
        self.consensus = consensus


class FedDbe(FedAvg):
    """FedAvg whose clients each add a vector of their own to features, and draw the features' mean to a common one."""

    name = "feddbe"
    paper = "Eliminating Domain Bias for Federated Learning in Representation Space"
    has_global_model = True

    class Settings(FedAvg.Settings):
        batch_norm: SharedPolicy = Field(
            "average", description="running statistics: average over clients; batch: none; frozen after task 1"
        )
        kappa: NonNegativeFloat = Field(
            1.0,
            le=1e6,
            description="weight of the pull to the common mean (release: 0; its runs: 50 with mu 1, 1 with 0.1)",
        )
        mu: float = Field(0.1, gt=0, le=1, description="share of a batch's mean in the running mean")
        consensus: Literal["first", "each-task"] = Field(
            "first", description="when clients agree on the common mean: before the first task, or (ours) before each"
        )
        shift_lr: NonNegativeFloat | None = Field(
            None, le=1e6, description="learning rate of a client's vector, by SGD; null: optimizer.lr as it decays"
        )

    settings: Settings

    def __init__(self, settings: Settings, run: Run) -> None:
        super().__init__(settings, run, SharedNetwork(run, settings.batch_norm))
        self.gather = self.declare(Exchange("consensus", super().make_payload, self.send_mean, self.make_mean_form))

    # On the server.

    def begin_task(self, server: Server, cohort: Cohort) -> Server:
        """Return the server with the clients' mean feature, from a training that is thrown away."""
        if "consensus" in server.knowledge and self.settings.consensus == "first":
            return server
        total = cohort.ask(self.gather, server).sum("means")
        mean = (total["sum"] / total["weight"])[0].float()
        return replace(server, knowledge={**server.knowledge, "consensus": {"mean": mean}})

    def make_payload(self, server: Server) -> Payload:
        if "consensus" not in server.knowledge:
            return super().make_payload(server)
        consensus = Part("prototype", server.knowledge["consensus"], once=True)
        return {**super().make_payload(server), "consensus": consensus}

    # On a client.

    def make_mean_form(self, task: int, round: int) -> Form:
        """Return the outline of a client's running mean, times its number of samples, and that number."""
        features = self.networks.build(self.run.make_spec(task + 1)).backbone.features
        return {"means": make_outline("prototype", {"weight": (1,), "sum": (1, features)}, torch.float64)}

    def send_mean(self, client: Client, payload: Payload) -> Answer:
        """Return the running mean of a client's features at the end of a training, and its memory as it was."""
        training = self.prepare_training(client, payload)
        training.run()
        mean = training.find_added(RunningMean)
        assert mean is not None
        assert mean.value is not None
        count = torch.tensor([len(client.rows)], dtype=torch.float64)
        return Answer({"means": {"weight": count, "sum": (count * mean.value.double().cpu())[None]}}, client.memory)

    def start_training(self, training: LocalTraining, payload: Payload) -> None:
        training.add(RunningMean(self.settings.mu))
        if "consensus" in payload:
            consensus = payload["consensus"].tensors["mean"].to(self.run.device)
            training.add(Shift(training.client.memory.get("shift", torch.zeros_like(consensus)), consensus))

    def compute_loss(self, training: LocalTraining, batch: Batch) -> Tensor:
        features = training.compute_features(batch)
        mean, shift = training.find_added(RunningMean), training.find_added(Shift)
        r = None if mean is None else mean.follow(features)
        if shift is None:
            return self.compute_cross_entropy(training.network, features, batch.labels, training.client.task)
        loss = self.compute_cross_entropy(training.network, features + shift.vector, batch.labels, training.client.task)
        if r is None or not self.settings.kappa:
            return loss
        return loss + self.settings.kappa * measure_bias(r, shift.consensus)

    @torch.no_grad()
    def change_gradients(self, training: LocalTraining) -> None:
        """Take the step of the client's vector, beside the model's."""
        shift = training.find_added(Shift)
        if shift is not None and shift.vector.grad is not None:
            rate = training.lr if self.settings.shift_lr is None else self.settings.shift_lr
            shift.vector.sub_(shift.vector.grad, alpha=rate)
            shift.vector.grad = None

    def remember(self, training: LocalTraining) -> Memory:
        shift, memory = training.find_added(Shift), super().remember(training)
        return memory if shift is None else {**memory, "shift": shift.vector.detach().clone()}

    def make_client_predictor(self, client: Client, payload: Payload) -> Predictor:
        network = self.networks.load(self.run.make_spec(client.task + 1), self.join_own_weights(client, payload)).eval()
        if "shift" not in client.memory:
            return predict_by_heads(network)

        def predict(inputs: Tensor) -> Prediction:
            features = network.backbone(inputs) + client.memory["shift"]
            return Prediction(join_heads(network, features))

        return predict


def measure_bias(mean: Tensor, consensus: Tensor) -> Tensor:
    """Return mean_d (r_d - g_d)^2 / 2."""
    return (mean - consensus).square().mean() / 2
