"""PEC's networks: a small student for each class, one wide random teacher, and the answer of the least error."""

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from pydantic import Field, PositiveInt
from torch import Tensor, nn

from fclmodels.numerics.fitted_heads import NEVER
from fclmodels.randomness import seed_torch
from fclmodels.settings.schema import OptimizerSettings

AT_ONCE = 2**23  # numbers in the teacher's maps that are in memory at a time


class LinearlyFalling(OptimizerSettings):
    """An optimiser whose learning rate falls linearly to 0 in so many epochs."""

    epochs: PositiveInt = Field(1, description="of a task")

    def compute_lr(self, round: int, epochs: int) -> float:
        return super().compute_lr(round, epochs) * (1 - min(epochs, self.epochs - 1) / self.epochs)


class LeastError(nn.Module):
    """Minus the error of the students as logits [B, columns]; those of classes that nobody trained never answer."""

    def __init__(self, spec: Mapping[str, Any]) -> None:
        super().__init__()
        shape, self.columns = spec["shape"], spec["labels"]
        self.trained = spec["trained"]
        self.students = nn.ModuleList(build_predictor(shape, spec, 1) for _ in spec["trained"])
        # Drawn again from the seed in place of being saved: it is the largest part.
        self.teacher = (draw_teacher(shape, spec, spec["seed"]),)

    def forward(self, inputs: Tensor) -> Tensor:
        """Return logits of inputs [B, C, H, W]."""
        targets = answer_in_parts(self.teacher[0].to(inputs.device), inputs)
        never = inputs.new_full((len(inputs),), NEVER)
        errors = [
            -(student(inputs) - targets).square().mean(1) if trained else never
            for student, trained in zip(self.students, self.trained, strict=True)
        ]
        return torch.stack(errors, dim=1)[:, self.columns]


def build_predictor(shape: Iterable[int], sizes: Mapping[str, Any], factor: int) -> nn.Module:
    """Return a network from images to K numbers, with `factor` times a student's filters."""
    channels, *_ = shape
    width, pool = factor * sizes["width"], sizes["pool"]
    return nn.Sequential(
        nn.Conv2d(channels, width, 3, padding=1),
        nn.InstanceNorm2d(width, affine=True),
        nn.ReLU(),
        nn.AdaptiveAvgPool2d(pool),
        nn.Flatten(),
        nn.Linear(width * pool**2, sizes["outputs"]),
    )


def draw_teacher(shape: Iterable[int], sizes: Mapping[str, Any], seed: int) -> nn.Module:
    """Return the teacher of a run's seed."""
    with seed_torch(seed, "teacher", device=torch.device("cpu")), torch.inference_mode(False):
        return build_predictor(shape, sizes, sizes["teacher"]).requires_grad_(False)


@torch.no_grad()
def answer_in_parts(teacher: nn.Module, inputs: Tensor) -> Tensor:
    """Return the teacher's answers [B, K], of so few inputs at a time that its maps take bounded memory."""
    filters = teacher.get_parameter("0.weight").shape[0]
    return torch.cat([teacher(part) for part in inputs.split(max(1, AT_ONCE // (filters * inputs[0, 0].numel())))])
