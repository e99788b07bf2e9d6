"""TARGET: clients replay images that the server makes of the last task's model (Zhang et al., ICCV 2023).

From the second task on a client descends, on a batch (x, y) and synthetic images u (parts/synthetic_replay.py),

    CE(s(x) over the task's classes, y) + kd H(softmax(t(u) / 2), softmax(s(u) / 2) over the old classes)

with t the last task's model. H, a cross entropy, has the gradient of the KL that is measured here. In the first task,
and with kd 0, it is FedAvg's step with `model.loss_over: task`.

On the server (parts/data_free_synthesis.py) a round trains a copy of the meta-generator G on one batch of noise, which
trains too, and uniform classes. `meta: fomaml`: the gradients of the copy's steps add up for one Adam step of G at
lr_g * g_steps; reptile: the gradient is 67 (G - copy). A counts from round `warmup` on, the pool and the student begin
after it.

Defaults are the release's for CIFAR-100 but for the number of rounds. The release makes 10 rounds and begins the
student after 20, so that its images follow no student, and are 2560 where it says 8000: `rounds: 10` with
`pool_from: start`. Its clients read 500 images a step (`synthetic_batch`) and end an epoch when these are through,
which is not offered. Its other column, for Tiny-ImageNet and ImageNet, is `meta: reptile`, g_steps 50, lr_g 2e-4,
class_weight 0.1, statistics_weight 0.1, student_temperature 5 and 200 rounds. After 140 rounds it resets two of G's
layers: left out.
"""

import copy
from math import cos, inf, pi
from typing import Literal

import torch
from pydantic import Field, NonNegativeFloat
from torch import Tensor

from fclmodels.backbones.model.network import Network
from fclmodels.federation.run_context import Run
from fclmodels.federation.server import Server
from fclmodels.federation.training.local_training import LocalTraining
from fclmodels.federation.training.optimisers import read_optimiser_state, restore_optimiser
from fclmodels.methods.parts.data_free_synthesis import Synthesis, make_adam
from fclmodels.methods.parts.distillation import Teacher, distil_heads
from fclmodels.methods.parts.image_generator import ImageGenerator
from fclmodels.methods.parts.joined_heads import count_columns
from fclmodels.methods.parts.synthetic_replay import SyntheticReplay
from fclmodels.randomness import seed_torch
from fclmodels.settings.schema import OptimizerSettings
from fclmodels.storage.trees import Tree

NOISE_LR = 1e-2
LEAST_LR, COSINE_ROUNDS = 2e-4, 200  # of the student's rate, which falls by half a cosine
REPTILE = 67.0


class Target(SyntheticReplay):
    """Clients answer images that the server makes of the last task's model as that model does."""

    name = "target"
    paper = "TARGET: Federated Class-Continual Learning via Exemplar-Free Distillation"

    class Settings(SyntheticReplay.Settings):
        kd: NonNegativeFloat = Field(25.0, le=1e6, description="weight of the images' distillation loss")
        meta: Literal["fomaml", "reptile"] = Field(
            "fomaml", description="how a round moves the generator: by its copy's summed gradients, or towards the copy"
        )

    settings: Settings

    @property
    def replays(self) -> bool:
        return self.settings.kd > 0

    @property
    def synthesis(self) -> type[Synthesis]:
        return TargetSynthesis

    def make_synthesis(self, server: Server, teacher: Network, student: Network) -> Synthesis:
        return TargetSynthesis(self.run, self.settings, teacher, student)

    def imitate(self, training: LocalTraining, inputs: Tensor, teacher: Teacher) -> Tensor:
        return imitate(training, inputs, teacher, self.settings)


def imitate(training: LocalTraining, inputs: Tensor, teacher: Teacher, of: Target.Settings) -> Tensor:
    """Return kd times the distillation loss of synthetic images, over the teacher's classes."""
    network = training.network
    return of.kd * distil_heads(network, network.backbone(inputs), teacher.compute_logits(inputs), of.temperature)


class TargetSynthesis(Synthesis):
    """Rounds of a meta-generator whose copy learns one batch of images."""

    opposes_after, learns_after = 0, 1
    student_settings = OptimizerSettings(lr=0.2, momentum=0.9, weight_decay=1e-4)
    settings: Target.Settings

    def __init__(self, run: Run, settings: Target.Settings, teacher: Network, student: Network) -> None:
        super().__init__(run, settings, teacher, student)
        with seed_torch(run.seed, "generator", len(teacher.spec.tasks), device=torch.device("cpu")):
            self.generator = ImageGenerator(settings.noise, settings.width, self.shape).to(run.device)
        self.meta = make_adam(self.generator, settings.lr_g * settings.g_steps)

    def make_images(self, round: int) -> tuple[Tensor, Tensor, float]:
        of, device = self.settings, self.run.device
        copied = copy.deepcopy(self.generator)
        noise = torch.randn(of.batch, of.noise, device=device, requires_grad=True)
        columns = torch.randint(count_columns(self.teacher.spec), (of.batch,), device=device)
        optimiser = make_adam(copied, of.lr_g)
        optimiser.add_param_group({"params": [noise], "lr": NOISE_LR})
        sums = [torch.zeros_like(parameter) for parameter in self.generator.parameters()]
        best, images = inf, noise
        for _ in range(of.g_steps):
            pixels = copied(noise)
            loss, _ = self.measure(self.run.batches.normalise_pixels(self.augment(pixels)), columns, round)
            optimiser.zero_grad()
            loss.backward()
            torch._foreach_add_(
                sums, [parameter.grad for parameter in copied.parameters() if parameter.grad is not None]
            )
            optimiser.step()
            if (value := float(loss.detach())) < best:
                best, images = value, pixels.detach()
        if of.meta == "reptile":
            pairs = zip(self.generator.parameters(), copied.parameters(), strict=True)
            sums = [REPTILE * (parameter - moved).detach() for parameter, moved in pairs]
        for parameter, gradient in zip(self.generator.parameters(), sums, strict=True):
            parameter.grad = gradient
        self.meta.step()
        return images, columns, best

    def teach_student(self, rounds: int) -> None:
        """Let the student learn at a rate that falls by half a cosine over 200 rounds."""
        share = (1 + cos(pi * min(rounds, COSINE_ROUNDS) / COSINE_ROUNDS)) / 2
        self.student_optimiser.param_groups[0]["lr"] = LEAST_LR + (self.student_sgd.lr - LEAST_LR) * share
        super().teach_student(rounds)

    def collect_state(self) -> Tree:
        generator = {"weights": dict(self.generator.state_dict()), "optimiser": read_optimiser_state(self.meta)}
        return {**super().collect_state(), "generator": generator}

    def restore(self, state: Tree) -> None:
        super().restore(state)
        self.generator.load_state_dict(state["generator"]["weights"])
        restore_optimiser(self.meta, state["generator"]["optimiser"])
