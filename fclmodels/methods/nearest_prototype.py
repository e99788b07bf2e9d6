"""The nearest-prototype classifier: no training; a class is the mean of its features on the frozen backbone.

Each client tells its classes' counts and sums until the server has heard of it in the task. A head is the linear form
of the nearest mean (Snell et al. 2017, section 2.4, halved): w_c = mu_c, b_c = -||mu_c||^2 / 2, and no class is
answered of which nobody has told.

knowledge: `told`, {head: {weight [C], sum [C, F]}}; `heard`, the clients that have told of the present task.
"""

from dataclasses import replace

import torch
from torch import Tensor

from fclmodels.backbones.spec import local_labels
from fclmodels.federation.client import Client
from fclmodels.federation.executor import TRAIN
from fclmodels.federation.messages import Part, Payload, Reply
from fclmodels.federation.replies import Replies
from fclmodels.federation.server import Server
from fclmodels.methods.base import Memory
from fclmodels.methods.frozen import AT_ONCE, Frozen
from fclmodels.numerics.prototypes import BOUND, clipped_rows, in_units, moments, out_of_units

UNKNOWN = -1e9  # the logit of a class without a prototype


class NearestPrototype(Frozen):
    """Answers with the class whose mean feature on the frozen backbone is nearest."""

    name = "nearest-prototype"
    paper = "Prototypical Networks for Few-shot Learning"

    @property
    def instead_of_a_mean(self) -> str | None:
        return "adds up counts and sums"

    @property
    def without_bound(self) -> str | None:
        federation = self.run.params.federation
        if federation.privacy.sample_rate < 1 and federation.rounds != 1:
            return "hears each client once, whether it joins or not. Use federation.rounds: 1, or sample_rate: 1."
        return super().without_bound

    def start_task(self, server: Server, task: int) -> Server:
        started, known = super().start_task(server, task), server.knowledge.get("told", {})
        heads = {
            name: W for name, W in started.weights.items() if name.startswith("heads.") and name.endswith("weight")
        }
        told = {}
        for name, W in heads.items():
            total = moments(W[:0], torch.zeros(0, dtype=torch.int64), len(W))
            for part, value in known.get(name, {}).items():
                total[part][: len(value)] = value
            told[name] = total
        return with_heads(started, told, heard=torch.zeros(0, dtype=torch.int64))

    def payload(self, server: Server) -> Payload:
        return {**super().payload(server), "heard": Part("count", {"clients": server.knowledge["heard"]})}

    def sends(self, task: int, round: int) -> dict[str, dict[str, Part]]:
        return {TRAIN: {"moments": self.moments_of(task)}}

    def aggregate(self, server: Server, replies: Replies) -> Server:
        own, found = server.spec.head == "per-task", replies.sum("moments")
        if self.longest is not None:
            found = out_of_units(found, self.longest, replies.noise("moments"))
        classes = server.spec.tasks[server.task]
        head = f"heads.{server.task if own else 0}.weight"
        rows = torch.arange(len(classes)) if own else torch.tensor(classes)
        total = {n: value.index_add(0, rows, found[n]) for n, value in server.knowledge["told"][head].items()}
        heard = torch.cat([server.knowledge["heard"], torch.tensor(sorted(replies.facts))]).unique()
        return with_heads(server, {**server.knowledge["told"], head: total}, heard)

    @torch.no_grad()
    def train(self, client: Client, payload: Payload) -> tuple[Reply, Memory]:
        network = self.networks.load(self.run.spec(client.task + 1), payload["weights"].tensors).eval()
        classes, rows = len(network.spec.tasks[client.task]), client.rows
        nothing = torch.zeros(0, network.backbone.features)
        total = moments(nothing, torch.zeros(0, dtype=torch.int64), classes)
        if client.index not in payload["heard"].tensors["clients"]:
            for batch in self.run.batches.ordered(rows, AT_ONCE):
                features = self.found(network, batch, client.task).features
                if self.longest is not None:
                    features = clipped_rows(features, self.longest)
                found = moments(features, local_labels(network.spec, client.task, batch.labels), classes)
                total = {name: value + found[name].cpu() for name, value in total.items()}
        if self.longest is not None:
            total = in_units(total, self.longest)
        return Reply({"moments": Part("prototype", total, bound=BOUND)}, 0.0, len(rows), client.round), client.memory


def with_heads(server: Server, told: dict[str, dict[str, Tensor]], heard: Tensor) -> Server:
    """The server whose heads [C, F] have their largest logit at the nearest mean."""
    weights = dict(server.weights)
    for name, total in told.items():
        known = total["weight"] > 0
        mu = total["sum"] / torch.where(known, total["weight"], torch.inf)[:, None]
        bias = torch.where(known, -mu.square().sum(1) / 2, UNKNOWN)
        weights |= {name: mu.float(), name.replace("weight", "bias"): bias.float()}
    return replace(server, weights=weights, knowledge={"told": told, "heard": heard})
