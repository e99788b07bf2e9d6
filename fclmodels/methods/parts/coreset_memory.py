"""STAMP's prototypical coreset (section 3.2, Algorithm 2): a few samples of each class, which each client keeps itself.

memory: `samples` as in replay_memory.py, at most `budget` of each class; `seen` {label: number of the class's samples
that the client has had}; `prototypes` {labels [L], means [L, F]}, the classes' mean embeddings on the last model.

A client selects a task's samples once, when the task has ended, on the final global model. Where a class comes again
and its budget is full, stored samples take over the style of new ones (eq. 6): their content and task stay, and no
memory grows.
"""

from typing import Literal

import torch
from pydantic import Field, PositiveInt
from torch import Tensor

from fclmodels.backbones.model.network import Network
from fclmodels.data.batches import Batch
from fclmodels.data.sample_kind import TEXTS, find_kind
from fclmodels.errors import UserError
from fclmodels.federation.client import Client
from fclmodels.federation.exchange import Memory
from fclmodels.federation.run_context import Run
from fclmodels.methods.parts.replay_memory import pack_samples, unpack_samples
from fclmodels.numerics.coreset import mix_styles, running_mean, select_by_herding, select_by_relaxation
from fclmodels.settings.base import Settings as BaseSettings

SELECTORS = {"herding": select_by_herding, "relaxed": select_by_relaxation}
EMBED = 256  # samples that pass the network at once


class CoresetSettings(BaseSettings):
    budget: PositiveInt = Field(20, le=100_000, description="samples of each class that a client keeps")
    selection: Literal["herding", "relaxed", "random"] = Field(
        "herding",
        description="of a class's samples: one by one towards the prototype; relaxed: by weights (Algorithm 2); "
        "random: without looking",
    )
    mix: float = Field(
        0.5, ge=0, le=1, description="share of its own style that a stored sample keeps where its class comes again"
    )


class CoresetMemory:
    """Chooses the samples that a client stores of each class."""

    def __init__(self, settings: CoresetSettings, run: Run, method: str) -> None:
        self.settings = settings
        if find_kind(run.splits.shape) is TEXTS:
            raise UserError(f"methods.{method} mixes styles of images, these samples are texts. Use er or agem.")

    def add_task(self, client: Client, network: Network) -> Memory:
        """Return the client's memory with samples of its task, selected by the features of this network."""
        arriving = client.run.batches.read_raw(client.rows)
        old = unpack_samples(client.memory) or arriving.take(torch.arange(0))
        old_features, new_features = embed(client, network, old), embed(client, network, arriving)
        counts = dict(client.memory.get("seen", {}))
        stored, means = [], {}
        for label in torch.cat([old.labels, arriving.labels]).unique().tolist():
            old_rows, new_rows = (batch.labels.cpu().eq(label).nonzero().flatten() for batch in (old, arriving))
            of_old, of_new = old_features[old_rows], new_features[new_rows]
            mean = running_mean(of_old, counts.get(str(label), 0), of_new)
            places = self.choose(client, of_new, mean, of_old)
            stored.append(self.merge(old.take(old_rows), arriving.take(new_rows[places])))
            means[label] = mean.float()
            counts[str(label)] = counts.get(str(label), 0) + len(of_new)
        prototypes = {
            "labels": torch.tensor(list(means), dtype=torch.int32),
            "means": torch.stack(list(means.values())),
        }
        samples = pack_samples(Batch.concatenate(stored))
        return {**client.memory, **samples, "seen": counts, "prototypes": prototypes}

    def choose(self, client: Client, new: Tensor, mean: Tensor, old: Tensor) -> Tensor:
        """Return the places of the selected new samples of a class, by the features [n, F] of new and stored ones.

        As many as there is room for; without room, as many as are stored, whose style they change.
        """
        room = self.settings.budget - len(old)
        count = min(len(new), room or len(old))
        if not count:
            return torch.arange(0)
        if self.settings.selection == "random":
            return torch.randperm(len(new), generator=client.generator("coreset"))[:count]
        return SELECTORS[self.settings.selection](new, count, mean, old)

    def merge(self, old: Batch, new: Batch) -> Batch:
        """Return the samples of a class to store: old and new ones, or old ones with the new ones' styles."""
        if len(old.labels) < self.settings.budget:
            return Batch.concatenate([old, new])
        if not len(new.labels):
            return old
        mixed = old.inputs.clone()
        mixed[: len(new.labels)] = mix_styles(old.inputs[: len(new.labels)], new.inputs, self.settings.mix)
        return Batch(mixed, old.labels, old.tasks)


@torch.no_grad()
def embed(client: Client, network: Network, raw: Batch) -> Tensor:
    """Return the backbone's features [n, F] of samples that are prepared, not augmented."""
    ready = client.run.batches.prepare_inputs(raw).inputs
    return torch.cat([network.backbone(part) for part in ready.split(EMBED)]).cpu()
