"""LoRM: low-rank factors that the server merges in closed form, over clients and over tasks (Salami et al., ICLR 2025).

In a task's odd rounds B trains, in its even ones A, and the head in all; the other factor is the same for all clients.
With G_k = sum x x^T over a map's inputs, whose off-diagonal numbers are multiplied by a share a, the merged factor is
the one whose outputs are nearest to the clients' own, in least squares:

    A = A' + (sum_k (A_k - A') G_k) (sum_k G_k)^+,   B = B' + (sum_k (B_k - B') A G_k A^T) (A sum_k G_k A^T)^+,

A' and B' being those that the round began with, so that what no input reaches stays (ours; the release drops it). The
head is merged as A is, its bias averaged. A task trains W_0 + B_t A_t without earlier tasks; between rounds
W_0 + mean_t B_t A_t answers, and its inputs are what G_k is of. After a task clients send G once more, and from then on

    W = W_0 + (sum_t B_t A_t G_t) (sum_t G_t)^+

answers, which the server keeps as factors: B_t and A_t G_t (sum G)^+, and sum G for each map's layer. Clients send
products and sums alone. The release's a are 0, so that d numbers stand for G, and 0.5 for the head; rank 16 is its
value for the more uneven splits of CIFAR-100. It takes G of augmented samples, we of samples as they are prepared.

knowledge: `merged`, {task, grams {layer: [d] or [d, d]}, weighted {factor: A_t G_t}}.
"""

from collections.abc import Mapping
from dataclasses import replace

import torch
from pydantic import Field, PositiveInt
from torch import Tensor

from fclmodels.backbones.adapters.low_rank import LowRank, Target, name_factor
from fclmodels.backbones.model.network import FROZEN, Network, NetworkCache
from fclmodels.federation.client import Client
from fclmodels.federation.engine.cohort import Cohort
from fclmodels.federation.engine.replies import Replies
from fclmodels.federation.exchange import Answer, Exchange, Form
from fclmodels.federation.messages import Payload, make_outline
from fclmodels.federation.method import Obstacle
from fclmodels.federation.prediction import Predictor
from fclmodels.federation.run_context import Run
from fclmodels.federation.server import Server
from fclmodels.federation.training.local_training import LocalTraining
from fclmodels.methods.parts.frozen_backbone import AT_ONCE, get_backbone
from fclmodels.methods.parts.input_grams import Grams, sum_inputs
from fclmodels.methods.parts.task_adapters import AdapterTraining
from fclmodels.methods.parts.trained_network import Weights
from fclmodels.methods.parts.whole_answers import refuse_late_answers, refuse_server_lr
from fclmodels.numerics.regression_mean import damp, multiply, sandwich, solve

HEAD = "heads."


class Lorm(AdapterTraining):
    """Trains factors in turns and merges them by least squares on the clients' inputs, over tasks too."""

    name = "lorm"
    paper = "Closed-form Merging of Parameter-Efficient Modules for Federated Continual Learning"

    attaches = LowRank

    class Settings(LowRank.Settings):
        rank: PositiveInt = Field(
            16, le=1024, description="r, the rank of what a task adds to a map (release: 1 to 32)"
        )
        targets: tuple[Target, ...] = Field(
            ("attention-in", "output", "perceptron-in", "perceptron-out"),
            min_length=1,
            description="the maps that change; attention-in: queries, keys and values, of a vit as one map",
        )
        share: float = Field(0.0, ge=0, le=1, description="a, factor on off-diagonal numbers of G; 0: d numbers travel")
        head_share: float = Field(0.5, ge=0, le=1, description="a of the head's G")

    settings: Settings

    def __init__(self, settings: Settings, run: Run) -> None:
        super().__init__(settings, run)
        refuse_server_lr(run, "lorm solves for what clients learned, whole")
        refuse_late_answers(run, "lorm trains one factor a round, and a late answer is about the other")
        self.observed = NetworkCache(self.run.device, self.prepare_network)
        self.ask_grams = self.declare(Exchange("grams", self.make_payload, self.answer, self.make_grams_form))

    @property
    def obstacle_to_noise(self) -> Obstacle | None:
        return Obstacle("divides by sums of inputs, which noise would distort", "Use lora or o-lora")

    @property
    def obstacle_to_robust_rules(self) -> Obstacle | None:
        return Obstacle("adds up products with inputs", "Use mean")

    # Maps and heads by name.

    def list_factors(self, task: int, factor: str) -> dict[str, str]:
        """Return the layer of each of a task's factors, by the factor's name."""
        adapted = get_backbone(self.networks.build(self.run.make_spec(task + 1)))
        assert isinstance(adapted, LowRank)
        return {name_factor(task, index, factor): of.layer for index, of in enumerate(adapted.maps)}

    def list_head(self, task: int) -> dict[str, str]:
        """Return the layer of the head that a task trains, by the name of its weight."""
        head = task if self.run.make_spec(task + 1).head == "per-task" else 0
        return {f"{HEAD}{head}.weight": f"{HEAD}{head}"}

    def list_widths(self, task: int, layers: Mapping[str, str]) -> dict[str, int]:
        """Return the width of each layer among the values."""
        adapted = get_backbone(self.networks.build(self.run.make_spec(task + 1)))
        widths = {}
        for name in layers.values():
            is_head = name.startswith(HEAD)
            widths[name] = adapted.features if is_head else adapted.frozen.get_parameter(f"{name}.weight").shape[1]
        return widths

    # On the server.

    def aggregate(self, server: Server, replies: Replies) -> Server:
        server, sums = super().aggregate(server, replies), replies.sum("solved")
        weights = dict(server.weights)
        for name in (n.removeprefix("times.") for n in sums if n.startswith("times.")):
            moved = solve(sums[f"times.{name}"], sums[f"gram.{name}"])
            weights[name] = weights[name] + moved.to(weights[name])
        return replace(server, weights=weights)

    def finish_task(self, server: Server, cohort: Cohort) -> Server:
        grams = cohort.ask(self.ask_grams, server).sum("grams")
        old = server.knowledge.get("merged", {"grams": {}, "weighted": {}})
        total = {layer: G + old["grams"].get(layer, 0) for layer, G in grams.items()}
        new = {n: multiply(server.weights[n], grams[layer]) for n, layer in self.list_factors(server.task, "A").items()}
        merged = {"task": server.task, "grams": total, "weighted": {**old["weighted"], **new}}
        return replace(server, knowledge={**server.knowledge, "merged": merged})

    def find_answering_weights(self, server: Server) -> Weights:
        """Return the weights of the model that answers: merged after a task, else the mean of the tasks' changes."""
        merged = server.knowledge.get("merged", {"task": -1})
        if merged["task"] != server.task:
            return average_tasks(server.weights, server.task)
        weights = dict(server.weights)
        for task in range(server.task + 1):
            for name, layer in self.list_factors(task, "A").items():
                weights[name] = solve(merged["weighted"][name], merged["grams"][layer]).to(weights[name])
        return weights

    def make_predictor(self, server: Server) -> Predictor:
        return super().make_predictor(replace(server, weights=self.find_answering_weights(server)))

    # What travels.

    def make_update_form(self, task: int, round: int) -> Form:
        """Return the outlines of the head's bias, and of products and sums for one factor and the head's weight."""
        form, network = super().make_update_form(task, round), self.networks.build(self.run.make_spec(task + 1))
        biases = {n: t for n, t in form["update"].tensors.items() if n.startswith(HEAD) and n.endswith("bias")}
        shapes: dict[str, tuple[int, ...]] = {}
        for name, layer in (self.list_factors(task, choose_factor(round)) | self.list_head(task)).items():
            shapes[f"times.{name}"] = tuple(network.get_parameter(name).shape)
            shapes[f"gram.{name}"] = self.shape_gram(task, name, layer)
        solved = make_outline("input-statistics", shapes, torch.float64)
        return {**form, "update": replace(form["update"], tensors=biases), "solved": solved}

    def shape_gram(self, task: int, name: str, layer: str) -> tuple[int, ...]:
        """Return the shape of the sum that goes with a factor or a head's weight."""
        if name.endswith(".B"):
            return self.settings.rank, self.settings.rank
        (width,) = self.list_widths(task, {name: layer}).values()
        is_diagonal = (self.settings.head_share if layer.startswith(HEAD) else self.settings.share) == 0
        return (width,) if is_diagonal else (width, width)

    def make_grams_form(self, task: int, round: int) -> Form:
        shapes = {layer: self.shape_gram(task, name, layer) for name, layer in self.list_factors(task, "A").items()}
        return {"grams": make_outline("input-statistics", shapes, torch.float64)}

    # On a client.

    @torch.no_grad()
    def start_training(self, training: LocalTraining, payload: Payload) -> None:
        """Set the changes of earlier tasks to zero, which a task trains without, and train one factor."""
        for name in (name for task in range(training.client.task) for name in self.list_factors(task, "B")):
            training.network.get_parameter(name).zero_()
        fixed = self.list_factors(training.client.task, "A" if choose_factor(training.client.round) == "B" else "B")
        training.parameters = {name: p for name, p in training.parameters.items() if name not in fixed}

    def make_further_parts(self, training: LocalTraining, payload: Payload) -> Mapping[str, Mapping[str, Tensor]]:
        """Return products of what a client changed and its sums over inputs."""
        client, start = training.client, training.start
        factor = choose_factor(client.round)
        names = self.list_factors(client.task, factor) | self.list_head(client.task)
        own = {name: tensor.detach() for name, tensor in training.network.state_dict().items()}
        grams = self.sum_grams(client, self.join_own_weights(client, payload) | {n: own[n] for n in names}, names)
        solved: dict[str, Tensor] = {}
        for name, layer in names.items():
            change = (own[name] - start[name]).cpu()
            gram = sandwich(own[f"{name[:-1]}A"].cpu(), grams[layer]) if name.endswith(".B") else grams[layer]
            solved |= {f"times.{name}": multiply(change, gram), f"gram.{name}": gram}
        return {"solved": solved}

    def answer(self, client: Client, payload: Payload) -> Answer:
        """Return the sums over a client's inputs on the model that the task ends with."""
        weights, factors = self.join_own_weights(client, payload), self.list_factors(client.task, "A")
        return Answer({"grams": self.sum_grams(client, weights, factors)}, client.memory)

    def sum_grams(self, client: Client, weights: Weights, names: Mapping[str, str]) -> Grams:
        """Return the damped sums of the layers of some factors, on W_0 + the mean of all tasks' changes."""
        network: Network = self.observed.load(self.run.make_spec(client.task + 1), average_tasks(weights, client.task))
        batches = self.run.batches.iterate_ordered(client.rows, AT_ONCE)
        shares = {n: self.settings.head_share if n.startswith(HEAD) else self.settings.share for n in names.values()}
        diagonal = [layer for layer, share in shares.items() if share == 0]
        grams = sum_inputs(network, batches, self.list_widths(client.task, names), FROZEN, diagonal)
        return {layer: damp(gram, shares[layer]) for layer, gram in grams.items()}


def choose_factor(round: int) -> str:
    """Return the factor that a round trains, round 0 being a task's first."""
    return "A" if round % 2 else "B"


def average_tasks(weights: Weights, task: int) -> Weights:
    """Return the weights of W_0 + the mean of the tasks' changes."""
    return {
        n: w / (task + 1) if n.startswith("backbone.prompts.") and n.endswith(".B") else w for n, w in weights.items()
    }
