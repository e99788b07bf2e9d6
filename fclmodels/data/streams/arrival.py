"""An arrival: all samples of a source are one task, the next one of a growing stream (growing_stream.py)."""

from dataclasses import replace
from typing import Literal

import numpy as np
from pydantic import Field

from fclmodels.data.streams.base import Layout, PlannedTask, SampleTable, Stream, lay_out_for_all
from fclmodels.errors import UserError
from fclmodels.settings.schema import StreamSettings


class Arrival(Stream):
    """all samples are one task: `fcl stream` makes one of each data set that arrives"""

    name = "arrival"

    class Settings(StreamSettings):
        task: str = Field("arrival", description="name of the task")
        owners: Literal["drawn", "domains"] = Field(
            "drawn", description="whose a sample is: drawn by the partition, or the client that its domain is named for"
        )

    settings: Settings

    def lay_out(self, samples: SampleTable, clients: int) -> Layout:
        task = PlannedTask(self.settings.task, tuple(range(len(samples.classes))))
        layout = lay_out_for_all([task], [np.arange(len(samples.labels))], clients)
        if self.settings.owners == "drawn":
            return layout
        (pool,) = layout.pools
        return replace(
            layout, pools=(replace(pool, owners=parse_clients(samples.domain_names, clients)[samples.domains]),)
        )


def parse_clients(names: tuple[str, ...], clients: int) -> np.ndarray:
    """Return the client that each domain is named for."""
    for name in names:
        if not (name.isdecimal() and int(name) < clients):
            raise UserError(
                f"client {name} is none of the stream's. Right: 0 to {clients - 1}, as partition.clients says."
            )
    return np.array([int(name) for name in names])
