"""MFCL: the server trains a generator on the last task's model; clients replay its images (Babakniya et al. 2023).

Before a task's first round the server takes `steps` steps of Adam of a generator G, on logits o of the last task's
final model for images G(z), z ~ N(0, I), over the n learned columns (numerics/image_priors.py):

    CE(o / 1000, argmax o) + w_ie (1 + sum_k q_k ln q_k / ln n) + w_bn mean_l KL_l + w_noise MSE(x, blur x)

q the batch's mean probabilities, KL_l from batch normalisation's running statistics to the batch's (0 where the network
has none). G persists over tasks, its optimiser does not. G and that model come to each client once a task. In the first
task clients descend the cross entropy; later, on a batch (x, y) with as many labels as the model has columns, and fresh
images u labelled y_u by the last model's largest logit, in one pass through the network

    CE(W phi(x), y; new) + w_ft CE(W sg(phi(x, u)), (y, y_u); all) + w_kd mean |W° phi - W° phi°|^2 / n

new: among the task's own columns, whatever `model.loss_over` says; sg: no gradient, so that images reach the backbone
through the last term alone; W°, phi° the last model's head and features. The release computes sg(phi) by a second pass
in training mode, which moves running statistics once more; here the features are the same ones. With w_ft = w_kd = 0 no
generator is trained, and it is FedAvg with `loss_over: task`. A domain-incremental stream has one head for all: there
all columns are new and learned (ours; SPECIAL, whose runs are such, says nothing of it). Of tasks with heads of their
own an image has one's class, its CE is within that head, and the last term adds up over heads (ours).

The release: SGD without momentum, weight decay 1e-5, rate 0.1 falling to 0.01 over a task's rounds, uniform weights.

knowledge: `anchor`, `generator`, `synthetic` {images, labels}: 100 of its images, for a person to look at.
"""

from dataclasses import dataclass, replace

import torch
from pydantic import Field, NonNegativeFloat, PositiveFloat, PositiveInt
from torch import Tensor, nn
from torch.nn.functional import linear, mse_loss

from fclmodels.backbones.inputs.batch_statistics import capture_statistics
from fclmodels.backbones.layers.norms import SharedPolicy, list_statistics
from fclmodels.backbones.model.network import Network, NetworkCache, compute_task_cross_entropy
from fclmodels.data.batches import Batch
from fclmodels.data.sample_kind import TEXTS, find_kind
from fclmodels.errors import UserError
from fclmodels.federation.engine.cohort import Cohort
from fclmodels.federation.messages import Part, Payload
from fclmodels.federation.run_context import Run
from fclmodels.federation.server import Server
from fclmodels.federation.training.auxiliary_networks import Auxiliary, AuxiliaryNetworks, copy_state
from fclmodels.federation.training.local_training import LocalTraining
from fclmodels.federation.training.optimisers import make_optimiser
from fclmodels.federation.training.server_training import NetworkTraining, refuse_divergence
from fclmodels.methods.fedavg import FedAvg
from fclmodels.methods.parts.anchor import anchor_payload, anchor_to
from fclmodels.methods.parts.distillation import Teacher
from fclmodels.methods.parts.joined_heads import compute_cross_entropy_in_heads, find_columns, join_heads
from fclmodels.methods.parts.normalised_generator import NormalisedGenerator, build_normalised_generator
from fclmodels.methods.parts.synthetic_replay import SHEET, SYNTHETIC, select_sheet
from fclmodels.numerics.image_priors import (
    measure_certainty,
    measure_divergence,
    measure_imbalance,
    measure_roughness,
)
from fclmodels.settings.schema import OptimizerSettings


class Mfcl(FedAvg):
    """Clients replay images of a generator that the server has trained on the last task's model alone."""

    name = "mfcl"
    paper = (
        "A Data-Free Approach to Mitigate Catastrophic Forgetting in Federated Class Incremental Learning for "
        "Vision Tasks"
    )

    class Settings(FedAvg.Settings):
        batch_norm: SharedPolicy = Field(
            "average", description="running statistics: average over clients; batch: none; frozen after task 1"
        )
        w_ft: NonNegativeFloat = Field(
            1.0, le=1e6, description="weight of all classes' cross entropy, of the head alone"
        )
        w_kd: NonNegativeFloat = Field(0.1, le=1e6, description="weight of the distance from the last model's logits")
        w_ie: NonNegativeFloat = Field(1.0, le=1e6, description="weight of classes being alike among images")
        w_bn: NonNegativeFloat = Field(50.0, le=1e6, description="weight of batch normalisation's statistics")
        w_noise: NonNegativeFloat = Field(1e-3, le=1e6, description="weight of the distance of images from their blur")
        steps: PositiveInt = Field(100, le=1_000_000, description="the generator's steps before a task (pi)")
        batch: PositiveInt = Field(128, le=100_000, description="images in one of them")
        generator_lr: PositiveFloat = Field(1e-3, le=100, description="rate of the generator's Adam")
        synthetic_batch: PositiveInt | None = Field(
            128, le=100_000, description="images in a client's step; null: as many as federation.batch_size"
        )
        noise: PositiveInt = Field(1000, le=100_000, description="numbers that the generator makes an image of")
        width: PositiveInt | None = Field(
            None, le=10_000, description="the generator's channels; null: the release's for the images' size"
        )

    settings: Settings

    def __init__(self, settings: Settings, run: Run) -> None:
        if find_kind(run.splits.shape) is TEXTS:
            raise UserError(f"methods.{self.name}: it draws images, these samples are texts. Use lwf or er.")
        super().__init__(settings, run)
        self.teachers = NetworkCache(run.device, self.prepare_network)
        spec = {"noise": settings.noise, "width": settings.width, "shape": list(run.splits.shape)}
        # Not among the method's auxiliary networks, which travel in each round.
        self.generator = Auxiliary("generator", spec, build_normalised_generator, "server")
        self.generators = AuxiliaryNetworks([self.generator], run.seed, run.device)

    @property
    def replays(self) -> bool:
        """Whether images count at all, so that there is a generator."""
        return bool(self.settings.w_ft or self.settings.w_kd)

    def list_advice(self) -> list[str]:
        if self.replays and not list_statistics(self.networks.build(self.run.make_spec(1))):
            return [
                "the network has no running statistics of batch normalisation: w_bn counts for nothing, and images "
                "follow the classes alone"
            ]
        return []

    # On the server.

    def start_task(self, server: Server, task: int) -> Server:
        started = super().start_task(server, task)
        return anchor_to(started, server) if self.replays else started

    def begin_task(self, server: Server, cohort: Cohort) -> Server:
        if "anchor" not in server.knowledge:
            return server
        teacher = self.teachers.load(self.run.make_spec(server.task), server.knowledge["anchor"])
        teacher.eval().requires_grad_(False)
        state = server.knowledge.get("generator") or self.generators.create_initial()["generator"]
        generator = self.load_generator(state).train().requires_grad_(True)
        adam = OptimizerSettings(kind="adam", lr=self.settings.generator_lr)
        optimiser = make_optimiser(adam, list(generator.parameters()), 0)

        def loss(number: int) -> Tensor:
            noise = torch.randn(self.settings.batch, generator.noise, device=self.run.device)
            return self.measure_images(teacher, generator(noise))

        cohort.train(NetworkTraining("generator", {"generator": generator}, [optimiser], loss), self.settings.steps)
        refuse_divergence("generator", [generator], f"Lower methods.{self.name}.generator_lr.")
        knowledge = {
            **server.knowledge,
            "generator": copy_state(generator),
            SYNTHETIC: self.draw_sheet(teacher, generator, server.task),
        }
        return replace(server, knowledge=knowledge)

    def measure_images(self, teacher: Network, images: Tensor) -> Tensor:
        """Return the generator's loss of images as the last model reads them."""
        of = self.settings
        with capture_statistics(teacher) as captured:
            logits = join_heads(teacher, teacher.backbone(images))
        loss = measure_certainty(logits) + of.w_ie * measure_imbalance(logits) + of.w_noise * measure_roughness(images)
        return loss + of.w_bn * measure_divergence(captured.batch, captured.running) if captured.batch else loss

    @torch.no_grad()
    def draw_sheet(self, teacher: Network, generator: NormalisedGenerator, task: int) -> dict[str, Tensor]:
        """Return some images as pixels, and the labels that the last model gives them."""
        noise = torch.randn(SHEET, generator.noise, generator=self.run.make_generator("sheet", task))
        images = generator.eval()(noise.to(self.run.device))
        mean, std = (
            torch.tensor(v, device=images.device)[:, None, None] for v in (self.run.splits.mean, self.run.splits.std)
        )
        labels = torch.tensor([label for of_head in teacher.spec.head_labels for label in of_head])
        columns = join_heads(teacher, teacher.backbone(images)).argmax(1).cpu()
        pixels = (255 * (images * std + mean)).round().clamp(0, 255).to(torch.uint8).cpu()
        return select_sheet({"images": pixels, "labels": labels[columns].int()})

    def make_payload(self, server: Server) -> Payload:
        parts = {**super().make_payload(server), **anchor_payload(server)}
        if "generator" in server.knowledge:
            parts["generator"] = Part("generator", server.knowledge["generator"], once=True)
        return parts

    def load_generator(self, state: dict[str, Tensor]) -> NormalisedGenerator:
        """Return the generator with this state; the next call changes it."""
        generator = self.generators.load(self.generator, state)
        assert isinstance(generator, NormalisedGenerator)
        return generator

    # On a client.

    def select_trainable(self, network: Network, task: int) -> dict[str, nn.Parameter]:
        """Return earlier tasks' own heads too."""
        parameters = super().select_trainable(network, task)
        return {**parameters, **dict(network.heads.named_parameters("heads"))} if self.replays else parameters

    def start_training(self, training: LocalTraining, payload: Payload) -> None:
        if "generator" in payload:
            anchor = payload["anchor"].tensors
            teacher = Teacher(
                self.teachers.load(self.run.make_spec(training.client.task), anchor), anchor, self.settings.w_kd
            )
            generator = self.load_generator(payload["generator"].tensors).eval().requires_grad_(False)
            size = self.settings.synthetic_batch or self.run.params.federation.batch_size
            training.add(DrawnImages(teacher, generator, size))

    def compute_loss(self, training: LocalTraining, batch: Batch) -> Tensor:
        network, images, count = training.network, training.find_added(DrawnImages), len(batch.labels)
        if images is None:
            return self.learn_new(training, training.compute_features(batch), batch.labels)
        drawn, drawn_columns = images.draw(self.run.device)
        both = torch.cat([batch.inputs, drawn])
        features = training.compute_features(batch, drawn)
        loss = self.learn_new(training, features[:count], batch.labels)
        if self.settings.w_ft:
            columns = torch.cat([find_columns(network.spec, batch.labels, batch.tasks), drawn_columns])
            loss = (
                loss + self.settings.w_ft * compute_cross_entropy_in_heads(network, features.detach(), columns).mean()
            )
        if self.settings.w_kd:
            loss = loss + self.settings.w_kd * measure_distance(images.teacher, features, both)
        return loss

    def learn_new(self, training: LocalTraining, features: Tensor, labels: Tensor) -> Tensor:
        """Return the cross entropy over the task's own columns."""
        network, task = training.network, training.client.task
        return compute_task_cross_entropy(network, features, labels, task)


@dataclass(frozen=True)
class DrawnImages:
    """The generator, and the last model that labels its images, in one training."""

    teacher: Teacher
    generator: NormalisedGenerator
    size: int

    @torch.no_grad()
    def draw(self, device: torch.device) -> tuple[Tensor, Tensor]:
        """Return images as inputs, and their columns by the last model."""
        images = self.generator(torch.randn(self.size, self.generator.noise, device=device))
        return images, torch.cat(self.teacher.compute_logits(images), 1).argmax(1)


def measure_distance(teacher: Teacher, features: Tensor, inputs: Tensor) -> Tensor:
    """Return the mean over samples of |W phi - W phi_o|^2 / n, W of the teacher, summed over its heads."""
    with torch.no_grad():
        earlier = teacher.backbone(inputs)
    gaps = [mse_loss(linear(features, W, b), linear(earlier, W, b)) for W, b in teacher.heads]
    return torch.stack(gaps).sum()
