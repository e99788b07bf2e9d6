"""Classes that a client has in one round: as many of the task's as it has, drawn anew in each round (PIP sec. 4.2).

Clients share images (`partition.samples: shared`), so a client has all images of the classes that it draws.
"""

from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
import torch

from fclmodels.errors import UserError
from fclmodels.federation.client import Client
from fclmodels.federation.messages import Reply
from fclmodels.plugins import find

if TYPE_CHECKING:
    from fclmodels.federation.executors.base import Job
    from fclmodels.federation.method import Method


class RedrawStage:
    """Gives a client the rows of the classes that it has drawn for a round; outside of rounds it has its own."""

    def __init__(self, method: "Method") -> None:
        self.splits = method.run.splits

    def prepare(self, client: Client) -> Client:
        if client.round < 0:
            return client
        everyone = self.splits.select_rows(client.task, "train")
        images = everyone.take(np.unique(everyone.samples, return_index=True)[1])
        classes, own = np.unique(images.labels), len(np.unique(client.rows.labels))
        drawn = classes[torch.randperm(len(classes), generator=client.make_generator("classes"))[:own].numpy()]
        return replace(client, rows=images.assign_to(client.index, drawn.tolist()))

    def change(self, reply: Reply, client: Client, job: "Job") -> Reply:
        return reply


stage = RedrawStage


def refuse_unfit_method(method: "Method") -> None:
    """Raise UserError, before a run, where clients do not share images."""
    partition = method.run.params.partition
    if not find("partition", partition.kind)(partition).shares_images:
        raise UserError(
            "federation.redraw_classes: a client has all images of the classes that it draws. "
            "Use partition.kind: class-share with samples: shared, or leave it out."
        )
