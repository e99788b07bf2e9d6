"""Domain-incremental: one label space, a task a domain (SPECIAL sec. 6, FedProTIP's DomainNet)."""

import numpy as np
from pydantic import Field

from fclmodels.data.streams.base import Layout, Samples, Stream, Task, positions, same_for_all
from fclmodels.errors import UserError
from fclmodels.settings import StreamSettings


class DomainIncremental(Stream):
    """tasks are domains that share their classes"""

    name = "domain-incremental"

    class Settings(StreamSettings):
        domains: tuple[int | str, ...] | None = Field(
            None, description="the tasks' domains by name, in this order; null: all, as the source gives them"
        )

    settings: Settings

    def layout(self, samples: Samples, clients: int) -> Layout:
        self.refuse(samples)
        wanted = samples.domain_names if self.settings.domains is None else self.settings.domains
        order = positions(wanted, samples.domain_names, "stream.domains")
        if not order:
            raise UserError("stream.domains: no domain is named. Name at least one, or leave it out to take all.")
        rows = [np.flatnonzero(samples.domains == d) for d in order]
        tasks = [
            Task(samples.domain_names[d], learned_classes(samples, part)) for d, part in zip(order, rows, strict=True)
        ]
        return same_for_all(tasks, rows, clients)

    def refuse(self, samples: Samples) -> None:
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


def learned_classes(samples: Samples, rows: np.ndarray) -> tuple[int, ...]:
    """Classes that some of these rows train."""
    return tuple(int(c) for c in np.unique(samples.labels[rows[~samples.test[rows]]]))
