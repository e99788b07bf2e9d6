"""STAMP's prototypical coreset (section 3.2, Algorithm 2): a few samples of each class, which each client keeps itself.

memory: `samples` as in replay_memory.py, at most `budget` of each class, a task's in the order of their selection;
`seen` {label: number of the class's samples that the client has had}.

A client selects a task's samples once, when the task has ended, on the final global model. A class that comes again,
as each does in a stream of domains, has the same budget as before, so that no memory grows. It is shared by the tasks
that had the class, each of which keeps its first samples (ours; herding puts those first that stand for the rest); or
stored samples take over the style of new ones once it is full (eq. 6), while their content and task stay.
"""

from collections.abc import Callable, Sequence
from typing import Literal

import torch
from pydantic import Field, PositiveInt, model_validator
from torch import Tensor

from fclmodels.backbones.model.network import Network
from fclmodels.data.batches import Batch
from fclmodels.data.sample_kind import TEXTS, find_kind
from fclmodels.errors import UserError
from fclmodels.federation.client import Client
from fclmodels.federation.exchange import Memory
from fclmodels.federation.run_context import Run
from fclmodels.methods.parts.replay_memory import pack_samples, unpack_samples
from fclmodels.numerics.coreset import mix_styles, running_mean, select_by_herding
from fclmodels.settings.base import Settings as BaseSettings

EMBED = 256  # samples that pass the network at once


class CoresetSettings(BaseSettings):
    budget: PositiveInt = Field(20, le=100_000, description="samples of each class that a client keeps")
    selection: Literal["herding", "random"] = Field(
        "herding",
        description="of a class's samples: one by one towards the prototype (ours: Algorithm 2's weights say nothing "
        "of a new class); random: without looking",
    )
    returning: Literal["share", "restyle"] = Field(
        "share",
        description="of a class that comes again: its tasks share its budget; restyle: where that is full, stored "
        "samples take over the style of new ones (eq. 6)",
    )
    mix: float = Field(
        0.5, ge=0, le=1, description="under returning: restyle, share of its own style that a stored sample keeps"
    )

    @model_validator(mode="after")
    def _only_restyled_samples_mix(self) -> "CoresetSettings":
        if self.returning != "restyle" and self.mix != type(self).model_fields["mix"].default:
            raise ValueError("mix needs returning: restyle.")
        return self


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
        stored = []
        for label in torch.cat([old.labels, arriving.labels]).unique().tolist():
            old_rows, new_rows = (batch.labels.cpu().eq(label).nonzero().flatten() for batch in (old, arriving))
            of_old, of_new = old_features[old_rows], new_features[new_rows]
            mean = running_mean(of_old, counts.get(str(label), 0), of_new)
            stays = self.retain(old.take(old_rows), len(new_rows))
            places = self.choose(client, of_new, mean, of_old[stays])
            stored.append(self.merge(old.take(old_rows[stays]), arriving.take(new_rows[places])))
            counts[str(label)] = counts.get(str(label), 0) + len(of_new)
        return {**client.memory, **pack_samples(Batch.concatenate(stored)), "seen": counts}

    def retain(self, old: Batch, arriving: int) -> Tensor:
        """Return the places of a class's stored samples that stay when so many new ones arrive.

        Under `share` the tasks that have the class split its budget, what one of them does not need goes to the others.
        """
        if self.settings.returning == "restyle" or not arriving:
            return torch.arange(len(old.labels))
        tasks = old.tasks.cpu()
        present, counts = tasks.unique(return_counts=True)
        shares = split_evenly(self.settings.budget, [*counts.tolist(), arriving])
        return torch.cat(
            [tasks.eq(t).nonzero().flatten()[:n] for t, n in zip(present, shares, strict=False)] or [tasks]
        )

    def choose(self, client: Client, new: Tensor, mean: Tensor, old: Tensor) -> Tensor:
        """Return the places of the selected new samples of a class, by the features [n, F] of new and stored ones.

        As many as there is room for; without room, as many as are stored, whose style they change.
        """
        room = self.settings.budget - len(old)
        count = min(len(new), room or len(old) * (self.settings.returning == "restyle"))
        if not count:
            return torch.arange(0)
        if self.settings.selection == "random":
            return torch.randperm(len(new), generator=client.generator("coreset"))[:count]
        return select_by_herding(new, count, mean, old)

    def merge(self, old: Batch, new: Batch) -> Batch:
        """Return the samples of a class to store: old and new ones, or old ones with the new ones' styles."""
        if len(old.labels) < self.settings.budget:
            return Batch.concatenate([old, new])
        if not len(new.labels):
            return old
        mixed = old.inputs.clone()
        mixed[: len(new.labels)] = mix_styles(old.inputs[: len(new.labels)], new.inputs, self.settings.mix)
        return Batch(mixed, old.labels, old.tasks)


def split_evenly(budget: int, needs: Sequence[int]) -> list[int]:
    """Return the share of a budget for each need: as equal as can be, none above its need, a rest to the last ones."""
    shares = [0] * len(needs)
    rising = sorted(range(len(needs)), key=lambda place: (needs[place], place))
    for done, place in enumerate(rising):
        shares[place] = min(needs[place], budget // (len(needs) - done))
        budget -= shares[place]
    return shares


def embed(client: Client, network: Network, raw: Batch) -> Tensor:
    """Return the backbone's features [n, F] of samples that are prepared, not augmented."""
    return extract_in_parts(client, network.backbone, raw)


@torch.no_grad()
def extract_in_parts(client: Client, extract: Callable[[Tensor], Tensor], raw: Batch) -> Tensor:
    """Return any features [n, F] of such samples, on the CPU."""
    ready = client.run.batches.prepare_inputs(raw).inputs
    return torch.cat([extract(part) for part in ready.split(EMBED)]).cpu()
