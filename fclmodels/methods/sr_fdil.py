"""After SR-FDIL, in our reading: clients replay, and are drawn by, samples that stand for their domain and all clients.

Of SR-FDIL (Li et al., IEEE TPDS 35(11), 2024) an abstract and what others say of it were at hand, and no code: samples
are stored by their importance in the local data and by their correlation with the global data, and clients take part
by the importance of old and new data together. All formulas here are ours:

    a(x) = probability that x is of its own task, by a softmax regression over the client's tasks on features f(x),
    b(x) = cos(f(x), G_y), with G_y the mean feature of class y over all clients (0 for a class without one).

When a task has ended, clients send counts and sums of their classes' features on the final model; the server returns
the means. Each client stores the rows of highest z(a) + z(b), z the standard score over its rows, as many of each class
of each task. They are replayed as in `er`. Under `choice: importance` all clients send, before a task's rounds, the
mean of a + (1 + b) / 2 over their new rows and over their stored ones, and each round draws clients with chances in
proportion to the sum. In the first task this is FedAvg to the bit, and under `choice: uniform` its draws of clients
are FedAvg's.

knowledge: `means` {weight [labels], sum [labels, F]}, `ratings` by client. memory: `samples`.
"""

from collections.abc import Collection
from dataclasses import replace
from typing import Literal

import torch
from pydantic import Field, PositiveInt
from torch import Tensor
from torch.nn.functional import cosine_similarity, normalize

from fclmodels.backbones.layers.norms import SharedPolicy
from fclmodels.backbones.model.network import Network
from fclmodels.data.batches import Batch
from fclmodels.federation.client import Client
from fclmodels.federation.engine.cohort import Cohort
from fclmodels.federation.exchange import Answer, Exchange, Form
from fclmodels.federation.messages import Part, Payload, make_outline
from fclmodels.federation.method import Obstacle
from fclmodels.federation.run_context import Run
from fclmodels.federation.server import Server
from fclmodels.federation.training.local_training import LocalTraining
from fclmodels.methods.fedavg import FedAvg
from fclmodels.methods.parts.class_sums import add_up_classes
from fclmodels.methods.parts.coreset_memory import embed
from fclmodels.methods.parts.exemplar_memory import ExemplarMemory, ExemplarSettings
from fclmodels.methods.parts.frozen_backbone import AT_ONCE
from fclmodels.methods.parts.replay_memory import descend_both, start_replay, unpack_samples
from fclmodels.numerics.prototypes import moments

MOST_RATING = 4.0  # new rows and stored ones, each at most 1 + 1
STEPS, RATE = 100, 1.0  # of the softmax regression, on features of length 1


class SrFdil(FedAvg):
    """After SR-FDIL: clients replay, and are drawn by, what stands for their domain and all clients; our reading."""

    name = "sr-fdil"
    paper = "SR-FDIL: Synergistic Replay for Federated Domain-Incremental Learning"

    class Settings(FedAvg.Settings):
        batch_norm: SharedPolicy = Field(
            "average", description="running statistics: average over clients; batch: none; frozen after task 1"
        )
        memory: PositiveInt = Field(
            200, le=1_000_000, description="samples that a client keeps, alike of all classes (ours)"
        )
        choice: Literal["importance", "uniform"] = Field(
            "importance",
            description="how clients of a round are drawn: by importance of their samples; uniform: FedAvg's",
        )

    settings: Settings
    trains_earlier_heads = True

    def __init__(self, settings: Settings, run: Run) -> None:
        super().__init__(settings, run)
        self.memory = ExemplarMemory(ExemplarSettings(exemplars=settings.memory))
        self.describe = self.declare(Exchange("describe", self.make_payload, self.sum_classes, self.make_sums_form))
        self.store = self.declare(Exchange("remember", self.make_scored_payload, self.store_best))
        self.rate = Exchange("rate", self.make_scored_payload, self.rate_samples, self.make_ratings_form)
        if settings.choice == "importance":
            self.declare(self.rate)

    @property
    def obstacle_to_sums(self) -> Obstacle | None:
        if self.settings.choice == "uniform":
            return None
        return Obstacle("methods.sr-fdil compares single clients' importance", "Use methods.sr-fdil.choice: uniform")

    @property
    def obstacle_to_noise(self) -> Obstacle | None:
        return Obstacle("takes means of features as they are", "Use er")

    # On the server.

    def begin_task(self, server: Server, cohort: Cohort) -> Server:
        """Return the server with each client's importance, where that draws the clients of rounds."""
        if self.settings.choice == "uniform" or "means" not in server.knowledge:
            return server
        ratings = {str(k): part["rating"] for k, part in cohort.ask(self.rate, server).yield_each("rating")}
        return replace(server, knowledge={**server.knowledge, "ratings": ratings})

    def choose_clients(
        self, server: Server, round: int, available: tuple[int, ...], count: int, random: torch.Generator
    ) -> Collection[int]:
        """Return clients drawn without replacement, in proportion to their importance; unknown ones have the mean."""
        ratings = server.knowledge.get("ratings")
        if not ratings:
            return super().choose_clients(server, round, available, count, random)
        sums = {int(k): float(rating.sum().clamp(0, MOST_RATING)) for k, rating in ratings.items()}
        usual = sum(sums.values()) / len(sums)
        chances = torch.tensor([sums.get(k, usual) for k in available], dtype=torch.float64).clamp(min=1e-6)
        return [available[i] for i in torch.multinomial(chances, count, generator=random).tolist()]

    def finish_task(self, server: Server, cohort: Cohort) -> Server:
        new = cohort.ask(self.describe, server).sum("means")
        labels, features = list(server.spec.tasks[server.task]), new["sum"].shape[1]
        total = moments(torch.zeros(0, features), torch.zeros(0, dtype=torch.int64), server.spec.label_count)
        for name, old in server.knowledge.get("means", {}).items():
            total[name][: len(old)] = old
        present = torch.tensor(labels)[new["weight"] > 0]
        for name in ("weight", "sum"):
            total[name][present] = new[name][new["weight"] > 0]
        means = {name: total[name] for name in ("weight", "sum")}
        server = replace(server, knowledge={"means": means})
        cohort.ask(self.store, server)
        return server

    def make_scored_payload(self, server: Server) -> Payload:
        """Return the model and each class's mean feature, 0 for those without."""
        means = server.knowledge["means"]
        table = (means["sum"] / means["weight"].clamp(min=1)[:, None]).float()
        return {**self.make_payload(server), "means": Part("prototype", {"means": table})}

    # On a client.

    def make_sums_form(self, task: int, round: int) -> Form:
        network = self.networks.build(self.run.make_spec(task + 1))
        rows = len(network.spec.tasks[task]), network.backbone.features
        return {"means": make_outline("prototype", {"weight": rows[:1], "sum": rows}, torch.float64)}

    def make_ratings_form(self, task: int, round: int) -> Form:
        return {"rating": make_outline("statistics", {"rating": (2,)}, least="each")}

    def load_final(self, client: Client, payload: Payload) -> Network:
        """Return the model that a client was sent, in evaluation mode."""
        return self.networks.load(self.run.make_spec(client.task + 1), self.join_own_weights(client, payload)).eval()

    def sum_classes(self, client: Client, payload: Payload) -> Answer:
        """Return the counts and the sums of features of a client's classes."""
        batches = self.run.batches.iterate_ordered(client.rows, AT_ONCE)
        total = add_up_classes(self.load_final(client, payload), batches, client.task)
        return Answer({"means": {name: total[name] for name in ("weight", "sum")}}, client.memory)

    def score(self, client: Client, payload: Payload) -> tuple[Tensor, Tensor, int]:
        """Return a and b [n] of stored samples and then of the task's rows, and how many are stored."""
        old, new = unpack_samples(client.memory), self.run.batches.read_raw(client.rows)
        samples = new if old is None else Batch.concatenate([old, new])
        features = embed(client, self.load_final(client, payload), samples)
        table = payload["means"].tensors["means"].cpu()
        labels = samples.labels.cpu()
        # A class that came since the means were taken has none.
        means = table[labels.clamp(max=len(table) - 1)] * (labels < len(table))[:, None]
        correlation = cosine_similarity(features, means)
        return judge_domains(features, samples.tasks.cpu()), correlation, len(samples.labels) - len(new.labels)

    def store_best(self, client: Client, payload: Payload) -> Answer:
        """Return the memory with the task's rows that score highest; the answer itself is empty."""
        own, correlation, stored = self.score(client, payload)
        scores = standardise(own[stored:]) + standardise(correlation[stored:])
        return Answer({}, self.memory.add_task(client, self.load_final(client, payload), scores=scores))

    def rate_samples(self, client: Client, payload: Payload) -> Answer:
        """Return the mean importance of a client's new rows, and of its stored samples, 0 if there are none."""
        own, correlation, stored = self.score(client, payload)
        value = own + (1 + correlation) / 2
        means = [part.mean() if len(part) else torch.zeros(()) for part in (value[stored:], value[:stored])]
        return Answer({"rating": {"rating": torch.stack(means).clamp(min=0)}}, client.memory)

    def start_training(self, training: LocalTraining, payload: Payload) -> None:
        start_replay(training)

    def compute_loss(self, training: LocalTraining, batch: Batch) -> Tensor:
        return descend_both(self, training, batch, self.compute_cross_entropy)


def judge_domains(features: Tensor, tasks: Tensor) -> Tensor:
    """Return the probability [n] of each sample's own task, by a softmax regression on features [n, F] of length 1."""
    f, (domains, own) = normalize(features), tasks.unique(return_inverse=True)
    weight, bias = f.new_zeros(len(domains), f.shape[1]), f.new_zeros(len(domains))
    right = torch.nn.functional.one_hot(own, len(domains)).to(f)
    for _ in range(STEPS):
        error = ((f @ weight.T + bias).softmax(1) - right) / len(f)
        weight, bias = weight - RATE * error.T @ f, bias - RATE * error.sum(0)
    return (f @ weight.T + bias).softmax(1).gather(1, own[:, None])[:, 0]


def standardise(values: Tensor) -> Tensor:
    """Return (x - mean) / deviation, 0 where all are alike."""
    deviation = values.std(correction=0) if len(values) else values.sum()
    return (values - values.mean()) / deviation if deviation > 1e-6 else torch.zeros_like(values)
