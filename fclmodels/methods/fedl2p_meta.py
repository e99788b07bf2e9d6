"""FedL2P of meta-networks: two small networks learn how each client fine-tunes the common model (Lee et al. 2023).

This is not `fed-l2p`, the prompts of a frozen transformer that PIP compares with: their names alone are alike.

In each task the first rounds are FedAvg's. In the last `share` of them the model stands still, and two networks train
(steered_tuning.py): one gives each tensor's learning rate, the other each batch norm's mixing, from what a client's
rows look like to the model. A client sets a fifth of its rows apart, tunes a copy of the model on the others by
`steps`, and moves the networks against the gradient of the loss on those set apart (numerics/meta_gradient.py), its
entries clamped to 1. The server averages networks by numbers of rows set apart. A client answers with the model tuned
on its rows of the last task (readings personal_*), which it makes when it is asked; it stores nothing. The server's
model is FedAvg's.

The paper starts from a finished model and has no tasks: rounds in tasks, `share`, and the cap of steps (release: 15
epochs) are ours, as is a plain mean of batches' statistics in answers (release: a running one). The gradient
takes the steps before the last as having had its slopes and curvature. `gradient: release` has the release's series,
of steps 0.1, and its sign, which turns that of the rates. Without batch norm there is one network alone.
"""

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace
from itertools import islice
from typing import Any, Literal

import torch
from pydantic import Field, PositiveFloat, PositiveInt
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from fclmodels.backbones.layers.onednn_linear import differentiate_twice
from fclmodels.backbones.model.network import Network
from fclmodels.data.batches import Batch
from fclmodels.errors import UserError
from fclmodels.federation.client import Client
from fclmodels.federation.engine.replies import Replies
from fclmodels.federation.exchange import Answer, Form
from fclmodels.federation.messages import Part, Payload, make_outline
from fclmodels.federation.prediction import Prediction, Predictor, predict_by_heads
from fclmodels.federation.run_context import Run
from fclmodels.federation.server import Server
from fclmodels.federation.training.auxiliary_networks import Auxiliary
from fclmodels.federation.training.optimisers import Sgd
from fclmodels.methods.fedavg import FedAvg
from fclmodels.methods.parts.joined_heads import join_heads
from fclmodels.methods.parts.steered_tuning import (
    Statistics,
    SteeredTuning,
    Steering,
    describe_steering,
    list_tuned,
    look_at,
    mix_norms,
)
from fclmodels.methods.parts.trained_network import SharedNetwork
from fclmodels.methods.parts.whole_answers import refuse_late_answers
from fclmodels.numerics.meta_gradient import differentiate_tuning

STEERING, UPDATE = "steering", "steering-update"
APART = 5  # one of so many rows is set apart
CURVATURE_STEP, TERMS = 0.1, 4  # of the release's series for the inverse Hessian; the echoes are as many terms


class FedL2pMeta(FedAvg):
    """Meta-networks learn rates and batch norm mixing of each client's fine-tuning; not the prompts of fed-l2p."""

    name = "fedl2p-meta"
    paper = "FedL2P: Federated Learning to Personalize"
    has_global_model = True

    class Settings(FedAvg.Settings):
        share: float = Field(
            0.34, ge=0, lt=1, description="share of a task's rounds, the last, that train the networks (ours)"
        )
        steps: PositiveInt = Field(15, le=10_000, description="steps of a client's tuning (release: 15 epochs)")
        outer: PositiveInt = Field(3, le=1000, description="passes over the rows set apart in a round")
        lr: PositiveFloat = Field(1e-3, le=1e3, description="first learning rate of tuning (release: 0.001 or 0.01)")
        meta_lr: PositiveFloat = Field(1e-3, le=1e3, description="learning rate of the networks, by SGD")
        rates_lr: PositiveFloat = Field(1e-4, le=1e3, description="learning rate of the rates that a network scales")
        gradient: Literal["echoes", "release"] = Field(
            "echoes",
            description="through the last step of tuning and three echoes of it; or the release's series and sign",
        )

    settings: Settings

    def __init__(self, settings: Settings, run: Run) -> None:
        if run.params.model.freeze:
            raise UserError("methods.fedl2p-meta: its networks have a rate for each tensor. Use no model.freeze.")
        if settings.batch_norm in ("local", "batch"):
            raise UserError("methods.fedl2p-meta mixes stored statistics. Use batch_norm: average or frozen.")
        refuse_late_answers(run, "fedl2p-meta has rounds of two kinds")
        super().__init__(settings, run, SharedNetwork(run, settings.batch_norm))

    def list_auxiliary_networks(self) -> list[Auxiliary]:
        spec = describe_steering(self.networks.build(self.run.make_spec(1)), self.settings.lr)
        return [Auxiliary(STEERING, spec, Steering, "server")]

    def steers(self, task: int, round: int) -> bool:
        """Return whether a round trains the networks: the last of a task, one at least where there are two."""
        rounds = self.run.count_rounds(task)
        count = max(round_half_down(rounds * self.settings.share), 1) if self.settings.share and rounds > 1 else 0
        return round >= rounds - count

    # On the server.

    def make_update_form(self, task: int, round: int) -> Form:
        if not self.steers(task, round):
            return super().make_update_form(task, round)
        state = {n: tensor.to("meta") for n, tensor in self.auxiliaries.create_initial()[STEERING].items()}
        return {
            UPDATE: Part("update", state, over="weight", of=STEERING),
            "weight": make_outline("count", {"weight": ()}, torch.float64),
        }

    def aggregate(self, server: Server, replies: Replies) -> Server:
        if UPDATE not in replies.parts:
            return super().aggregate(server, replies)
        share = self.find_server_lr(server.task) / replies.sum("weight")["weight"].item()
        state, moved = server.networks[STEERING], replies.sum(UPDATE)
        return replace(server, networks={STEERING: {n: w.add(moved[n], alpha=share) for n, w in state.items()}})

    # On a client.

    def train(self, client: Client, payload: Payload) -> Answer:
        return (
            self.train_steering(client, payload)
            if self.steers(client.task, client.round)
            else super().train(client, payload)
        )

    def train_steering(self, client: Client, payload: Payload) -> Answer:
        """Return how far the networks have moved on a client's rows, times its weight."""
        raw = self.run.batches.read_raw(client.rows)
        order = torch.randperm(len(raw.labels), generator=self.run.make_generator("apart", client.task, client.index))
        count = max(1, len(order) // APART)
        apart, own = raw.take(order[:count]), raw.take(order[count:] if len(order) > 1 else order)
        tuning = self.prepare_tuning(client, payload, own)
        steering = self.load_steering(payload)
        nets = [p for name, p in steering.named_parameters() if name != "rates"]
        optimisers = [
            Sgd(nets, self.settings.meta_lr, 0.0, 0.0),
            Sgd([steering.rates], self.settings.rates_lr, 0.0, 0.0),
        ]
        random, prepare = client.make_generator("tuning"), self.run.batches.prepare_inputs
        size = self.run.params.federation.batch_size
        loss = torch.zeros(())
        with ExitStack() as contexts:
            contexts.enter_context(differentiate_twice())
            contexts.enter_context(sdpa_kernel(SDPBackend.MATH))
            for _ in range(self.settings.outer):
                for places in torch.randperm(count, generator=random).split(size):
                    loss = self.take_meta_step(
                        tuning, steering, optimisers, self.draw(own, random), prepare(apart.take(places))
                    )
        weight = float(count) if self.run.params.federation.weighting == "samples" else 1.0
        start, state = payload[STEERING].tensors, steering.state_dict()
        tensors = {
            UPDATE: {name: (state[name] - start[name]) * weight for name in start},
            "weight": {"weight": torch.tensor(weight, dtype=torch.float64)},
        }
        return Answer(tensors, client.memory, float(loss), len(client.rows))

    def take_meta_step(
        self,
        tuning: SteeredTuning,
        steering: Steering,
        optimisers: Sequence[Sgd],
        batches: Sequence[Batch],
        apart: Batch,
    ) -> Tensor:
        """Move the networks against the gradient of the loss after tuning on these batches; return that loss."""
        rates, shares = steering.steer(tuning.facts)
        *earlier, last = batches
        before = tuning.descend(tuning.read(), earlier, rates, shares.detach())
        statistics, meta = tuning.record(batches, shares, before), list(steering.parameters())
        losses: list[Tensor] = []
        of_release = self.settings.gradient == "release"

        def measure_apart(values: Sequence[Tensor]) -> Tensor:
            losses.append(tuning.measure(apart, shares, values, statistics))
            return losses[-1]

        gradients = differentiate_tuning(
            lambda values: tuning.measure(last, shares, values),
            measure_apart,
            before,
            list(rates),
            meta,
            CURVATURE_STEP if of_release else None,
            TERMS if of_release else min(TERMS, len(batches)),
            of_release,
        )
        for parameter, gradient in zip(meta, gradients, strict=True):
            parameter.grad = gradient.clamp(-1, 1)
        for optimiser in optimisers:
            optimiser.step()
            optimiser.zero_grad()
        return losses[0].detach()

    def prepare_tuning(self, client: Client, payload: Payload, own: Batch) -> SteeredTuning:
        """Return the tuning of the model that a client was sent, which looks at these raw rows."""
        network = self.networks.load(self.run.make_spec(client.task + 1), self.join_own_weights(client, payload)).eval()
        tuned = list_tuned(network, client.task)
        for name, parameter in network.named_parameters():
            parameter.requires_grad_(name in tuned)
        facts = look_at(
            network, self.run.batches.prepare_inputs(own).inputs.split(self.run.params.evaluation.batch_size)
        )

        def score(features: Tensor, batch: Batch) -> Tensor:
            return self.compute_cross_entropy(network, features, batch.labels, client.task)

        return SteeredTuning(network, client.task, score, facts)

    def load_steering(self, payload: Payload) -> Steering:
        """Return the networks that a client was sent."""
        (auxiliary,) = self.auxiliaries.auxiliaries
        steering = self.auxiliaries.load(auxiliary, payload[STEERING].tensors)
        assert isinstance(steering, Steering)
        return steering.requires_grad_(True)

    def draw(self, own: Batch, random: torch.Generator) -> list[Batch]:
        """Return the batches of as many steps of tuning, of raw rows in a new order in each pass."""
        size, prepare = self.run.params.federation.batch_size, self.run.batches.prepare_inputs

        def passes() -> Any:
            while True:
                yield from torch.randperm(len(own.labels), generator=random).split(size)

        return [prepare(own.take(places)) for places in islice(passes(), self.settings.steps)]

    def make_client_predictor(self, client: Client, payload: Payload) -> Predictor:
        if not len(client.rows):
            network = self.networks.load(self.run.make_spec(client.task + 1), self.join_own_weights(client, payload))
            return predict_by_heads(network)
        own = self.run.batches.read_raw(client.rows)
        tuning = self.prepare_tuning(client, payload, own)
        rates, shares = (t.detach() for t in self.load_steering(payload).steer(tuning.facts))
        batches = self.draw(own, client.make_generator("tuning"))
        values = tuning.descend(tuning.read(), batches, rates, shares)
        return answer_tuned(tuning, values, shares, tuning.record(batches, shares, values))


def answer_tuned(tuning: SteeredTuning, values: Sequence[Tensor], shares: Tensor, statistics: Statistics) -> Predictor:
    """Return the predictor of a tuned network, whose batch norms mix stored statistics with these."""
    network: Network = tuning.network
    with torch.no_grad():
        for name, value in zip(tuning.names, values, strict=True):
            network.get_parameter(name).copy_(value)

    def predict(inputs: Tensor) -> Prediction:
        with mix_norms(network, shares, statistics):
            return Prediction(join_heads(network, network.backbone(inputs)))

    return predict


def round_half_down(value: float) -> int:
    """Return the nearest whole number."""
    return int(value + 0.4999)
