"""The nearest-prototype classifier: no training; a class is the mean of its features on the frozen backbone.

Each client tells its classes' counts and sums the first time that it takes part in a task. The head is the linear form
of the nearest mean: w_c = mu_c, b_c = -||mu_c||^2 / 2, and no class is answered of which nobody has told.

memory: `told`, the last task of which the client has told.
"""

from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from fclmodels.backbones.spec import local_labels
from fclmodels.federation.client import Client
from fclmodels.federation.messages import Part, Payload, Reply
from fclmodels.federation.replies import Replies
from fclmodels.federation.server import Server
from fclmodels.methods.base import Memory
from fclmodels.methods.frozen import Frozen, backbone_of
from fclmodels.numerics.prototypes import moments

UNKNOWN = -1e9  # the logit of a class without a prototype


class NearestPrototype(Frozen):
    """Answers with the class whose mean feature on the frozen backbone is nearest."""

    name = "nearest-prototype"
    paper = "Prototypical Networks for Few-shot Learning"

    def start_task(self, server: Server, task: int) -> Server:
        started = super().start_task(server, task)
        classes, features = started.spec.seen, started.weights["heads.0.weight"].shape[1]
        known = server.knowledge.get("told", {"weight": torch.zeros(0), "sum": torch.zeros(0, features)})
        more = classes - len(known["weight"])
        told = {
            "weight": torch.cat([known["weight"].double(), torch.zeros(more, dtype=torch.float64)]),
            "sum": torch.cat([known["sum"].double(), torch.zeros(more, features, dtype=torch.float64)]),
        }
        return replace(started, weights={**started.weights, **nearest(told)}, knowledge={"told": told})

    def aggregate(self, server: Server, replies: Replies) -> Server:
        labels, found = torch.tensor(server.spec.tasks[server.task]), replies.sum("moments")
        told = {name: value.index_add(0, labels, found[name]) for name, value in server.knowledge["told"].items()}
        return replace(server, weights={**server.weights, **nearest(told)}, knowledge={"told": told})

    @torch.no_grad()
    def train(self, client: Client, payload: Payload) -> tuple[Reply, Memory]:
        network = self.networks.load(self.run.spec(client.task + 1), payload["weights"].tensors).eval()
        classes = len(network.spec.tasks[client.task])
        rows = (
            client.rows.take(np.empty(0, dtype=np.int64)) if client.memory.get("told") == client.task else client.rows
        )
        width = network.backbone.features
        total = {"weight": torch.zeros(classes, dtype=torch.float64), "sum": torch.zeros(classes, width).double()}
        for batch in self.run.batches.ordered(rows, self.run.params.evaluation.batch_size):
            features = backbone_of(network).prompted(batch.inputs).features
            found = moments(features, local_labels(network.spec, client.task, batch.labels), classes)
            total = {name: value + found[name].cpu() for name, value in total.items()}
        return Reply({"moments": Part("prototype", total)}, 0.0, len(client.rows), client.round), {"told": client.task}


def nearest(told: dict[str, Tensor]) -> dict[str, Tensor]:
    """The head [C, F] whose largest logit is the nearest mean's."""
    known = told["weight"] > 0
    mu = torch.where(known[:, None], told["sum"] / told["weight"].clamp(min=1)[:, None], 0.0)
    bias = torch.where(known, -mu.square().sum(1) / 2, UNKNOWN)
    return {"heads.0.weight": mu.float(), "heads.0.bias": bias.float()}
