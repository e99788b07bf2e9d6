"""pFedDIL: personal models that know their own samples, and answer together (Li et al., ECCV 2024), in our reading.

A client keeps up to `models` models, each with an auxiliary head beside its own: s_i(x), the probability that a sample
is of the model's tasks. When a task arrives, rho_i is the mean of s_i over its rows. Where some rho_i reaches
`threshold` the client's first round of the task starts at that model, whose place and head the new one takes; else at
the server's, and the new model takes a free place, or that of the lowest rho. Its loss is

    L = CE + migration sum_i rho_i ||w - w_i||^2

over all stored models, and the server is FedAvg's. A client answers with sum_i s_i(x) p_i(x) / sum_i s_i(x) of the
stored models' probabilities p_i (readings personal_*).

There is no code, and a reader's notes are what is known: the models and their heads, rho, the loss without a weight,
and the answer. Ours: all that trains auxiliary heads, threshold, places, and that later rounds start at the server's
model. When a task has ended, the head of its model learns the task's rows against the same rows with their pixels in
random order, and the heads of all other models learn that the rows are not theirs; no model moves for that. What is
taken for "not mine" decides much, and the paper may take something else.

With one place, or a threshold of 1, every round starts at the server's model, and without migration that is FedAvg.
memory: `models` {weights, aux, task}, `present` {task, place, starts, rho, weights}. None of it leaves the client.
"""

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import torch
from pydantic import Field, NonNegativeFloat, PositiveInt
from torch import Tensor, nn
from torch.nn.functional import binary_cross_entropy_with_logits

from fclmodels.backbones.layers.norms import SharedPolicy
from fclmodels.backbones.model.network import Network
from fclmodels.data.batches import Batch
from fclmodels.data.sample_kind import TEXTS, find_kind
from fclmodels.errors import UserError
from fclmodels.federation.client import Client
from fclmodels.federation.engine.cohort import Cohort
from fclmodels.federation.exchange import Answer, Exchange, Memory
from fclmodels.federation.messages import Payload
from fclmodels.federation.prediction import Prediction, Predictor, predict_by_heads
from fclmodels.federation.run_context import Run
from fclmodels.federation.server import Server
from fclmodels.federation.training.local_training import LocalTraining
from fclmodels.federation.training.optimisers import make_optimiser
from fclmodels.methods.fedavg import FedAvg
from fclmodels.methods.parts.coreset_memory import extract_in_parts
from fclmodels.methods.parts.joined_heads import count_columns, join_heads
from fclmodels.methods.parts.trained_network import SharedNetwork

Weights = dict[str, Tensor]


class Stored:
    """The models that a client has stored, as one training is drawn to them."""

    def __init__(self, models: Sequence[Weights], relevances: Sequence[float]) -> None:
        self.models = models
        self.relevances = relevances


class PFedDil(FedAvg):
    """Clients keep models that know their own samples, start tasks from them and answer with all; our reading."""

    name = "pfeddil"
    paper = "Personalized Federated Domain-Incremental Learning based on Adaptive Knowledge Matching"
    has_global_model = True

    class Settings(FedAvg.Settings):
        batch_norm: SharedPolicy = Field(
            "average", description="running statistics: average over clients; batch: none; frozen after task 1"
        )
        models: PositiveInt = Field(5, le=1000, description="models that a client keeps (the paper's d; 5 is ours)")
        threshold: float = Field(
            0.5, ge=0, le=1, description="mean own probability from which a stored model goes on (ours); 1: never"
        )
        migration: NonNegativeFloat = Field(
            1.0, le=1e6, description="weight of rho |w - w_i|^2 over stored models (paper: no weight)"
        )
        aux_epochs: PositiveInt = Field(
            5, le=10_000, description="passes that train auxiliary heads after a task (ours)"
        )

    settings: Settings

    def __init__(self, settings: Settings, run: Run) -> None:
        super().__init__(settings, run, SharedNetwork(run, settings.batch_norm))
        if find_kind(run.splits.shape) is TEXTS:
            raise UserError("methods.pfeddil mixes up pixels of images, these samples are texts. Use re-fed or er.")
        self.store = self.declare(Exchange("remember", lambda: {}, self.store_model))

    def finish_task(self, server: Server, cohort: Cohort) -> Server:
        cohort.ask(self.store)
        return server

    # On a client.

    def prepare_training(self, client: Client, payload: Payload) -> LocalTraining:
        present = client.memory.get("present", {"task": -1})
        is_first = present["task"] != client.task
        if is_first:
            present = self.choose_place(client)
        training = super().prepare_training(client, payload)
        models = client.memory.get("models", {})
        if is_first and present["starts"]:
            with torch.no_grad():
                state = training.network.state_dict()
                for name, weight in models[str(present["place"])]["weights"].items():
                    rows = slice(len(weight)) if weight.ndim else ...
                    state[name][rows] = weight
        training.add(Stored([one["weights"] for one in models.values()], present["rho"]))
        training.add(Present(present))
        return training

    def choose_place(self, client: Client) -> dict[str, Any]:
        """Return where the task's model will stand, whether it starts at the one there, and each rho_i."""
        models = client.memory.get("models", {})
        inputs = self.run.batches.read_raw(client.rows)
        rho = []
        for one in models.values():
            features = extract_in_parts(client, self.load_model(client, one).backbone, inputs)
            rho.append(float(detect(one["aux"], features).mean()))
        place, starts = choose_model(rho, self.settings.models, self.settings.threshold)
        return {"task": client.task, "place": place, "starts": starts, "rho": rho}

    def load_model(self, client: Client, one: Mapping[str, Any]) -> Network:
        """Return a stored model in evaluation mode, with the rows of later classes as the seed draws them."""
        before, after = self.run.make_spec(one["task"] + 1), self.run.make_spec(client.task + 1)
        return self.networks.load(after, self.network.grow(one["weights"], before, after)).eval()

    def compute_loss(self, training: LocalTraining, batch: Batch) -> Tensor:
        loss, stored = super().compute_loss(training, batch), training.find_added(Stored)
        if stored is None or not stored.models or not self.settings.migration:
            return loss
        return loss + self.settings.migration * measure_migration(training.parameters, stored.models, stored.relevances)

    def remember(self, training: LocalTraining) -> Memory:
        present, memory = training.find_added(Present), super().remember(training)
        assert present is not None
        weights = {name: tensor.clone() for name, tensor in training.network.state_dict().items()}
        return {**memory, "present": {**present.facts, "weights": weights}}

    def store_model(self, client: Client, payload: Payload) -> Answer:
        """Return the memory with the task's model, where the client took part, and all auxiliary heads trained."""
        memory = dict(client.memory)
        models, present = dict(memory.get("models", {})), memory.pop("present", {"task": -1})
        raw = self.run.batches.read_raw(client.rows)
        place = None
        if present["task"] == client.task:
            place = str(present["place"])
            aux = models[place]["aux"] if present["starts"] else None
            models[place] = {"weights": present["weights"], "aux": aux, "task": client.task}
        for name, one in models.items():
            backbone = self.load_model(client, one).backbone
            own = extract_in_parts(client, backbone, raw)
            if name == place:
                random = client.make_generator("mix")
                mixed = extract_in_parts(client, partial(extract_mixed, backbone, random=random), raw)
                features, mine = torch.cat([own, mixed]), torch.cat([torch.ones(len(own)), torch.zeros(len(mixed))])
            else:
                features, mine = own, torch.zeros(len(own))
            models[name] = {**one, "aux": self.train_detector(client, one["aux"], features, mine)}
        return Answer({}, {**memory, "models": models})

    def train_detector(self, client: Client, aux: Weights | None, features: Tensor, mine: Tensor) -> Weights:
        """Return an auxiliary head after passes over features [n, F] and whether they are the model's own [n]."""
        start = aux or {"weight": torch.zeros(features.shape[1]), "bias": torch.zeros(())}
        head = {name: nn.Parameter(tensor.cpu().clone()) for name, tensor in start.items()}
        optimiser = make_optimiser(self.run.params.optimizer, list(head.values()), 0)
        random = client.make_generator("aux")
        for _ in range(self.settings.aux_epochs):
            for places in torch.randperm(len(features), generator=random).split(self.run.params.federation.batch_size):
                optimiser.zero_grad()
                scores = features[places] @ head["weight"] + head["bias"]
                binary_cross_entropy_with_logits(scores, mine[places]).backward()
                optimiser.step()
        return {name: parameter.detach() for name, parameter in head.items()}

    def make_client_predictor(self, client: Client, payload: Payload) -> Predictor:
        models = client.memory.get("models", {})
        if not models:
            return predict_by_heads(
                self.networks.load(self.run.make_spec(client.task + 1), self.join_own_weights(client, payload))
            )

        def predict(inputs: Tensor) -> Prediction:
            own, answers = [], []
            for one in models.values():
                network = self.load_model(client, one)
                features = network.backbone(inputs)
                logits = join_heads(network, features)
                logits[:, count_columns(self.run.make_spec(one["task"] + 1)) :] = -torch.inf
                answers.append(logits.softmax(1))
                own.append(detect(one["aux"], features))
            return Prediction(mix_answers(torch.stack(own), torch.stack(answers)))

        return predict


class Present:
    """What a client has chosen for the task, in one training."""

    def __init__(self, facts: Mapping[str, Any]) -> None:
        self.facts = facts


def choose_model(rho: Sequence[float], places: int, threshold: float) -> tuple[int, bool]:
    """Return the place of a task's model, and whether it starts at the model there, from each rho."""
    if rho and places > 1 and max(rho) >= threshold and threshold < 1:
        return rho.index(max(rho)), True
    return (len(rho), False) if len(rho) < places else (rho.index(min(rho)), False)


def detect(aux: Weights, features: Tensor) -> Tensor:
    """Return s [n], the probability that samples of these features [n, F] are a model's own."""
    return (features @ aux["weight"].to(features) + aux["bias"].to(features)).sigmoid()


def measure_migration(
    parameters: Mapping[str, Tensor], models: Sequence[Mapping[str, Tensor]], rho: Sequence[float]
) -> Tensor:
    """Return sum_i rho_i ||w - w_i||^2, over the rows that a stored model has."""
    terms = [
        r * (w[: len(model[name])] - model[name]).square().sum()
        for r, model in zip(rho, models, strict=True)
        for name, w in parameters.items()
        if name in model
    ]
    return torch.stack(terms).sum()


def mix_pixels(inputs: Tensor, random: torch.Generator) -> Tensor:
    """Return images [n, C, H, W] with the pixels of each in an order of its own."""
    flat = inputs.flatten(2)
    orders = torch.rand(len(flat), 1, flat.shape[2], generator=random).argsort(2).to(flat.device)
    return flat.gather(2, orders.expand_as(flat)).view_as(inputs)


def extract_mixed(backbone: nn.Module, inputs: Tensor, random: torch.Generator) -> Tensor:
    """Return a backbone's features [n, F] of images with mixed pixels."""
    features: Tensor = backbone(mix_pixels(inputs, random))
    return features


def mix_answers(own: Tensor, answers: Tensor) -> Tensor:
    """Return sum_i s_i p_i / sum_i s_i [n, C] of s [models, n] and p [models, n, C]."""
    weights = own / own.sum(0).clamp(min=torch.finfo(own.dtype).tiny)
    return (weights[..., None] * answers).sum(0)
