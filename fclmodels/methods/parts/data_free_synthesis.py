"""Data-free synthesis: the server makes images from the last task's model alone, while nobody sends anything new.

A round of it moves a generator some steps down a loss of its images x, as the model, the teacher, answers them:

    L = class_weight CE(t(x), y) + statistics_weight R(x) + student_weight A(x)

R compares mean and variance of every batch normalisation's inputs with the running ones, A lets the images move to
where a student of the same architecture errs (numerics/data_free.py). The images of the step with the least loss enter
the pool, as uint8; then the student learns the teacher's answers on the pool. What a round trains is the method's
(target.py). R is 0 where the network has no running statistics: there is none without batch normalisation, nor under
`batch_norm: batch`. With heads of the tasks' own an image is of one (task, class), its CE is within that head, and what
compares whole answers adds up over heads (ours); the releases have one head. Their students' rates make a network
without batch normalisation diverge: it learns at 0.002 by gradients of length 1 at most (ours).

The pool, of images x channels x side^2 bytes, is in the server's memory, in each checkpoint of its training and of the
task's rounds, and in each client's memory. A step of the generator passes its whole batch through the teacher, and from
A on the student, at the samples' size: what autograd stores of it grows with batch x pixels. At 224 pixels set `side`,
which makes the pool small, and a lower `batch`, which makes the step so.

Images are augmented as real samples are (the releases: shifted by 4 pixels and mirrored, whatever the data) and
normalised by the stream's mean and deviation; no task's permutation of pixels is undone (ours).
"""

from abc import abstractmethod
from collections.abc import Iterator, Sequence
from itertools import islice
from math import ceil, isfinite
from typing import ClassVar, Literal

import torch
from pydantic import Field, NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt
from torch import Tensor, nn
from torch.nn.functional import interpolate
from torch.nn.modules.batchnorm import _BatchNorm

from fclmodels.backbones.inputs.batch_statistics import capture_statistics
from fclmodels.backbones.model.network import Network
from fclmodels.errors import UserError
from fclmodels.federation.executors.base import set_torch_threads
from fclmodels.federation.run_context import Run
from fclmodels.federation.training.optimisers import (
    Optimiser,
    make_optimiser,
    read_optimiser_state,
    restore_optimiser,
)
from fclmodels.federation.training.server_training import ServerWork
from fclmodels.methods.parts.joined_heads import compute_cross_entropy_in_heads, join_heads
from fclmodels.numerics.data_free import (
    Statistics,
    measure_statistics_gap,
    oppose,
    remember_statistics,
)
from fclmodels.numerics.distillation import distillation_loss
from fclmodels.randomness import seed_torch
from fclmodels.settings.base import Settings as BaseSettings
from fclmodels.settings.schema import OptimizerSettings
from fclmodels.storage.trees import Tree

SMALL = 2**18  # pixels of a batch that keep one thread busy: on a shared machine a second one would wait for it
MEMORY = 0.9  # share of the past in the statistics of batches
SLOW = {"lr": 0.002, "clip": 1.0}  # of a student without batch normalisation, after fed-mammoth's TARGET
BETAS = (0.5, 0.999)  # of Adam that trains a generator


class SynthesisSettings(BaseSettings):
    pool: PositiveInt = Field(8000, le=10_000_000, description="synthetic images that each client downloads a task")
    batch: int = Field(256, ge=2, le=100_000, description="images that the generator makes at once")
    g_steps: PositiveInt = Field(10, le=1_000_000, description="steps of the generator in a round")
    warmup: NonNegativeInt = Field(20, le=1_000_000, description="rounds before the student's first")
    rounds: PositiveInt | None = Field(
        None, le=1_000_000, description="of synthesis in a task; null: as many as fill the pool after warmup"
    )
    pool_from: Literal["warmup", "start"] = Field(
        "warmup", description="rounds whose images stay: those after warmup, or all (the releases' code)"
    )
    lr_g: PositiveFloat = Field(2e-3, le=1e3, description="rate of the generator's Adam")
    class_weight: NonNegativeFloat = Field(0.5, le=1e6, description="weight of the cross entropy of the drawn classes")
    statistics_weight: NonNegativeFloat = Field(
        10.0, le=1e6, description="weight of the distance to batch normalisation's running statistics"
    )
    student_weight: NonNegativeFloat = Field(1.0, le=1e6, description="weight of A, which the student's errors lower")
    student_steps: NonNegativeInt = Field(400, le=1_000_000, description="steps of the student in a round")
    student_temperature: PositiveFloat = Field(20.0, le=1e6, description="by which its and the teacher's logits count")
    noise: PositiveInt = Field(256, le=100_000, description="numbers that the generator makes an image of")
    side: PositiveInt | None = Field(
        None, le=4096, description="pixels of a side as generated and sent, then enlarged; null: the samples'"
    )
    width: PositiveInt = Field(64, le=10_000, description="channels of the generator's last layers")


class Synthesis(ServerWork):
    """The server's work: a step is a round of synthesis."""

    name = "synthesis"
    # Rounds after `warmup`, counted from 1, from which A counts, and from which the student learns.
    opposes_after: ClassVar[int]
    learns_after: ClassVar[int]
    student_settings: ClassVar[OptimizerSettings]  # the release's

    def __init__(
        self,
        run: Run,
        settings: SynthesisSettings,
        teacher: Network,
        student: Network,
        beside: Sequence[nn.Module] = (),  # what the student has beside its network
    ) -> None:
        self.run = run
        self.settings = settings
        self.teacher = teacher.eval().requires_grad_(False)
        self.student = student
        self.learners = nn.ModuleList([student, *beside]).requires_grad_(True)
        draw_anew(self.learners, run, len(teacher.spec.tasks))
        self.student_sgd = self.choose_student_sgd()
        self.student_optimiser = self.make_student_optimiser()
        self.sizes = [len(labels) for labels in teacher.spec.head_labels]
        self.past: Statistics | None = None
        self.latest: Statistics = []  # of the last images that were measured
        self.count = 0  # of images in the pool
        channels, *sides = teacher.spec.shape
        self.shape = (channels, *([settings.side] * 2 if settings.side else sides))
        self.first_lesson, self.rounds = self.find_first_lesson(settings), self.count_rounds(settings)
        size = self.count_images(settings)
        self.images = torch.empty(size, *self.shape, dtype=torch.uint8)
        self.columns = torch.empty(size, dtype=torch.int64)  # of these images

    @classmethod
    def find_first_lesson(cls, settings: SynthesisSettings) -> int:
        """Return the round, counted from 1, from which the student learns."""
        return max(1, settings.warmup + cls.learns_after)

    @classmethod
    def count_rounds(cls, settings: SynthesisSettings) -> int:
        """Return the number of rounds: by default as many as fill the pool from the student's first on."""
        return settings.rounds or cls.find_first_lesson(settings) - 1 + ceil(settings.pool / settings.batch)

    @classmethod
    def count_images(cls, settings: SynthesisSettings) -> int:
        """Return how many images the pool has in the end."""
        first = cls.find_first_lesson(settings) if settings.pool_from == "warmup" else 1
        return max(0, min(settings.pool, (cls.count_rounds(settings) - first + 1) * settings.batch))

    @abstractmethod
    def make_images(self, round: int) -> tuple[Tensor, Tensor, float]:
        """Train the generator for a round; return its best images [batch, C, H, W], their columns and their loss."""

    def make_student_optimiser(self) -> Optimiser:
        """Return the student's optimiser."""
        return make_optimiser(self.student_sgd, list(self.learners.parameters()), 0)

    def choose_student_sgd(self) -> OptimizerSettings:
        """Return the student's SGD: the release's, or without batch normalisation, where that diverges, a slow one."""
        if any(isinstance(module, _BatchNorm) for module in self.student.modules()):
            return self.student_settings
        return self.student_settings.model_copy(update=SLOW)

    @property
    def student_batch(self) -> int:
        """The number of images in a step of the student."""
        return self.settings.batch

    def step(self, number: int) -> float:
        *_, height, width = self.images.shape
        is_small = self.settings.batch * height * width < SMALL
        with set_torch_threads(1 if is_small else torch.get_num_threads()):
            return self.take_round(number + 1)

    def take_round(self, round: int) -> float:
        """Make images, put them into the pool and teach the student; return the images' loss."""
        images, columns, loss = self.make_images(round)
        if not isfinite(loss):
            raise UserError(f"the server's synthesis diverged in round {round} (loss {loss}). Lower lr_g.")
        self.past = remember_statistics(self.latest, self.past, MEMORY)
        if round >= self.first_lesson or self.settings.pool_from == "start":
            self.store(images, columns)
        if round >= self.first_lesson and self.settings.student_weight:
            self.teach_student(round - self.first_lesson)
        return loss

    def read_pool(self) -> tuple[Tensor, Tensor]:
        """Return the pool's images [n, C, H, W], uint8, and their columns [n]."""
        return self.images[: self.count], self.columns[: self.count]

    def store(self, images: Tensor, columns: Tensor) -> None:
        """Put images into the pool, as many as it still takes."""
        end = min(self.count + len(images), len(self.images))
        self.images[self.count : end] = (255 * images.clamp(0, 1)).to(torch.uint8)[: end - self.count]
        self.columns[self.count : end] = columns[: end - self.count]
        self.count = end

    def collect_state(self) -> Tree:
        return {
            "student": dict(self.learners.state_dict()),
            "student_optimiser": read_optimiser_state(self.student_optimiser),
            "past": self.past,
            "pool": self.read_pool(),
        }

    def restore(self, state: Tree) -> None:
        self.learners.load_state_dict(state["student"])
        restore_optimiser(self.student_optimiser, state["student_optimiser"])
        self.past = state["past"]
        images, columns = state["pool"]
        self.count = len(images)
        self.images[: self.count], self.columns[: self.count] = images, columns

    # The loss of images.

    def augment(self, pixels: Tensor) -> Tensor:
        """Return altered pixels of the samples' size, by draws from torch's global generator."""
        batches = self.run.batches
        generator = batches.make_device_generator(torch.default_generator)
        return batches.augment_pixels(enlarge(pixels, self.teacher.spec.shape), generator)

    def measure(self, inputs: Tensor, columns: Tensor, round: int) -> tuple[Tensor, Tensor]:
        """Return the loss of images as the teacher reads them, and the teacher's features of them [B, F]."""
        of = self.settings
        with capture_statistics(self.teacher) as captured:
            features = self.teacher.backbone(inputs)
        self.latest = captured.batch
        loss = of.class_weight * compute_cross_entropy_in_heads(self.teacher, features, columns).mean()
        if captured.batch:
            gap = measure_statistics_gap(captured.batch, captured.running, self.past, MEMORY)
            loss = loss + of.statistics_weight * gap
        if of.student_weight and round >= of.warmup + self.opposes_after:
            answers = join_heads(self.student, self.student.eval().backbone(inputs))
            loss = loss + of.student_weight * oppose(answers, join_heads(self.teacher, features), self.sizes)
        return loss, features

    # The student.

    def teach_student(self, rounds: int) -> None:
        """Let the student learn the teacher's answers on the pool, after so many rounds of that."""
        self.learners.train()
        draws = draw_endlessly(self.count, self.student_batch)
        for places in islice(draws, self.settings.student_steps):
            inputs = self.run.batches.normalise_pixels(self.augment(self.images[places].to(self.run.device)))
            with torch.no_grad():
                right = self.teacher.backbone(inputs)
            loss = self.compare(self.student.backbone(inputs), right)
            self.student_optimiser.zero_grad()
            loss.backward()
            if (most := self.student_sgd.clip) is not None:
                nn.utils.clip_grad_norm_(self.learners.parameters(), most)
            self.student_optimiser.step()

    def compare(self, features: Tensor, right: Tensor) -> Tensor:
        """Return T^2 KL(teacher || student) by both's features, mean over images and summed over heads."""
        T = self.settings.student_temperature
        answers, answers_right = join_heads(self.student, features), join_heads(self.teacher, right).detach()
        heads = zip(answers.split(self.sizes, 1), answers_right.split(self.sizes, 1), strict=True)
        return torch.stack([T**2 * distillation_loss(s, t, T) for s, t in heads]).sum()


def enlarge(pixels: Tensor, shape: Sequence[int]) -> Tensor:
    """Return pixels [B, C, H, W], uint8 or floating in 0..1, at the size of samples of this shape."""
    if pixels.shape[1:] == torch.Size(shape):
        return pixels
    scaled = pixels if pixels.is_floating_point() else pixels.float() / 255
    return interpolate(scaled, tuple(shape[1:]), mode="bilinear", align_corners=False)


@torch.no_grad()
def draw_anew(modules: nn.Module, run: Run, learned: int) -> None:
    """Draw layers as the releases draw their student's; what else modules have stays.

    Weights of convolutions and linear layers by Xavier's normal, their biases from N(0, 1), gains of batch
    normalisation from N(1, 0.02^2), its biases 0.
    """
    with seed_torch(run.seed, "student", learned, device=run.device):
        for module in modules.modules():
            if isinstance(module, nn.Conv2d | nn.Linear):
                nn.init.xavier_normal_(module.weight)
                if module.bias is not None:
                    nn.init.normal_(module.bias)
            elif isinstance(module, _BatchNorm):
                nn.init.normal_(module.weight, mean=1, std=0.02)
                nn.init.zeros_(module.bias)


def draw_endlessly(count: int, size: int, random: torch.Generator | None = None) -> Iterator[Tensor]:
    """Yield places among `count` in parts of this size, in a new random order each time that all have been drawn."""
    order = torch.empty(0, dtype=torch.int64)
    while True:
        while len(order) < size:
            order = torch.cat([order, torch.randperm(count, generator=random)])
        yield order[:size]
        order = order[size:]


def make_adam(network: nn.Module, lr: float) -> torch.optim.Adam:
    """Return the Adam that trains a generator."""
    return torch.optim.Adam(network.parameters(), lr, betas=BETAS, fused=True)
