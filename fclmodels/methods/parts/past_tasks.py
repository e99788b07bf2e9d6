"""The past tasks of a client in one training: its coreset by task, and the classes' prototypes on the present model.

Passes over past samples normalise by their own batches and leave running statistics to the current task: at its end
these are what the model answers with, and a few samples of each past task would move them far.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor

from fclmodels.backbones.layers.norms import leave_statistics
from fclmodels.data.batches import Batch
from fclmodels.federation.client import Client
from fclmodels.federation.training.local_training import LocalTraining
from fclmodels.methods.parts.replay_memory import draw_batch
from fclmodels.methods.parts.vector_table import VectorTable
from fclmodels.numerics.protonet import average_classes

Gradients = dict[str, Tensor]


class PastTasks:
    """Samples by task, drawn in batches; prototypes; room for a vector of each task; the sum of current gradients."""

    def __init__(self, client: Client, samples: Batch) -> None:
        self.client = client
        self.random = client.make_generator("replay")
        self.augmenting = client.run.batches.make_device_generator(self.random)
        tasks = samples.tasks.unique().tolist()
        self.samples = {task: samples.take(samples.tasks.eq(task).nonzero().flatten()) for task in tasks}
        self.sum: Gradients = {}
        self.steps = 0
        self._prototypes: tuple[Tensor, Tensor] | None = None
        self._table: VectorTable | None = None

    def draw(self, task: int) -> Batch:
        return draw_batch(self.client, self.samples[task], self.random, self.augmenting)

    def reserve_table(self, like: Mapping[str, Tensor]) -> VectorTable:
        """Return room for a vector of each past task, the same in each step."""
        if self._table is None:
            self._table = VectorTable(like, len(self.samples), self.client.run.home)
        return self._table

    @torch.no_grad()
    def add_gradients(self, gradients: Gradients) -> None:
        """Count a step's gradients of the current task in their sum."""
        for name, gradient in gradients.items():
            if name in self.sum:
                self.sum[name] += gradient
            else:
                self.sum[name] = gradient.clone()
        self.steps += 1

    def compute_prototypes(self, training: LocalTraining) -> tuple[Tensor, Tensor]:
        """Return the mean features [L, F] of the stored classes' samples, and their labels [L].

        Of the model of this training's first step: what an earlier model made of them is no longer where they are.
        """
        if self._prototypes is None:
            prepare, embed = self.client.run.batches.prepare_inputs, training.network.backbone
            size = self.client.run.params.federation.batch_size
            with torch.no_grad(), isolate_pass(training):
                parts = [part for raw in self.samples.values() for part in prepare(raw).inputs.split(size)]
                features = torch.cat([embed(part) for part in parts])
                self._prototypes = average_classes(features, torch.cat([raw.labels for raw in self.samples.values()]))
        return self._prototypes


@contextmanager
def isolate_pass(training: LocalTraining) -> Iterator[None]:
    """Give passes the training's precision, and leave running statistics as they are, while open."""
    with leave_statistics(training.network), training.precision():
        yield
