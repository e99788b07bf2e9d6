"""InfLoRA, federated: low-rank factors that learn only where no earlier task's inputs lie (Liang and Li, CVPR 2024).

Before a task its factors A are set for good, to the leading directions of the task's inputs outside of what earlier
tasks' inputs span, and only B, zero at first, trains: so that what is learned changes no output of earlier inputs, up
to what the memory leaves out. The memory of each layer is DualGPM's (fclmodels/numerics/dual_memory.py): after a task
it takes in directions until the share lambda + (1 - lambda) t / T of the inputs' energy is covered, t from 0. T is the
number of tasks that the run has: where a stream grows it is small at first, and early tasks take more.

Federated (our choice): clients send the sum of x x^T over the inputs of the changed maps, before a task on the model
that the last one left, without the new A, and after it; the server adds them up, which is what one place would have.
As A is the same for all, the mean of B is the mean of B A: averaging is exact. The release trains a head for each task
on the task's classes alone: `model.loss_over: task`. Rank and lambda are its values for CIFAR-100 (ImageNet-R: 0.98).

knowledge: `memory` {layer: {basis [d, k], spans_free}}.
"""

from dataclasses import replace

import torch
from pydantic import Field, PositiveInt

from fclmodels.backbones.adapters.low_rank import LinearMap, LowRank, Target, name_factor
from fclmodels.backbones.model.network import FROZEN
from fclmodels.federation.client import Client
from fclmodels.federation.engine.cohort import Cohort
from fclmodels.federation.exchange import Answer, Exchange, Form
from fclmodels.federation.messages import Payload
from fclmodels.federation.method import Obstacle
from fclmodels.federation.run_context import Run
from fclmodels.federation.server import Server
from fclmodels.methods.parts.frozen_backbone import AT_ONCE, get_backbone
from fclmodels.methods.parts.input_grams import Grams, outline_grams, sum_inputs
from fclmodels.methods.parts.task_adapters import OWN, AdapterTraining, TaskAdapter
from fclmodels.numerics.dual_memory import DualMemory, design_factor, extend_memory


class OnlyB(TaskAdapter):
    """Of the present task's factors B alone trains; A is downloaded once a task."""

    moving = ("B",)


class InfLora(AdapterTraining):
    """Trains low-rank changes that earlier tasks' inputs do not reach, and the head."""

    name = "inflora"
    paper = "InfLoRA: Interference-Free Low-Rank Adaptation for Continual Learning"
    attaches = LowRank
    part = OnlyB

    class Settings(LowRank.Settings):
        rank: PositiveInt = Field(10, le=1024, description="r, the rank of what a task adds to a map")
        targets: tuple[Target, ...] = Field(
            ("key", "value"), min_length=1, description="the maps that change: of attention and of the perceptron"
        )
        lam: float = Field(
            0.95,
            ge=0,
            le=1,
            alias="lambda",
            description="share of the inputs' energy that the first task takes; it rises with t over the run's tasks",
        )

    settings: Settings

    def __init__(self, settings: Settings, run: Run) -> None:
        super().__init__(settings, run)
        new_inputs = Exchange("new-inputs", self.make_payload_without_own, self.answer, self.make_form)
        self.ask_new_inputs = self.declare(new_inputs)
        self.ask_inputs = self.declare(Exchange("inputs", self.make_payload, self.answer, self.make_form))

    @property
    def obstacle_to_noise(self) -> Obstacle | None:
        return Obstacle("takes directions from sums of inputs, which noise would fill", "Use o-lora")

    def list_maps(self, task: int) -> list[LinearMap]:
        """Return the maps that a task changes."""
        adapted = get_backbone(self.networks.build(self.run.make_spec(task + 1)))
        assert isinstance(adapted, LowRank)
        return adapted.maps

    def list_widths(self, task: int) -> dict[str, int]:
        """Return the width of each layer with a changed map."""
        return {of.layer: of.inputs for of in self.list_maps(task)}

    # On the server.

    def begin_task(self, server: Server, cohort: Cohort) -> Server:
        return self.set_factors(server, cohort.ask(self.ask_new_inputs, server).sum("inputs"))

    def make_payload_without_own(self, server: Server) -> Payload:
        """Return the weights without the task's factors A, which are not set yet and, B being 0, change nothing."""
        return {name: part for name, part in self.make_payload(server).items() if name != OWN}

    def set_factors(self, server: Server, grams: Grams) -> Server:
        """Return the server whose present factors A lie in directions of the inputs that are free."""
        memories = read_memory(server)
        designs = {name: design_factor(H, memories.get(name), self.settings.rank) for name, H in grams.items()}
        names = {name_factor(server.task, index, "A"): of.layer for index, of in enumerate(self.list_maps(server.task))}
        new = {name: designs[layer].to(server.weights[name]) for name, layer in names.items()}
        return replace(server, weights={**server.weights, **new})

    def finish_task(self, server: Server, cohort: Cohort) -> Server:
        grams, old = cohort.ask(self.ask_inputs, server).sum("inputs"), read_memory(server)
        share = server.task / len(self.run.splits.tasks)
        threshold = self.settings.lam + (1 - self.settings.lam) * share
        memory = {name: extend_memory(H, old.get(name), threshold)._asdict() for name, H in grams.items()}
        return replace(server, knowledge={**server.knowledge, "memory": memory})

    # On a client.

    def make_form(self, task: int, round: int) -> Form:
        return {"inputs": outline_grams(self.list_widths(task))}

    @torch.no_grad()
    def answer(self, client: Client, payload: Payload) -> Answer:
        """Return the sums of x x^T over the inputs of a client's samples."""
        maps = enumerate(self.list_maps(client.task))
        unset = {name_factor(client.task, i, "A"): torch.zeros(self.settings.rank, of.inputs) for i, of in maps}
        weights = {**unset, **self.join_own_weights(client, payload)}
        network = self.networks.load(self.run.make_spec(client.task + 1), weights)
        batches = self.run.batches.iterate_ordered(client.rows, AT_ONCE)
        return Answer({"inputs": sum_inputs(network, batches, self.list_widths(client.task), FROZEN)}, client.memory)


def read_memory(server: Server) -> dict[str, DualMemory]:
    """Return the memory of each layer; none before the first task has ended."""
    memory = server.knowledge.get("memory", {})
    return {name: DualMemory(of["basis"], bool(of["spans_free"])) for name, of in memory.items()}
