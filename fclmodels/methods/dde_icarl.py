"""DDE+iCaRL+FL: iCaRL with the data effect distilled and the momentum effect removed (Hu et al. 2021).

A client descends  -log[(p(x) + mean_k p(x_k)) / 2]_y + D  on the union of its rows and exemplars. p is the softmax over
all classes so far, x_k are the k new rows nearest to x in the last task's model's features (without gradients), and D
is iCaRL's distillation: the binary cross entropy of the old columns with the last task's model's probabilities.

Training leaves a direction in the features, d <- 0.9 d + mean of a batch's features. Clients send how theirs has moved,
the server averages. Answers are iCaRL's nearest mean of exemplars, without a share alpha of what lies along d.

The release has DDE on LUCIR alone. Ours: how the two losses add up, that neighbours are a client's own rows as they are
stored (a sample and its copies do not count), and that the means of exemplars are what the direction is removed from.

knowledge: iCaRL's; `direction` d [F].
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import ClassVar

import torch
from pydantic import Field, PositiveInt
from torch import Tensor
from torch.nn.functional import binary_cross_entropy_with_logits, cross_entropy

from fclmodels.data.batches import Batch
from fclmodels.federation.engine.replies import Replies
from fclmodels.federation.exchange import Form
from fclmodels.federation.messages import Part, Payload, make_outline
from fclmodels.federation.method import Obstacle
from fclmodels.federation.prediction import FittedHead
from fclmodels.federation.server import Server
from fclmodels.federation.training.local_training import LocalTraining
from fclmodels.methods.parts.coreset_memory import EMBED
from fclmodels.methods.parts.joined_heads import find_columns, join_heads
from fclmodels.methods.parts.past_tasks import isolate_pass
from fclmodels.methods.parts.rehearsal import LastModel, Rehearsed
from fclmodels.numerics.causal_effects import find_neighbours, remove_direction, shared_cross_entropy

MOMENTUM = 0.9
DIRECTION = "direction"


class Direction:
    """The direction that features have in one training."""

    def __init__(self, value: Tensor) -> None:
        self.value = value

    def follow(self, features: Tensor) -> None:
        self.value = MOMENTUM * self.value + features.detach().mean(0).float()


class Neighbourhood:
    """A client's rows of the task as inputs [n, ...], and their features on the last task's model [n, F]."""

    def __init__(self, inputs: Tensor, features: Tensor) -> None:
        self.inputs = inputs
        self.features = features


class DdeIcarl(Rehearsed):
    """Clients let neighbours share their answers; the server answers without the direction that training leaves."""

    name = "dde-icarl"
    paper = "Distilling Causal Effect of Data in Class-Incremental Learning"
    answers_by_means: ClassVar[bool] = True

    class Settings(Rehearsed.Settings):
        neighbours: PositiveInt = Field(10, le=10_000, description="k, new rows whose answers a sample shares")
        alpha: float = Field(0.5, ge=0, le=1, description="share of the features' direction that answers leave out")

    settings: Settings

    @property
    def obstacle_to_noise(self) -> Obstacle | None:
        return Obstacle("needs the direction of training's features, which has no bound", "Use icarl")

    # On the server.

    def create_server(self) -> Server:
        server = super().create_server()
        features = self.networks.build(server.spec).backbone.features
        return replace(server, knowledge={**server.knowledge, DIRECTION: torch.zeros(features)})

    def add_payload(self, server: Server) -> Payload:
        return {DIRECTION: Part("statistics", {"d": server.knowledge[DIRECTION]})}

    def aggregate(self, server: Server, replies: Replies) -> Server:
        moved = replies.sum(DIRECTION)["d"] / replies.sum("weight")["weight"].item()
        direction = server.knowledge[DIRECTION] + moved
        return replace(super().aggregate(server, replies), knowledge={**server.knowledge, DIRECTION: direction})

    def choose_head(self, server: Server) -> FittedHead | None:
        head = super().choose_head(server)
        if head is None or self.settings.alpha == 0:
            return head
        return replace(head, weight=remove_direction(head.weight, server.knowledge[DIRECTION], self.settings.alpha))

    # On a client.

    def make_update_form(self, task: int, round: int) -> Form:
        features = self.networks.build(self.run.make_spec(task + 1)).backbone.features
        outline = replace(make_outline("statistics", {"d": (features,)}), over="weight", of=DIRECTION)
        return {**super().make_update_form(task, round), DIRECTION: outline}

    def equip(self, training: LocalTraining, payload: Payload) -> None:
        training.add(Direction(payload[DIRECTION].tensors["d"]))
        if teacher := training.find_added(LastModel):
            inputs = self.run.batches.prepare_inputs(self.run.batches.read_raw(training.client.rows)).inputs
            features = torch.cat([teacher.answer(part)[0] for part in inputs.split(EMBED)])
            training.add(Neighbourhood(inputs, features))

    def make_further_parts(self, training: LocalTraining, payload: Payload) -> Mapping[str, Mapping[str, Tensor]]:
        direction = training.find_added(Direction)
        assert direction is not None
        moved = direction.value - payload[DIRECTION].tensors["d"]
        return {DIRECTION: {"d": moved * self.compute_client_weight(training)}}

    def compute_loss(self, training: LocalTraining, batch: Batch) -> Tensor:
        network, teacher, near = training.network, training.find_added(LastModel), training.find_added(Neighbourhood)
        features = training.compute_features(batch)
        if direction := training.find_added(Direction):
            direction.follow(features)
        logits, labels = join_heads(network, features), find_columns(network.spec, batch.labels, batch.tasks)
        if teacher is None or near is None:
            return cross_entropy(logits, labels)
        old_features, answers = teacher.answer(batch.inputs)
        places, counts = find_neighbours(old_features, near.features, self.settings.neighbours)
        shared = self.answer_neighbours(training, near.inputs, places)
        loss = shared_cross_entropy(logits.float().softmax(1), shared, counts, labels)
        if not len(teacher.old):
            return loss
        old = logits[:, teacher.old].float()
        return loss + binary_cross_entropy_with_logits(old, answers[:, teacher.old].float().sigmoid())

    @torch.no_grad()
    def answer_neighbours(self, training: LocalTraining, inputs: Tensor, places: Tensor) -> Tensor:
        """Return the probabilities [B, k, C] of rows at these places [B, k], each row answered once."""
        present, at = places.unique(return_inverse=True)
        with isolate_pass(training):
            parts = [training.network.backbone(part) for part in inputs[present].split(EMBED)]
            answers = join_heads(training.network, torch.cat(parts)).float().softmax(1)
        return answers[at]
