"""Joint training: an upper reference that breaks every rule of federated continual learning.

After each task one model is trained from scratch, centrally, on all data of all tasks so far. Its budget of epochs
is that of other methods: rounds times local epochs. It is no method to deploy; it measures the cost of forgetting and
federation together.
"""

from dataclasses import replace

import numpy as np
from pydantic import Field
from torch import Tensor, nn

from fclmodels.backbones.layers.norms import FromScratch
from fclmodels.backbones.model.network import Network, list_frozen
from fclmodels.data.batches import Batch
from fclmodels.data.splits.split_reader import Rows
from fclmodels.federation.server import Server
from fclmodels.federation.training.local_training import LocalTraining
from fclmodels.methods.fedavg import FedAvg


class Joint(FedAvg):
    """Upper reference: all tasks' data at once, centralised, from scratch after each task."""

    name = "joint"
    paper = "none: an upper reference"

    class Settings(FedAvg.Settings):
        batch_norm: FromScratch = Field("average", description="running statistics: average; batch: none")

    is_centralised = True

    def start_task(self, server: Server, task: int) -> Server:
        spec = self.run.make_spec(task + 1)
        return replace(server, spec=spec, weights=self.network.make_initial_weights(spec), task=task)

    def find_server_lr(self, task: int) -> float:
        """Return 1: there is no server, and training changes the model in full."""
        return 1.0

    def list_participants(self, task: int) -> tuple[int, ...]:
        return (0,)

    def select_rows(self, task: int, client: int) -> Rows:
        return Rows.concatenate(
            [drop_repeated(self.run.splits.select_rows(earlier, "train")) for earlier in range(task + 1)]
        )

    def count_pooled_bytes(self, task: int) -> dict[int, int]:
        splits = self.run.splits
        size = splits.images[0].nbytes
        return {client: len(splits.select_rows(task, "train", client)) * size for client in splits.list_clients(task)}

    def freezes(self, task: int) -> bool:
        """Return whether blocks are frozen from the start: those that freeze after a task would hold back its model."""
        return self.run.params.model.freeze_after == 0

    def select_trainable(self, network: Network, task: int) -> dict[str, nn.Parameter]:
        frozen = list_frozen(network.spec, network) if self.freezes(task) else set()
        return {name: parameter for name, parameter in network.named_parameters() if name not in frozen}

    def compute_loss(self, training: LocalTraining, batch: Batch) -> Tensor:
        features = training.compute_features(batch)
        return self.compute_cross_entropy_by_task(training.network, features, batch.labels, batch.tasks)


def drop_repeated(rows: Rows) -> Rows:
    """Return each sample a single time, where clients share images."""
    return rows.take(np.unique(rows.samples, return_index=True)[1])
