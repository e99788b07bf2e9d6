"""LANDER: features near anchors of the classes' texts, images drawn from these texts (Tran et al., CVPR 2024).

Beside the head, which answers, a map M takes features to embeddings of the labels' texts. With e_y the embedding of
class y and B = max(0, MSE(M(phi(x)), e_y) - radius) of a whole batch, a client descends CE + ltc B in the first task,
and from then on, u synthetic images and t the last task's model (parts/synthetic_replay.py),

    c (CE + ltc B) + g (H(softmax(t(u) / 2), softmax(s(u) / 2)) + MSE(M(phi(u)), M_t(phi_t(u))))
    A = log2(K / 2 + 1), b = sqrt(K_o / K), c = cur (1 + 1 / A) / b, g = pre A b,   K_o of K classes old

CE is over the task's classes. With `model_choice: lowest-loss` a task ends with the model that the round with the least
mean loss of the clients' first local epochs was sent, as in the release. There it is a sum over samples; ours is a mean
over clients, each with the weight of its update, by the rule that combines updates. So a client that lies moves it as
far as a mean of losses up to 30 medians lets it, and `federation.aggregation: median` bounds that. A task of one round
ends with its only aggregate (ours).

The server's part is label_synthesis.py. Defaults are the release's for CIFAR-100. `embeddings` names a file, which
`fcl embed-labels` makes (data/label_embeddings.py). Its scale is the encoder's, and so is the radius: of vectors of
length 1 all are within it. Without a file rows are drawn, with the scale and the angles of the release's for CIFAR-100:
then no text is behind, and a run says so. How the release's were made is not known.

knowledge: that of synthetic_replay.py; `best` {weights, networks, loss} of this task so far.
"""

from collections.abc import Mapping
from dataclasses import replace
from functools import cached_property
from math import inf, log2
from pathlib import Path
from typing import Any, Literal

import torch
from pydantic import Field, NonNegativeFloat, PositiveFloat
from torch import Tensor, nn
from torch.nn.functional import linear, mse_loss

from fclmodels.backbones.model.network import Network
from fclmodels.data.batches import Batch
from fclmodels.data.label_embeddings import draw_embeddings, read_embeddings
from fclmodels.federation.engine.replies import Replies
from fclmodels.federation.exchange import Form
from fclmodels.federation.messages import Part, Payload, make_outline
from fclmodels.federation.method import Obstacle
from fclmodels.federation.server import Server
from fclmodels.federation.training.auxiliary_networks import Auxiliary
from fclmodels.federation.training.local_training import LocalTraining
from fclmodels.methods.parts.data_free_synthesis import Synthesis
from fclmodels.methods.parts.distillation import Teacher, distil_heads
from fclmodels.methods.parts.label_synthesis import LabelSynthesis, LabelSynthesisSettings, bound
from fclmodels.methods.parts.synthetic_replay import SyntheticReplay
from fclmodels.storage.digests import digest_file
from fclmodels.storage.trees import Tree

MAP = "map"
LAST_MAP, EMBEDDINGS, LOSSES = "last-map", "embeddings", "losses"


class Lander(SyntheticReplay):
    """Clients learn near the embeddings of the labels' texts, and answer images that the server draws from these."""

    name = "lander"
    paper = "Text-Enhanced Data-free Approach for Federated Class-Incremental Learning"

    class Settings(LabelSynthesisSettings, SyntheticReplay.Settings):
        cur: PositiveFloat = Field(0.2, le=1e6, description="weight of new samples, before A and b")
        pre: NonNegativeFloat = Field(0.4, le=1e6, description="weight of synthetic images, before A and b")
        model_choice: Literal["lowest-loss", "last"] = Field(
            "lowest-loss", description="the model that a task ends with: of the round with the least loss, or the last"
        )
        embeddings: Path | None = Field(
            None, description="file of the class names' embeddings: fcl embed-labels; null: drawn, without any text"
        )

    settings: Settings

    def list_auxiliary_networks(self) -> list[Auxiliary]:
        return [Auxiliary(MAP, {}, self.build_map, "averaged", self.run.params.optimizer)]

    def build_map(self, spec: Mapping[str, Any]) -> nn.Module:
        """Return M, from features to embeddings."""
        return nn.Linear(self.networks.build(self.run.make_spec(1)).backbone.features, self.embeddings.shape[1])

    @cached_property
    def embeddings(self) -> Tensor:
        """The embeddings [labels, d] of all classes of the stream."""
        file, names = self.settings.embeddings, self.run.splits.classes
        rows = draw_embeddings(self.run.seed, len(names)) if file is None else read_embeddings(file, names)
        return rows.to(self.run.device)

    @property
    def replays(self) -> bool:
        return self.settings.pre > 0

    def list_remarks(self, knowledge: Tree) -> list[str]:
        return self.list_doubts()

    def list_doubts(self) -> list[str]:
        """Return lines about embeddings that mean nothing, or that the radius makes alike."""
        if self.settings.embeddings is None:
            return [
                "lander's embeddings are drawn, for methods.lander.embeddings names no file: no text is behind them"
            ]
        nearest = torch.pdist(self.embeddings).square().min().item() / self.embeddings.shape[1]
        if nearest > self.settings.radius:
            return []
        return [
            f"lander's nearest embeddings are {nearest:.2g} apart in mean square, within methods.lander.radius: such "
            "classes are not told apart. Lower the radius, or use embeddings of the encoder's own length"
        ]

    def list_dependencies(self) -> dict[str, str]:
        file = self.settings.embeddings
        return {} if file is None or not file.is_file() else {"embeddings": digest_file(file)}

    @property
    def obstacle_to_noise(self) -> Obstacle | None:
        if self.settings.model_choice == "last":
            return None
        return Obstacle("chooses a model by clients' training losses", f"Set methods.{self.name}.model_choice: last")

    def chooses(self, task: int) -> bool:
        """Return whether a task ends with the model of its best round."""
        return self.settings.model_choice == "lowest-loss" and self.run.count_rounds(task) > 1

    # On the server.

    def enter_task(self, server: Server) -> Server:
        last = {LAST_MAP: server.networks[MAP]} if server.task else {}
        return replace(server, knowledge={**server.knowledge, **last})

    @property
    def synthesis(self) -> type[Synthesis]:
        return LabelSynthesis

    def make_synthesis(self, server: Server, teacher: Network, student: Network) -> Synthesis:
        maps = (self.build_map({}).to(self.run.device), self.build_map({}).to(self.run.device))
        for module in maps:
            module.load_state_dict(server.networks[MAP])
        return LabelSynthesis(self.run, self.settings, teacher, student, maps, self.embeddings)

    def add_payload(self, server: Server) -> Payload:
        rows = self.embeddings[: server.spec.label_count]
        parts = {EMBEDDINGS: Part("weights", {"rows": rows}, once=True)}
        if LAST_MAP in server.knowledge and self.replays:
            parts[LAST_MAP] = Part("weights", server.knowledge[LAST_MAP], once=True)
        return parts

    def aggregate(self, server: Server, replies: Replies) -> Server:
        moved = super().aggregate(server, replies)
        if not self.chooses(server.task):
            return moved
        sums = replies.sum(LOSSES)
        # Losses of late clients are of older models, and count for nothing.
        loss = float(sums["loss"] / sums["samples"]) if sums["samples"] else inf
        if loss >= server.knowledge.get("best", {"loss": inf})["loss"]:
            return moved
        best = {"weights": server.weights, "networks": server.networks, "loss": loss}
        return replace(moved, knowledge={**moved.knowledge, "best": best})

    def end_rounds(self, server: Server) -> Server:
        knowledge = {name: value for name, value in server.knowledge.items() if name != "best"}
        best = server.knowledge.get("best", {"weights": server.weights, "networks": server.networks})
        return replace(server, weights=best["weights"], networks=best["networks"], knowledge=knowledge)

    # On a client.

    def make_update_form(self, task: int, round: int) -> Form:
        losses = make_outline("loss", {"loss": (), "samples": ()}, torch.float64)
        chosen = {LOSSES: replace(losses, over="weight")} if self.chooses(task) else {}
        return {**super().make_update_form(task, round), **chosen}

    def equip(self, training: LocalTraining, payload: Payload) -> None:
        last = payload[LAST_MAP].tensors if LAST_MAP in payload else {}
        training.add(Texts(payload[EMBEDDINGS].tensors["rows"], last))

    def learn(self, training: LocalTraining, features: Tensor, labels: Tensor) -> Tensor:
        texts, of = training.find_added(Texts), self.settings
        loss = super().learn(training, features, labels)
        if texts and of.ltc:
            loss = loss + of.ltc * bound(training.networks[MAP][0](features), texts.embeddings[labels], of.radius)
        return loss if training.client.task == 0 else self.weigh(training.client.task)[0] * loss

    def imitate(self, training: LocalTraining, inputs: Tensor, teacher: Teacher) -> Tensor:
        network, texts, of = training.network, training.find_added(Texts), self.settings
        assert texts is not None
        features = network.backbone(inputs)
        with torch.no_grad():
            right = teacher.backbone(inputs)
            mapped = linear(right, texts.last["weight"], texts.last["bias"])
        loss = distil_heads(network, features, teacher.answer(right), of.temperature)
        return self.weigh(training.client.task)[1] * (loss + mse_loss(training.networks[MAP][0](features), mapped))

    def weigh(self, task: int) -> tuple[float, float]:
        """Return c and g of a task after the first."""
        old, classes = (self.run.make_spec(learned).label_count for learned in (task, task + 1))
        return weigh(old, classes, self.settings.cur, self.settings.pre)

    def note(self, training: LocalTraining, loss: Tensor, batch: Batch) -> None:
        texts, client = training.find_added(Texts), training.client
        if texts and training.progress[1] == client.round * self.run.params.federation.local_epochs:
            texts.loss += loss.detach() * len(batch.labels)
            texts.samples += len(batch.labels)

    def make_further_parts(self, training: LocalTraining, payload: Payload) -> Mapping[str, Mapping[str, Tensor]]:
        texts = training.find_added(Texts)
        if texts is None or not self.chooses(training.client.task):
            return {}
        weight = torch.tensor(self.compute_client_weight(training), dtype=torch.float64)
        mean = torch.as_tensor(texts.loss, dtype=torch.float64) / max(1, texts.samples)
        return {LOSSES: {"loss": weight * mean.to(weight.device), "samples": weight}}


class Texts:
    """What a client's training needs of the labels' texts, and the losses of its first local epoch."""

    def __init__(self, embeddings: Tensor, last: Mapping[str, Tensor]) -> None:
        self.embeddings = embeddings
        self.last = last  # the last task's map
        self.loss: Tensor | float = 0.0
        self.samples = 0


def weigh(old: int, classes: int, cur: float, pre: float) -> tuple[float, float]:
    """Return c and g for so many old classes of all."""
    A, b = log2(classes / 2 + 1), (old / classes) ** 0.5
    return cur * (1 + 1 / A) / b, pre * A * b
