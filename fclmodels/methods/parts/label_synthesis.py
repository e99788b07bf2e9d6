"""LANDER's synthesis: images of balanced classes' text embeddings, by one generator whose noisy layers are drawn anew.

A round draws the noisy layers and trains the generator by a new Adam, together with mean and deviation by which the
teacher reads its images. To the loss of data_free_synthesis.py comes ltc B of the teacher's map (lander.py), and to the
student's the distance of its map from the teacher's. The student has a new SGD in each round; it learns from round
`warmup` on, and A counts three rounds later.
"""

from math import inf

import torch
from pydantic import Field, NonNegativeFloat, NonNegativeInt, PositiveInt
from torch import Tensor, nn
from torch.nn.functional import mse_loss

from fclmodels.backbones.model.network import Network
from fclmodels.federation.run_context import Run
from fclmodels.methods.parts.data_free_synthesis import Synthesis, SynthesisSettings, make_adam
from fclmodels.methods.parts.image_generator import LabelGenerator
from fclmodels.randomness import seed_torch
from fclmodels.settings.schema import OptimizerSettings
from fclmodels.storage.trees import Tree

PIXEL_LR = 0.01  # of the mean and deviation by which the teacher reads images
START = (0.5, 0.2)  # of these


class LabelSynthesisSettings(SynthesisSettings):
    pool: PositiveInt = Field(10_000, le=10_000_000, description="synthetic images that each client downloads a task")
    g_steps: PositiveInt = Field(40, le=1_000_000, description="steps of the generator in a round")
    warmup: NonNegativeInt = Field(10, le=1_000_000, description="the round from which the student learns")
    statistics_weight: NonNegativeFloat = Field(
        1.0, le=1e6, description="weight of the distance to batch normalisation's running statistics"
    )
    student_steps: NonNegativeInt = Field(50, le=1_000_000, description="steps of the student in a round")
    ltc: NonNegativeFloat = Field(5.0, le=1e6, description="weight of the distance to the embeddings")
    radius: NonNegativeFloat = Field(0.015, le=1e6, description="mean squared distance to them that is free")


class LabelSynthesis(Synthesis):
    """Rounds of one generator of images from labels' embeddings."""

    opposes_after, learns_after = 3, 0
    student_settings = OptimizerSettings(lr=0.1, momentum=0.9, weight_decay=2e-4)
    settings: LabelSynthesisSettings

    def __init__(
        self,
        run: Run,
        settings: LabelSynthesisSettings,
        teacher: Network,
        student: Network,
        maps: tuple[nn.Module, nn.Module],  # the teacher's and the student's, with the same weights
        embeddings: Tensor,  # of each label
    ) -> None:
        self.teacher_map, self.student_map = maps
        self.teacher_map.requires_grad_(False)
        super().__init__(run, settings, teacher, student, [self.student_map])
        spec = teacher.spec
        labels = torch.tensor([label for of_head in spec.head_labels for label in of_head])
        self.embeddings = embeddings[labels.to(embeddings.device)]  # of each column
        with seed_torch(run.seed, "generator", len(spec.tasks), device=torch.device("cpu")):
            numbers = (embeddings.shape[1], settings.batch, settings.noise, settings.width)
            self.generator = LabelGenerator(*numbers, self.shape).to(run.device)
        self.pixels = [torch.full((spec.shape[0], 1, 1), at, device=run.device, requires_grad=True) for at in START]

    @property
    def student_batch(self) -> int:
        """The number of images in a step of the student: a client's batch."""
        return self.run.params.federation.batch_size

    def make_images(self, round: int) -> tuple[Tensor, Tensor, float]:
        of = self.settings
        self.generator.redraw()
        columns = draw_balanced(len(self.embeddings), of.batch).to(self.run.device)
        anchors = self.embeddings[columns]
        optimiser = make_adam(self.generator, of.lr_g)
        optimiser.add_param_group({"params": self.pixels, "lr": PIXEL_LR})
        best, images = inf, anchors
        for _ in range(of.g_steps):
            pixels = self.generator(anchors)
            mean, deviation = self.pixels
            loss, features = self.measure((self.augment(pixels) - mean) / deviation, columns, round)
            loss = loss + of.ltc * bound(self.teacher_map(features), anchors, of.radius)
            optimiser.zero_grad()
            loss.backward()
            optimiser.step()
            if (value := float(loss.detach())) < best:
                best, images = value, pixels.detach()
        return images, columns, best

    def teach_student(self, rounds: int) -> None:
        """Let the student learn with an optimiser of its own in each round."""
        self.student_optimiser = self.make_student_optimiser()
        super().teach_student(rounds)

    def compare(self, features: Tensor, right: Tensor) -> Tensor:
        """Return the distance of answers, and ltc that of the maps' answers."""
        distance = mse_loss(self.student_map(features), self.teacher_map(right))
        return super().compare(features, right) + self.settings.ltc * distance

    def collect_state(self) -> Tree:
        pixels = [tensor.detach() for tensor in self.pixels]
        return {**super().collect_state(), "generator": dict(self.generator.state_dict()), "pixels": pixels}

    def restore(self, state: Tree) -> None:
        super().restore(state)
        self.generator.load_state_dict(state["generator"])
        self.pixels = [tensor.clone().requires_grad_() for tensor in state["pixels"]]


def bound(mapped: Tensor, embeddings: Tensor, radius: float) -> Tensor:
    """Return B = max(0, MSE - radius) over all numbers of a batch [B, d]."""
    return (mse_loss(mapped, embeddings) - radius).relu()


def draw_balanced(columns: int, count: int) -> Tensor:
    """Return columns [count]: each as often as goes into the count, the rest at random."""
    rest = torch.randint(columns, (count % columns,))
    return torch.cat([torch.arange(columns).repeat(count // columns), rest])
