"""Training on the server, before a task's first round or after its last: of a generator, a distilled model, a head.

A method hands in its work, an object that takes one step at a time and whose state is a tree. Its state is saved as
often as checkpoints are, so that a run that is killed goes on from there and ends with the same bits: torch's global
generator (dropout, noise) is seeded in each step by the run's seed and the step's number.
"""

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from fclmodels import machine
from fclmodels.errors import UserError
from fclmodels.federation.executors.base import set_torch_threads
from fclmodels.federation.training.optimisers import Optimiser, read_optimiser_state, restore_optimiser
from fclmodels.randomness import seed_torch
from fclmodels.storage import trees
from fclmodels.storage.trees import Tree


class ServerWork(ABC):
    """Something that the server trains, step by step.

    It is a base class, so that a method whose server trains imports this module, which is then in its cache keys.
    """

    name: str

    @abstractmethod
    def step(self, number: int) -> float:
        """Take a step; return its loss."""

    @abstractmethod
    def collect_state(self) -> Tree:
        """Return all that the next step depends on: weights, the optimiser's state."""

    @abstractmethod
    def restore(self, state: Tree) -> None:
        """Go on from a state."""


@dataclass(frozen=True)
class NetworkTraining(ServerWork):
    """The usual work: steps of optimisers down a loss of some networks."""

    name: str
    networks: Mapping[str, nn.Module]  # all that training changes, statistics too
    optimisers: Sequence[Optimiser]
    loss: Callable[[int], Tensor]  # of a step by its number

    def step(self, number: int) -> float:
        for optimiser in self.optimisers:
            optimiser.zero_grad()
        loss = self.loss(number)
        loss.backward()
        for optimiser in self.optimisers:
            optimiser.step()
        return float(loss.detach())

    def collect_state(self) -> Tree:
        networks = {name: dict(network.state_dict()) for name, network in self.networks.items()}
        return {"networks": networks, "optimisers": [read_optimiser_state(optimiser) for optimiser in self.optimisers]}

    def restore(self, state: Tree) -> None:
        for name, network in self.networks.items():
            network.load_state_dict(state["networks"][name])
        for optimiser, of_optimiser in zip(self.optimisers, state["optimisers"], strict=True):
            restore_optimiser(optimiser, of_optimiser)


class ServerTraining:
    """Runs the server's work in one step of an experiment, and notes what it costs."""

    def __init__(
        self,
        folder: Path,
        key: tuple[int | str, ...],
        device: torch.device,
        threads: int,
        save_seconds: float,
        note: Callable[[dict[str, Any]], None] = lambda row: None,
        on_step: Callable[[str, int, int], None] = lambda name, done, of: None,
    ) -> None:
        self.folder = folder
        self.key = key  # of the random numbers of this step of the experiment: the seed, what it is for, the task
        self.device = device
        self.threads = threads
        self.save_seconds = save_seconds
        self.note = note
        self.on_step = on_step
        self._works = 0

    def run(self, work: ServerWork, steps: int) -> None:
        """Take all steps of a work that are not taken yet, and note seconds, peak memory, device and threads."""
        if not isinstance(work, ServerWork):
            raise TypeError(f"{type(work).__name__} is no ServerWork")
        self._works += 1
        file = self.folder / f"work-{self._works}.safetensors"
        costs: dict[str, Any] = {"steps": 0, "loss": 0.0, "seconds": 0.0, "peak_bytes": 0}
        if file.exists():
            saved = trees.load(file, self.device)
            work.restore(saved["state"])
            costs = saved["costs"]
        reset_peak_memory(self.device)
        before, started = costs, time.perf_counter()
        saved_at = started
        with set_torch_threads(self.threads):
            for number in range(before["steps"], steps):
                with seed_torch(*self.key, work.name, number, device=self.device):
                    loss = work.step(number)
                self.on_step(work.name, number + 1, steps)
                is_last = number + 1 == steps
                if is_last or time.perf_counter() - saved_at >= self.save_seconds:
                    wait_for(self.device)
                    costs = {
                        "steps": number + 1,
                        "loss": loss,
                        "seconds": before["seconds"] + time.perf_counter() - started,
                        "peak_bytes": max(before["peak_bytes"], read_peak_memory(self.device)),
                    }
                    trees.save({"state": work.collect_state(), "costs": costs}, file)
                    saved_at = time.perf_counter()
        self.note({"work": work.name, **costs, "device": self.device.type, "threads": self.threads})


def refuse_divergence(work: str, networks: Iterable[nn.Module], remedy: str) -> None:
    """Raise UserError where the server's training has left a network with a number that is none."""
    if not all(tensor.isfinite().all() for network in networks for tensor in network.state_dict().values()):
        raise UserError(f"the server's {work} diverged: its network has numbers that are not finite. {remedy}")


def wait_for(device: torch.device) -> None:
    """Wait until a GPU has finished its queue, so that seconds and peak memory are complete."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def reset_peak_memory(device: torch.device) -> None:
    """Begin to measure peak memory anew: a GPU's, or the process's where the system can."""
    if device.type == "cuda":
        torch.cuda.init()  # which reset_peak_memory_stats needs, and the first tensor there would do
        torch.cuda.reset_peak_memory_stats(device)
        return
    try:
        Path("/proc/self/clear_refs").write_text("5")
    except OSError:
        return


def read_peak_memory(device: torch.device) -> int:
    """Return the peak memory in bytes since `reset_peak_memory`: of a GPU, or of the process."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    return machine.read_peak_memory()
