"""What every part of a run can see and none can change: settings, splits, seed, device, batches."""

from dataclasses import dataclass

import torch

from fclmodels.backbones.spec import ModelSpec
from fclmodels.data.batches import Batches
from fclmodels.data.splits import Splits
from fclmodels.errors import UserError
from fclmodels.randomness import generator
from fclmodels.settings import Params


@dataclass(frozen=True)
class Run:
    params: Params
    splits: Splits
    seed: int
    device: torch.device
    batches: Batches

    @classmethod
    def on(cls, params: Params, splits: Splits, seed: int) -> "Run":
        device = choose_device(params.device)
        run = cls(params, splits, seed, device, Batches(splits, params.augment, device))
        run.rounds(0)  # a list of the wrong length is refused before any work
        return run

    def generator(self, *purpose: int | str) -> torch.Generator:
        """A CPU generator for this seed and purpose, such as ("init",) or ("batches", task, round, client)."""
        return generator(self.seed, *purpose)

    def spec(self, learned: int) -> ModelSpec:
        """The model whose head covers the first `learned` tasks."""
        head = self.splits.head if self.params.model.head == "auto" else self.params.model.head
        classes = tuple(task.classes for task in self.splits.tasks[:learned])
        return ModelSpec(self.params.model.model_dump(mode="json"), self.splits.shape, head, classes)

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
