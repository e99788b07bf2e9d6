"""Synthetic replay: clients learn new samples while they answer synthetic images as the last task's model does.

The server makes the images from that model alone (data_free_synthesis.py), before a task's first round: so a stream may
end after any task, and nothing is made for a task that does not come. Model and images are downloaded once a task;
clients remember nothing. Each local step takes a batch of new samples and a batch of the images, which pass the network
by themselves; these come from all images in random order, and anew when all have been drawn.

New samples count by the cross entropy over their task's classes, whatever `model.loss_over` says. Images count by the
distillation loss of distillation.py over the classes that the last model has: the old rows of a head that grows, all
rows where all tasks have the same classes, and each old task's own head (ours: the releases have one that grows).

knowledge: `anchor`; `synthetic` {images [n, C, H, W], labels [n]}: a task's pool while it is learned, at most 100 of
them when it has ended, for a person to look at.
"""

import math
from abc import abstractmethod
from collections.abc import Callable, Iterator
from dataclasses import replace

import torch
from pydantic import Field, PositiveFloat, PositiveInt
from torch import Tensor

from fclmodels.backbones.layers.norms import SharedPolicy, list_statistics
from fclmodels.backbones.model.network import Network, NetworkCache, compute_task_cross_entropy
from fclmodels.data.batches import Batch
from fclmodels.data.sample_kind import TEXTS, find_kind
from fclmodels.errors import UserError
from fclmodels.federation.client import Client
from fclmodels.federation.engine.cohort import Cohort
from fclmodels.federation.messages import Part, Payload
from fclmodels.federation.run_context import Run
from fclmodels.federation.server import Server
from fclmodels.federation.training.local_training import LocalTraining
from fclmodels.methods.fedavg import FedAvg
from fclmodels.methods.parts.anchor import anchor_payload, anchor_to
from fclmodels.methods.parts.data_free_synthesis import Synthesis, SynthesisSettings, draw_endlessly, enlarge
from fclmodels.methods.parts.distillation import Teacher
from fclmodels.storage.trees import Tree

SYNTHETIC = "synthetic"
LARGE = 2**28  # bytes of a pool of which a run warns
SHEET = 100  # images that a person sees of a pool


class SyntheticReplay(FedAvg):
    """FedAvg whose clients answer the server's images as the last task's model does.

    Below its hooks stand those that methods have of their own: `replays`, `synthesis`, `make_synthesis`, `learn`,
    `imitate`, and `equip`, `note`, `add_payload`, `enter_task`, `end_rounds` where they need more.
    """

    class Settings(FedAvg.Settings, SynthesisSettings):
        batch_norm: SharedPolicy = Field(
            "average", description="running statistics: average over clients; batch: none; frozen after task 1"
        )
        temperature: PositiveFloat = Field(2.0, le=1e6, description="by which clients' and the teacher's logits count")
        synthetic_batch: PositiveInt | None = Field(
            None, le=100_000, description="synthetic images in a local step; null: as many as federation.batch_size"
        )

    settings: Settings
    trains_earlier_heads = True

    def __init__(self, settings: Settings, run: Run) -> None:
        super().__init__(settings, run)
        if find_kind(run.splits.shape) is TEXTS:
            raise UserError(f"methods.{self.name}: it makes images, these samples are texts. Use methods.lwf or er.")
        if not self.synthesis.count_images(settings):
            raise UserError(
                f"methods.{self.name}.rounds: {settings.rounds} of warmup: {settings.warmup} leave no image. "
                "Set more, or pool_from: start."
            )
        self.teachers, self.students = (NetworkCache(run.device, self.prepare_network) for _ in range(2))

    def list_advice(self) -> list[str]:
        of, lines = self.settings, []
        if self.replays:
            channels, *sides = self.run.splits.shape
            count = self.synthesis.count_images(of)
            size = count * channels * (of.side**2 if of.side else math.prod(sides))
            lines.append(
                f"each client downloads {count} synthetic images a task ({size:,} bytes): what the server can draw "
                "of all clients' data is open to every one of them"
            )
            if size > LARGE:
                lines.append(
                    f"these {size:,} bytes are in the server's memory and in each of its checkpoints: set "
                    f"methods.{self.name}.side to make smaller images"
                )
            if not list_statistics(self.networks.build(self.run.make_spec(1))):
                lines.append(
                    "the network has no running statistics of batch normalisation: statistics_weight counts for "
                    "nothing, and images follow the classes and the student alone"
                )
        return [*lines, *self.list_doubts()]

    # What a method adds.

    @property
    @abstractmethod
    def synthesis(self) -> type[Synthesis]:
        """The class of the work that `make_synthesis` returns."""

    # The work that makes images of the teacher, the last task's model; the student has its weights too.
    make_synthesis: Callable[[Server, Network, Network], Synthesis]
    # The loss of synthetic images [B, C, H, W], with its weight.
    imitate: Callable[[LocalTraining, Tensor, Teacher], Tensor]

    @property
    def replays(self) -> bool:
        """Return whether images count at all, so that the server makes some."""
        return True

    def learn(self, training: LocalTraining, features: Tensor, labels: Tensor) -> Tensor:
        """Return the loss of new samples by their features [B, F]: cross entropy over their task's classes."""
        network, task = training.network, training.client.task
        return compute_task_cross_entropy(network, features, labels, task)

    def list_doubts(self) -> list[str]:
        """Return lines about what images are drawn from."""
        return []

    def equip(self, training: LocalTraining, payload: Payload) -> None:
        """Give a client's training what it needs besides."""

    def note(self, training: LocalTraining, loss: Tensor, batch: Batch) -> None:
        """Note what a client tells of a step's loss."""

    def enter_task(self, server: Server) -> Server:
        """Return the server that starts a task."""
        return server

    def add_payload(self, server: Server) -> Payload:
        """Return what clients download besides the model, the last task's and the images."""
        return {}

    def end_rounds(self, server: Server) -> Server:
        """Return the server after the last round."""
        return server

    # On the server.

    def start_task(self, server: Server, task: int) -> Server:
        started = anchor_to(super().start_task(server, task), server)
        knowledge = {name: value for name, value in started.knowledge.items() if name != SYNTHETIC}
        return self.enter_task(replace(started, knowledge=knowledge))

    def begin_task(self, server: Server, cohort: Cohort) -> Server:
        if "anchor" not in server.knowledge or not self.replays:
            return server
        spec, weights = self.run.make_spec(server.task), server.knowledge["anchor"]
        work = self.make_synthesis(server, self.teachers.load(spec, weights), self.students.load(spec, weights))
        cohort.train(work, work.rounds)
        images, columns = work.read_pool()
        labels = torch.tensor([label for of_head in spec.head_labels for label in of_head])
        pool = {"images": images, "labels": labels[columns].int()}
        return replace(server, knowledge={**server.knowledge, SYNTHETIC: pool})

    def make_payload(self, server: Server) -> Payload:
        parts = {**super().make_payload(server), **self.add_payload(server)}
        if SYNTHETIC in server.knowledge:
            images = {"images": server.knowledge[SYNTHETIC]["images"]}
            parts |= {**anchor_payload(server), SYNTHETIC: Part("samples", images, once=True)}
        return parts

    def finish_task(self, server: Server, cohort: Cohort) -> Server:
        ended = self.end_rounds(server)
        if SYNTHETIC not in ended.knowledge:
            return ended
        return replace(ended, knowledge={**ended.knowledge, SYNTHETIC: select_sheet(ended.knowledge[SYNTHETIC])})

    # On a client.

    def start_training(self, training: LocalTraining, payload: Payload) -> None:
        self.equip(training, payload)
        if SYNTHETIC in payload:
            anchor = payload["anchor"].tensors
            last = self.teachers.load(self.run.make_spec(training.client.task), anchor)
            training.add(Teacher(last, anchor, 1.0))
            size = self.settings.synthetic_batch or self.run.params.federation.batch_size
            training.add(SyntheticImages(training.client, payload[SYNTHETIC].tensors["images"], size))

    def compute_loss(self, training: LocalTraining, batch: Batch) -> Tensor:
        loss = self.learn(training, training.compute_features(batch), batch.labels)
        if (teacher := training.find_added(Teacher)) and (images := training.find_added(SyntheticImages)):
            loss = loss + self.imitate(training, next(images), teacher)
        self.note(training, loss, batch)
        return loss


class SyntheticImages(Iterator[Tensor]):
    """Batches of a task's images as inputs, without end, in one training."""

    def __init__(self, client: Client, images: Tensor, size: int) -> None:
        self.batches = client.run.batches
        self.images = images
        random = client.make_generator("synthetic")
        self.augmenting = self.batches.make_device_generator(random)
        self.draws = draw_endlessly(len(images), size, random)

    def __next__(self) -> Tensor:
        pixels = self.images[next(self.draws).to(self.images.device)].to(self.batches.device)
        enlarged = enlarge(pixels, self.batches.splits.shape)
        return self.batches.normalise_pixels(self.batches.augment_pixels(enlarged, self.augmenting))


def select_sheet(pool: Tree) -> Tree:
    """Return at most 100 images of a pool with their labels, as many of each class, the first ones, class by class."""
    labels = pool["labels"]
    present = labels.unique().tolist()[:SHEET]
    places = torch.cat([(labels == label).nonzero().flatten()[: SHEET // len(present)] for label in present])
    return {"images": pool["images"][places], "labels": labels[places]}
