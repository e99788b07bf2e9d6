"""Joint training: an upper reference that breaks every rule of federated continual learning.

After each task one model is trained from scratch, centrally, on all data of all tasks so far. Its budget of epochs
is that of the others: rounds times local epochs. It is no method to deploy; it says what forgetting and
federation cost together.
"""

from dataclasses import replace

import numpy as np
from pydantic import Field
from torch import Tensor, nn

from fclmodels.backbones.batch_norm import FromScratch
from fclmodels.backbones.network import Network
from fclmodels.data.batches import Batch
from fclmodels.data.splits import Rows
from fclmodels.federation.local import LocalTraining
from fclmodels.federation.server import Server
from fclmodels.methods.fedavg import FedAvg


class Joint(FedAvg):
    """Upper reference: all tasks' data at once, centralised, from scratch after each task."""

    name = "joint"
    paper = "none: an upper reference"

    class Settings(FedAvg.Settings):
        batch_norm: FromScratch = Field("average", description="running statistics: average; batch: none")

    def start_task(self, server: Server, task: int) -> Server:
        spec = self.run.spec(task + 1)
        return replace(server, spec=spec, weights=self.built(spec), task=task)

    def server_lr(self, task: int) -> float:
        """There is no server: the model is what training made it."""
        return 1.0

    def participants(self, task: int) -> tuple[int, ...]:
        return (0,)

    def rows(self, task: int, client: int) -> Rows:
        return Rows.concatenate([once(self.run.splits.rows(earlier, "train")) for earlier in range(task + 1)])

    def pooled_bytes(self, task: int) -> dict[int, int]:
        splits = self.run.splits
        size = splits.images[0].nbytes
        return {client: len(splits.rows(task, "train", client)) * size for client in splits.clients_with(task)}

    def freezes(self, task: int) -> bool:
        return False

    def trainable(self, network: Network, task: int) -> dict[str, nn.Parameter]:
        return dict(network.named_parameters())

    def loss(self, training: LocalTraining, batch: Batch) -> Tensor:
        network = training.network
        return self.cross_entropy_by_task(network, network.backbone(batch.inputs), batch.labels, batch.tasks)


def once(rows: Rows) -> Rows:
    """Each sample a single time, where clients share images."""
    return rows.take(np.unique(rows.samples, return_index=True)[1])
