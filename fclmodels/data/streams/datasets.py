"""A sequence of data sets, each with its own label space (FOT's 5-Datasets)."""

from typing import ClassVar, Literal

from fclmodels.data.streams.base import SampleTable
from fclmodels.data.streams.domain_incremental import DomainIncremental
from fclmodels.errors import UserError


class Datasets(DomainIncremental):
    """tasks are data sets with classes and a head of their own"""

    name = "datasets"
    head: ClassVar[Literal["growing", "per-task"]] = "per-task"

    def refuse(self, samples: SampleTable) -> None:
        if not samples.own_label_spaces:
            raise UserError(
                "stream.kind: datasets needs data sets with label spaces of their own. "
                "Use data.source: sequence, or stream.kind: domain-incremental."
            )
