"""A client as a method sees it: its own rows and memory, a position, keyed randomness; nothing of the others."""

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from fclmodels.data.batches import Batch
from fclmodels.data.splits import Rows
from fclmodels.federation.run import Run
from fclmodels.state import Tree


@dataclass(frozen=True)
class Client:
    index: int
    task: int
    round: int
    run: Run
    rows: Rows
    memory: dict[str, Tree]

    def generator(self, purpose: str) -> torch.Generator:
        return self.run.generator(purpose, self.task, self.round, self.index)

    def epochs(self) -> Iterator[Iterator[Batch]]:
        """The round's local epochs over the client's train rows, each in an order of its own."""
        federation = self.run.params.federation
        random = self.generator("batches")
        for _ in range(federation.local_epochs):
            yield self.run.batches.shuffled(self.rows, federation.batch_size, random)

    @property
    def weight(self) -> float:
        """Its weight in the server's average."""
        return float(len(self.rows)) if self.run.params.federation.weighting == "samples" else 1.0

    @property
    def val(self) -> Rows:
        """Rows set apart for what is tuned, gated or chosen."""
        return self.run.splits.rows(self.task, "val", self.index)
