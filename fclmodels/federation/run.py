"""What every part of a run can see and none can change: settings, splits, seed, device, batches."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from fclmodels.backbones.spec import ModelSpec
from fclmodels.data.batches import Batches
from fclmodels.data.splits import Splits
from fclmodels.errors import UserError
from fclmodels.randomness import generator
from fclmodels.settings import Params


@dataclass(frozen=True)
class Run:
    """home: a folder for what can be computed again. adapter: what the method attaches to the backbone (ModelSpec)."""

    params: Params
    splits: Splits
    seed: int
    device: torch.device
    batches: Batches
    home: Path | None = None
    adapter: Mapping[str, Any] | None = None

    @classmethod
    def on(cls, params: Params, splits: Splits, seed: int, home: Path | None = None) -> "Run":
        device = choose_device(params.device)
        run = cls(params, splits, seed, device, Batches(splits, params.augment, device), home)
        run.rounds(0)  # a list of the wrong length is refused before any work
        return run

    def generator(self, *purpose: int | str) -> torch.Generator:
        """A CPU generator for this seed and purpose, such as ("init",) or ("batches", task, round, client)."""
        return generator(self.seed, *purpose)

    def spec(self, learned: int) -> ModelSpec:
        """The model whose head covers the first `learned` tasks."""
        head = self.splits.head if self.params.model.head == "auto" else self.params.model.head
        classes = tuple(task.classes for task in self.splits.tasks[:learned])
        settings = self.params.model.model_dump(mode="json")
        return ModelSpec(settings, self.splits.shape, head, classes, self.adapter)

    def rounds(self, task: int) -> int:
        """Rounds that a task is trained for."""
        return max(1, round(self.rounds_set(task) * self.params.federation.rounds_scale))

    def rounds_set(self, task: int) -> int:
        """The same before federation.rounds_scale shrinks them."""
        rounds = self.params.federation.rounds
        if isinstance(rounds, int):
            return rounds
        if len(rounds) != len(self.splits.tasks):
            raise UserError(
                f"federation.rounds lists {len(rounds)} tasks, the stream has {len(self.splits.tasks)}. "
                "Give one number for all tasks, or one for each."
            )
        return rounds[task]

    def server_lr(self, task: int) -> float:
        """eta_g of a task: constant, or falling with the number of the task."""
        federation = self.params.federation
        fall = {"constant": 1.0, "1/t": 1 / (task + 1), "1/sqrt(t)": (task + 1) ** -0.5}
        return federation.server_lr * fall[federation.server_lr_schedule]


def choose_device(name: str) -> torch.device:
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError as problem:
        raise UserError(f"device: {name} is not a device. Valid: auto, cpu, cuda, cuda:N.") from problem
    if device.type == "cuda" and not torch.cuda.is_available():
        raise UserError(f"device: {name} is not there: torch {torch.__version__} sees no GPU. Use device: auto.")
    return device
