"""PILoRA: low-rank factors a task, and a centre for each class in place of a head (Guo et al., ECCV 2024).

With d_j = ||f - c_j|| / sqrt(F) for features f [F] and centres c_j, a client descends

    CE(-d) + pull d_y + sparse |A_t| + orthogonal sum_{i < t} |A_i A_t^T|,

absolute values summed over maps, CE over all classes so far; only the task's centres and factors move. It sends them
with the count and the sum of its features of each class. Factors are averaged; the server's centre of a class is
sum_k w_k c_k over the round's clients, those nearest to the class's means counting most:

    s_k = sum_m ||c_k - mean_m|| over clients m that have it,   u = 1/s scaled to 0..1,   w = softmax(u / 0.2).

The nearest centre answers. Where the release is wrong or says nothing we choose: the factors of all tasks take part
(its evaluation has the first task's alone), CE leaves out classes that have not come, and w is uniform where all u are
equal or nobody has the class. Rank, map, layer and weights are the release's; its rates are 10^-5 for factors and 0.002
for centres (`centre_lr`).
"""

from collections.abc import Mapping
from dataclasses import replace

import torch
from pydantic import Field, NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt
from torch import Tensor
from torch.nn.functional import cross_entropy

from fclmodels.backbones.adapters.adapted import PROMPTS
from fclmodels.backbones.adapters.low_rank import LowRank
from fclmodels.backbones.model.network import Network
from fclmodels.backbones.model.spec import to_local_labels
from fclmodels.data.batches import Batch
from fclmodels.federation.engine.replies import Replies
from fclmodels.federation.exchange import Form
from fclmodels.federation.messages import Payload, make_outline
from fclmodels.federation.method import Obstacle
from fclmodels.federation.prediction import FittedHead
from fclmodels.federation.run_context import Run
from fclmodels.federation.server import Server
from fclmodels.federation.training.local_training import LocalTraining, ParameterGroup
from fclmodels.methods.parts.class_sums import add_up_classes
from fclmodels.methods.parts.frozen_backbone import AT_ONCE
from fclmodels.methods.parts.task_adapters import AdapterTraining
from fclmodels.methods.parts.whole_answers import refuse_late_answers, refuse_server_lr
from fclmodels.numerics.low_rank_overlap import measure_overlap

SHARPNESS = 0.2  # tau of the weights of centres
START = 0.1  # deviation of a centre's first numbers
LEAST = 1e-12


class PiLora(AdapterTraining):
    """Trains orthogonal low-rank factors, and class centres that count by their nearness to class means."""

    name = "pilora"
    paper = "PILoRA: Prototype Guided Incremental LoRA for Federated Class-Incremental Learning"
    attaches = LowRank

    class Settings(LowRank.Settings):
        rank: PositiveInt = Field(4, le=1024, description="r, the rank of what a task adds to a map")
        layers: tuple[NonNegativeInt, ...] | None = Field(
            (0,), description="layers, from 0, that change (the release: the first); null: all"
        )
        pull: NonNegativeFloat = Field(0.001, le=1e6, description="weight of the distance from the own class's centre")
        sparse: NonNegativeFloat = Field(0.01, le=1e6, description="weight of |A_t|")
        orthogonal: NonNegativeFloat = Field(0.5, le=1e6, description="weight of |A_i A_t^T| for earlier tasks i")
        centre_lr: PositiveFloat | None = Field(
            None, le=1e6, description="learning rate of centres; null: optimizer.lr (release: 0.002 beside 0.00001)"
        )

    settings: Settings

    def __init__(self, settings: Settings, run: Run) -> None:
        super().__init__(settings, run)
        refuse_server_lr(run, "pilora sets centres to the weighted mean of the clients', whole")
        refuse_late_answers(run, "pilora weighs the centres of a round against each other")

    @property
    def obstacle_to_sums(self) -> Obstacle | None:
        return Obstacle("methods.pilora weighs single clients' centres", "Use o-lora")

    @property
    def obstacle_to_noise(self) -> Obstacle | None:
        return Obstacle("compares single clients' centres with class means", "Use o-lora")

    # On the server.

    def start_task(self, server: Server, task: int) -> Server:
        """Return the server with small random centres of the task's new classes."""
        started = super().start_task(server, task)
        name, before = self.name_centres(task), server.weights.get(self.name_centres(task))
        drawn = START * torch.randn(started.weights[name].shape, generator=self.run.make_generator("centres", task))
        if task > 0 and before is not None:
            drawn[: len(before)] = before.cpu()
        return replace(started, weights={**started.weights, name: drawn.to(started.weights[name])})

    def name_centres(self, task: int) -> str:
        """Return the name of the weight whose rows are the centres that a task trains."""
        return f"heads.{task if self.run.make_spec(task + 1).head == 'per-task' else 0}.weight"

    def find_rows(self, task: int) -> Tensor:
        """Return the rows of a task's classes among these centres."""
        spec = self.run.make_spec(task + 1)
        labels = torch.tensor(spec.tasks[task])
        return to_local_labels(spec, task, labels) if spec.head == "per-task" else labels

    def aggregate(self, server: Server, replies: Replies) -> Server:
        server = super().aggregate(server, replies)
        parts = [part for _, part in replies.yield_each("centres")]
        stacked = {name: torch.stack([part[name] for part in parts]) for name in parts[0]}
        name, rows = self.name_centres(server.task), self.find_rows(server.task)
        centres = server.weights[name].clone()
        centres[rows] = weigh_centres(**stacked).to(centres)
        return replace(server, weights={**server.weights, name: centres})

    def find_head(self, server: Server) -> FittedHead | None:
        """Return the linear head whose largest logit is the nearest centre."""
        names = [f"heads.{index}.weight" for index in range(len(server.spec.head_labels))]
        centres = torch.cat([server.weights[name] for name in names])
        return FittedHead(centres, -centres.square().sum(1) / 2)

    # What travels.

    def make_update_form(self, task: int, round: int) -> Form:
        form = super().make_update_form(task, round)
        factors = {name: t for name, t in form["update"].tensors.items() if name.startswith(PROMPTS)}
        spec = self.run.make_spec(task + 1)
        rows = len(spec.tasks[task]), self.networks.build(spec).backbone.features
        shapes = {"weight": rows[:1], "sum": rows, "centre": rows}
        centres = make_outline("prototype", shapes, torch.float64, least="each")
        return {**form, "update": replace(form["update"], tensors=factors), "centres": centres}

    @torch.no_grad()
    def make_further_parts(self, training: LocalTraining, payload: Payload) -> Mapping[str, Mapping[str, Tensor]]:
        """Return the task's centres, and counts and sums of the client's features on its own model."""
        network, task = training.network, training.client.task
        total = add_up_classes(network, self.run.batches.iterate_ordered(training.client.rows, AT_ONCE), task)
        centres = network.get_parameter(self.name_centres(task))[self.find_rows(task)]
        return {"centres": {"weight": total["weight"], "sum": total["sum"], "centre": centres.double().cpu()}}

    # On a client.

    def group_parameters(self, training: LocalTraining) -> list[ParameterGroup]:
        if self.settings.centre_lr is None:
            return []
        chosen = self.run.params.optimizer.model_copy(update={"lr": self.settings.centre_lr})
        return [ParameterGroup([self.name_centres(training.client.task)], chosen)]

    @torch.no_grad()
    def change_gradients(self, training: LocalTraining) -> None:
        """Leave earlier classes' centres where they are."""
        gradient = training.gradients[self.name_centres(training.client.task)]
        own = self.find_rows(training.client.task)
        moving = gradient[own].clone()
        gradient.zero_()
        gradient[own] = moving

    def compute_loss(self, training: LocalTraining, batch: Batch) -> Tensor:
        network, task, settings = training.network, training.client.task, self.settings
        per_task = network.spec.head == "per-task"
        labels = to_local_labels(network.spec, task, batch.labels) if per_task else batch.labels
        distances = measure_distances(training.compute_features(batch), network.get_parameter(self.name_centres(task)))
        loss = cross_entropy(-distances, labels) + settings.pull * distances.gather(1, labels[:, None]).mean()
        return loss + self.measure_factors(network, task)

    def measure_factors(self, network: Network, task: int) -> Tensor:
        """Return sparse |A_t| + orthogonal sum_i |A_i A_t^T| over all maps."""
        factors = {name: p for name, p in network.named_parameters() if name.startswith(f"{PROMPTS}.")}
        total = next(iter(factors.values())).new_zeros(())
        for name, A in factors.items():
            place = name.removeprefix(f"{PROMPTS}.{task}.")
            if place == name or not name.endswith("A"):
                continue
            total = total + self.settings.sparse * A.abs().sum()
            if task > 0:
                earlier = torch.cat([factors[f"{PROMPTS}.{i}.{place}"] for i in range(task)])
                total = total + self.settings.orthogonal * measure_overlap(earlier, A)
        return total


def measure_distances(features: Tensor, centres: Tensor) -> Tensor:
    """Return ||f - c|| / sqrt(F) [B, C] of features [B, F] and centres [C, F]."""
    squares = (features[:, None] - centres[None]).square().sum(-1)
    return squares.clamp(min=LEAST).sqrt() / features.shape[1] ** 0.5


def weigh_centres(weight: Tensor, sum: Tensor, centre: Tensor) -> Tensor:
    """Return the server's centres [C, F] from clients' counts [K, C], sums of features and centres [K, C, F]."""
    means = sum / weight.clamp(min=1)[..., None]
    distances = (centre[:, None] - means[None]).norm(dim=-1)  # of client k's centre and client m's mean [K, K, C]
    s = (distances * (weight > 0)[None]).sum(1)
    r = 1 / s.clamp(min=LEAST)
    spread = r.amax(0) - r.amin(0)
    is_equal = (spread <= LEAST * r.amax(0)) | ~(weight > 0).any(0)
    u = torch.where(is_equal, torch.zeros_like(r), (r - r.amin(0)) / spread.where(~is_equal, torch.ones_like(spread)))
    return ((u / SHARPNESS).softmax(0)[..., None] * centre).sum(0)
