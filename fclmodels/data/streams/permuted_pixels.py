"""Permuted pixels (PMNIST): the same samples in every task, their pixels in another fixed order.

FOT sec. 5 says that each task is permuted; its release, like the protocol's first users, leaves the first as
it is, which is the default here.
"""

from dataclasses import replace
from typing import Literal

import numpy as np
from pydantic import Field, PositiveInt

from fclmodels.data.streams.base import Layout, PlannedTask, SampleTable, Stream, lay_out_for_all
from fclmodels.data.streams.domain_incremental import find_learned_classes
from fclmodels.randomness import derive_seed
from fclmodels.settings.schema import StreamSettings


class PermutedPixels(Stream):
    """tasks are the same images under different orders of their pixels"""

    name = "permuted-pixels"

    class Settings(StreamSettings):
        tasks: PositiveInt = Field(10, le=32_767, description="number of tasks")
        first_task: Literal["original", "permuted"] = Field(
            "original", description="pixels of the first task: as they are, or permuted like the others"
        )
        dealt: Literal["once", "each-task"] = Field(
            "once",
            description="once: a client that takes part in all tasks keeps its images; each-task: they are dealt anew",
        )

    settings: Settings

    def lay_out(self, samples: SampleTable, clients: int) -> Layout:
        rows = np.arange(len(samples.labels))
        classes = find_learned_classes(samples, rows)
        tasks = [
            PlannedTask(f"permutation {t}", classes, self._seed_permutation(t)) for t in range(self.settings.tasks)
        ]
        layout = lay_out_for_all(tasks, [rows] * len(tasks), clients)
        if self.settings.dealt == "each-task":
            return layout
        return replace(layout, pools=tuple(replace(pool, key=0) for pool in layout.pools))

    def _seed_permutation(self, task: int) -> int | None:
        if task == 0 and self.settings.first_task == "original":
            return None
        return derive_seed("stream", self.settings.seed or 0, "permutation", task)
