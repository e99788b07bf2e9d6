"""A threshold that grows with what the model knows of a task (ours): without knowledge there is nothing to protect.

Layer inputs of a task that is hardly learned span the directions that the next task needs too, so a fixed threshold
makes every later task learn slowly, for the sake of nothing. Here it is scaled by the share of the task's labels that
the model knows beyond guessing, (a - 1/C) / (1 - 1/C): a is its accuracy at the task's end on the clients' val rows
(their train rows where they have none), among the task's C classes. Clients send two counts, which are only summed.
"""

from typing import Literal

import torch
from pydantic import Field
from torch import Tensor

from fclmodels.backbones.model.network import Network
from fclmodels.backbones.model.spec import to_local_labels
from fclmodels.federation.client import Client
from fclmodels.federation.messages import Part, make_outline
from fclmodels.federation.run_context import Run
from fclmodels.methods.parts.protected_subspace import SubspaceSettings

# As in the papers and their releases.
FIXED = {"threshold_by": "fixed", "budget": 1.0}


class AdaptiveSettings(SubspaceSettings):
    profile: Literal["paper", "release"] | None = Field(
        None, description="settings that are not given are the paper's, or its release's; null: the defaults"
    )
    threshold_by: Literal["knowledge", "fixed"] = Field(
        "knowledge",
        description="knowledge: times the share of the task's labels that the model knows (ours); fixed: as set",
    )


def outline_counts() -> Part:
    """Return the outline of the counts that a client sends."""
    return make_outline("count", {"right": (), "samples": ()}, torch.int64)


@torch.no_grad()
def count_right(run: Run, client: Client, network: Network) -> dict[str, Tensor]:
    """Return how many of a client's val rows (or train rows) are answered right among the task's classes, of how many.

    The network is left in evaluation mode.
    """
    network.eval()
    rows = client.val if len(client.val) else client.rows
    right = 0
    for batch in run.batches.iterate_ordered(rows, run.params.evaluation.batch_size):
        answers = network(batch.inputs, client.task).argmax(1)
        right += int((answers == to_local_labels(network.spec, client.task, batch.labels)).sum())
    return {"right": torch.tensor(right), "samples": torch.tensor(len(rows))}


def compute_known_share(counts: dict[str, Tensor], classes: int) -> float:
    """Return (a - 1/C) / (1 - 1/C), at least 0, with a the accuracy of these counts; 1 for a single class."""
    if classes < 2 or not counts["samples"]:
        return 1.0
    accuracy = float(counts["right"] / counts["samples"])
    return min(max((accuracy - 1 / classes) / (1 - 1 / classes), 0.0), 1.0)
