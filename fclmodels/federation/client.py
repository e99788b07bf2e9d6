"""A client as a method sees it: its own rows and memory, task and round, keyed randomness; nothing of other clients."""

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from fclmodels.data.batches import Batch
from fclmodels.data.splits.split_reader import Rows
from fclmodels.federation.run_context import Run
from fclmodels.storage.trees import Tree


@dataclass(frozen=True)
class Client:
    """A client in one exchange."""

    index: int
    task: int
    round: int  # below 0 in an exchange outside of rounds
    run: Run
    rows: Rows  # its train rows of the task
    memory: dict[str, Tree]

    def make_generator(self, purpose: str) -> torch.Generator:
        """Return the client's generator for a purpose, in this task and round."""
        return self.run.make_generator(purpose, self.task, self.round, self.index)

    def yield_epochs(self) -> Iterator[Iterator[Batch]]:
        """Yield the round's local epochs over the client's train rows, each in an order of its own."""
        federation = self.run.params.federation
        random = self.make_generator("batches")
        for _ in range(federation.local_epochs):
            yield self.run.batches.iterate_shuffled(self.rows, federation.batch_size, random)

    @property
    def weight(self) -> float:
        """The client's weight in the server's average."""
        return float(len(self.rows)) if self.run.params.federation.weighting == "samples" else 1.0

    @property
    def val(self) -> Rows:
        """The client's val rows, for tuning, gates and choices."""
        return self.run.splits.select_rows(self.task, "val", self.index)
