"""Domain-incremental: one label space, a task a domain (SPECIAL sec. 6, FedProTIP's DomainNet)."""

import numpy as np
from pydantic import Field

from fclmodels.data.streams.base import Layout, PlannedTask, SampleTable, Stream, find_positions, lay_out_for_all
from fclmodels.errors import UserError
from fclmodels.settings.schema import StreamSettings


class DomainIncremental(Stream):
    """tasks are domains that share their classes"""

    name = "domain-incremental"

    class Settings(StreamSettings):
        domains: tuple[int | str, ...] | None = Field(
            None, description="the tasks' domains by name, in this order; null: all, as the source gives them"
        )

    settings: Settings

    def lay_out(self, samples: SampleTable, clients: int) -> Layout:
        self.refuse(samples)
        names = samples.domain_names if self.settings.domains is None else self.settings.domains
        order = find_positions(names, samples.domain_names, "stream.domains")
        if not order:
            raise UserError("stream.domains: no domain is named. Name at least one, or leave it out to take all.")
        rows = [np.flatnonzero(samples.domains == d) for d in order]
        tasks = [
            PlannedTask(samples.domain_names[d], find_learned_classes(samples, part))
            for d, part in zip(order, rows, strict=True)
        ]
        return lay_out_for_all(tasks, rows, clients)

    def refuse(self, samples: SampleTable) -> None:
        """Raise UserError where the samples make no such stream."""
        if samples.own_label_spaces:
            raise UserError(
                "stream.kind: domain-incremental needs one label space, this source's data sets have their own. "
                "Use stream.kind: datasets."
            )
        if len(samples.domain_names) < 2:
            raise UserError(
                "stream.kind: domain-incremental needs a source with several domains, this one has 1. "
                "Use data.source: digits-domains, or stream.kind: class-incremental."
            )


def find_learned_classes(samples: SampleTable, rows: np.ndarray) -> tuple[int, ...]:
    """Return the classes of the train rows among these rows."""
    return tuple(int(c) for c in np.unique(samples.labels[rows[~samples.test[rows]]]))
