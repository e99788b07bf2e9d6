"""The nearest-prototype classifier: no training; a class is the mean of its features on the frozen backbone.

Each client sends its classes' counts and sums once a task, in the first round in which its reply arrives. A head is
the linear form of the nearest mean (Snell et al. 2017, section 2.4, halved): w_c = mu_c, b_c = -||mu_c||^2 / 2. A class
of which no client has sent samples is never the answer.

knowledge: `told`, {head: {weight [C], sum [C, F]}}; `heard`, the clients that have sent those of the present task.
"""

from dataclasses import replace
from typing import ClassVar

import torch
from torch import Tensor

from fclmodels.backbones.adapters.adapted import Adapted
from fclmodels.backbones.model.spec import to_local_labels
from fclmodels.federation.client import Client
from fclmodels.federation.engine.replies import Replies
from fclmodels.federation.exchange import Answer, Form
from fclmodels.federation.messages import Part, Payload
from fclmodels.federation.method import Obstacle
from fclmodels.federation.run_context import Run
from fclmodels.federation.server import Server
from fclmodels.methods.fedavg import FedAvg
from fclmodels.methods.parts.frozen_backbone import AT_ONCE, FrozenBackbone
from fclmodels.numerics.prototypes import BOUND, clip_rows, from_units, moments, to_units
from fclmodels.settings.base import Settings as BaseSettings

NEVER = -1e9  # the logit of a class without a prototype


class NearestPrototype(FedAvg):
    """Answers with the class whose mean feature on the frozen backbone is nearest."""

    name = "nearest-prototype"
    paper = "Prototypical Networks for Few-shot Learning"
    attaches: ClassVar[type[Adapted]] = Adapted  # nothing

    class Settings(BaseSettings):
        pass

    def __init__(self, settings: Settings, run: Run) -> None:
        self.backbone = FrozenBackbone(settings, run, self.name, self.attaches)
        super().__init__(settings, self.backbone.run, self.backbone)

    def list_advice(self) -> list[str]:
        return self.backbone.list_advice()

    @property
    def obstacle_to_robust_rules(self) -> Obstacle | None:
        return Obstacle("adds up counts and sums", "Use mean")

    @property
    def obstacle_to_noise(self) -> Obstacle | None:
        federation = self.run.params.federation
        if federation.privacy.sample_rate < 1 and federation.rounds != 1:
            return Obstacle(
                "hears each client once, whether it joins or not", "Use federation.rounds: 1, or sample_rate: 1"
            )
        return None

    def start_task(self, server: Server, task: int) -> Server:
        started, sums = super().start_task(server, task), server.knowledge.get("told", {})
        heads = {n: W for n, W in started.weights.items() if n.startswith("heads.") and n.endswith("weight")}
        grown = {}
        for name, W in heads.items():
            total = moments(W[:0], torch.zeros(0, dtype=torch.int64), len(W))
            for part, value in sums.get(name, {}).items():
                total[part][: len(value)] = value
            grown[name] = total
        return set_heads(started, grown, clients=torch.zeros(0, dtype=torch.int64))

    def make_payload(self, server: Server) -> Payload:
        return {**super().make_payload(server), "heard": Part("count", {"clients": server.knowledge["heard"]})}

    def make_update_form(self, task: int, round: int) -> Form:
        network = self.networks.build(self.run.make_spec(task + 1))
        return {"moments": self.backbone.make_moments_form(network, task, BOUND)}

    def aggregate(self, server: Server, replies: Replies) -> Server:
        own, new = server.spec.head == "per-task", replies.sum("moments")
        if (clip := self.backbone.feature_clip) is not None:
            new = from_units(new, clip, replies.compute_noise("moments"))
        classes = server.spec.tasks[server.task]
        head = f"heads.{server.task if own else 0}.weight"
        rows = torch.arange(len(classes)) if own else torch.tensor(classes)
        total = {n: value.index_add(0, rows, new[n]) for n, value in server.knowledge["told"][head].items()}
        clients = torch.cat([server.knowledge["heard"], torch.tensor(sorted(replies.facts))]).unique()
        return set_heads(server, {**server.knowledge["told"], head: total}, clients)

    @torch.no_grad()
    def train(self, client: Client, payload: Payload) -> Answer:
        """Return the moments of the client's classes; zeros where the server has them already."""
        network = self.networks.load(self.run.make_spec(client.task + 1), payload["weights"].tensors).eval()
        classes, rows, clip = len(network.spec.tasks[client.task]), client.rows, self.backbone.feature_clip
        nothing = torch.zeros(0, network.backbone.features)
        total = moments(nothing, torch.zeros(0, dtype=torch.int64), classes)
        if client.index not in payload["heard"].tensors["clients"]:
            for batch in self.run.batches.iterate_ordered(rows, AT_ONCE):
                features = self.backbone.compute_features(network, batch, client.task).features
                if clip is not None:
                    features = clip_rows(features, clip)
                of_batch = moments(features, to_local_labels(network.spec, client.task, batch.labels), classes)
                total = {name: value + of_batch[name].cpu() for name, value in total.items()}
        if clip is not None:
            total = to_units(total, clip)
        return Answer({"moments": total}, client.memory, 0.0, len(rows))


def set_heads(server: Server, sums: dict[str, dict[str, Tensor]], clients: Tensor) -> Server:
    """Return the server whose heads [C, F] have their largest logit at the nearest mean."""
    weights = dict(server.weights)
    for name, total in sums.items():
        counted = total["weight"] > 0
        mu = total["sum"] / torch.where(counted, total["weight"], torch.inf)[:, None]
        bias = torch.where(counted, -mu.square().sum(1) / 2, NEVER)
        weights |= {name: mu.float(), name.replace("weight", "bias"): bias.float()}
    return replace(server, weights=weights, knowledge={"told": sums, "heard": clients})
