"""The context of a run, which every part of it reads and none changes: settings, splits, seed, device, batches."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from fclmodels.backbones.model.spec import ModelSpec
from fclmodels.data.batches import Batches
from fclmodels.data.splits.split_reader import Splits
from fclmodels.errors import UserError
from fclmodels.randomness import make_generator
from fclmodels.settings.schema import Params


@dataclass(frozen=True)
class Run:
    """One method with one seed on one stream."""

    params: Params
    splits: Splits
    seed: int
    device: torch.device
    batches: Batches
    home: Path | None = None  # a folder for caches, which can be computed again
    adapter: Mapping[str, Any] | None = None  # what the method attaches to the backbone (ModelSpec)

    @classmethod
    def on(cls, params: Params, splits: Splits, seed: int, home: Path | None = None) -> "Run":
        """Return the run of these settings on these splits, on the device that the settings choose."""
        device = choose_device(params.device)
        run = cls(params, splits, seed, device, Batches(splits, params.augment, device), home)
        run.count_rounds(0)  # a list of the wrong length is refused before any work
        return run

    def make_generator(self, *purpose: int | str) -> torch.Generator:
        """Return a CPU generator for this seed and purpose, such as ("init",) or ("batches", task, round, client)."""
        return make_generator(self.seed, *purpose)

    def make_spec(self, learned: int) -> ModelSpec:
        """Return the form of the model whose head covers the first `learned` tasks."""
        head = self.splits.head if self.params.model.head == "auto" else self.params.model.head
        classes = tuple(task.classes for task in self.splits.tasks[:learned])
        settings = self.params.model.model_dump(mode="json")
        return ModelSpec(settings, self.splits.shape, head, classes, self.adapter)

    def count_rounds(self, task: int) -> int:
        """Return the number of rounds of a task."""
        return max(1, round(self.count_unscaled_rounds(task) * self.params.federation.rounds_scale))

    def count_unscaled_rounds(self, task: int) -> int:
        """Return the rounds of a task as set, before federation.rounds_scale shrinks them."""
        rounds = self.params.federation.rounds
        if isinstance(rounds, int):
            return rounds
        if len(rounds) != len(self.splits.tasks):
            raise UserError(
                f"federation.rounds lists {len(rounds)} tasks, the stream has {len(self.splits.tasks)}. "
                "Give one number for all tasks, or one for each."
            )
        return rounds[task]

    def find_server_lr(self, task: int) -> float:
        """Return eta_g of a task: constant, or falling with the number of the task."""
        federation = self.params.federation
        fall = {"constant": 1.0, "1/t": 1 / (task + 1), "1/sqrt(t)": (task + 1) ** -0.5}
        return federation.server_lr * fall[federation.server_lr_schedule]


def choose_device(name: str) -> torch.device:
    """Return the device that `device` names; auto: a GPU where there is one."""
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError as problem:
        raise UserError(f"device: {name} is not a device. Valid: auto, cpu, cuda, cuda:N.") from problem
    if device.type == "cuda" and not torch.cuda.is_available():
        raise UserError(f"device: {name} is not there: torch {torch.__version__} sees no GPU. Use device: auto.")
    return device
