"""STAMP's prototypical coreset (section 3.2, Algorithm 2): a few samples of each class, which each client keeps itself.

memory: `samples` as in replay_memory.py, at most `budget` of each class, a task's in the order of their selection;
`seen` {label: number of the class's samples that the client has had}.

A client selects a task's samples once, when the task has ended, on the final global model. A class that comes again,
as each does in a stream of domains, has the same budget as before, so that no memory grows. It is shared by the tasks
that had the class, each of which keeps its first samples (ours; herding puts those first that stand for the rest); or
stored samples take over the style of new ones once it is full (eq. 6), while their content and task stay.
"""

from collections.abc import Callable
from typing import Any, Literal

import torch
from pydantic import Field, PositiveInt, model_validator
from torch import Tensor

from fclmodels.backbones.model.network import Network, NetworkCache
from fclmodels.data.batches import Batch
from fclmodels.data.sample_kind import TEXTS, find_kind
from fclmodels.errors import UserError
from fclmodels.federation.client import Client
from fclmodels.federation.exchange import Memory
from fclmodels.federation.run_context import Run
from fclmodels.methods.parts.coreset_choice.bilevel_weights import BcsrSettings, choose_by_weights
from fclmodels.methods.parts.coreset_choice.candidates import Candidates
from fclmodels.methods.parts.coreset_choice.gradient_similarity import OcsSettings, choose_by_gradients
from fclmodels.methods.parts.coreset_choice.recovered_images import (
    Sre2lSettings,
    recover_images,
    require_running_statistics,
)
from fclmodels.methods.parts.coreset_choice.reducible_loss import CsrelSettings, choose_by_reducible_loss
from fclmodels.methods.parts.replay_memory import pack_samples, unpack_samples
from fclmodels.numerics.coreset import mix_styles, running_mean, select_by_herding
from fclmodels.numerics.shares import split_evenly
from fclmodels.settings.base import Settings as BaseSettings

EMBED = 256  # samples that pass the network at once


class CoresetSettings(BaseSettings):
    budget: PositiveInt = Field(20, le=100_000, description="samples of each class that a client keeps")
    selection: Literal["herding", "random", "ocs", "csrel", "bcsr", "sre2l"] = Field(
        "herding",
        description="of a class's samples: one by one towards the prototype (ours: Algorithm 2's weights say nothing "
        "of a new class); random: without looking; ocs, csrel, bcsr: by gradients, by the loss that they save, by "
        "learned weights (Figure 4's rivals); sre2l: images made of the model's batch normalisation, in samples' place",
    )
    ocs: OcsSettings = OcsSettings()
    csrel: CsrelSettings = CsrelSettings()
    bcsr: BcsrSettings = BcsrSettings()
    sre2l: Sre2lSettings = Sre2lSettings()
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
        for rule in ("ocs", "csrel", "bcsr", "sre2l"):
            if self.selection != rule and getattr(self, rule) != CoresetSettings.model_fields[rule].default:
                raise ValueError(f"{rule} needs selection: {rule}.")
        return self


class CoresetMemory:
    """Chooses the samples that a client stores of each class."""

    def __init__(self, settings: CoresetSettings, run: Run, method: str, networks: NetworkCache) -> None:
        self.settings = settings
        if find_kind(run.splits.shape) is TEXTS:
            raise UserError(f"methods.{method} mixes styles of images, these samples are texts. Use er or agem.")
        if settings.selection == "sre2l":
            require_running_statistics(networks.build(run.make_spec(1)), method)

    def add_task(self, client: Client, network: Network) -> Memory:
        """Return the client's memory with samples of its task, chosen on this network."""
        arriving = client.run.batches.read_raw(client.rows)
        old = unpack_samples(client.memory) or arriving.take(torch.arange(0))
        seen = dict(client.memory.get("seen", {}))
        places_of_old = {
            label: old.labels.cpu().eq(label).nonzero().flatten()
            for label in torch.cat([old.labels, arriving.labels]).unique().tolist()
        }
        arriving_of = {label: int(arriving.labels.eq(label).sum()) for label in places_of_old}
        stays = {
            label: places[self.retain(old.take(places), arriving_of[label])] for label, places in places_of_old.items()
        }
        room = {label: self.find_room(len(stays[label]), count) for label, count in arriving_of.items() if count}
        candidates = Candidates(client, network, arriving, old, stays, room, seen)
        chosen = self.choose(candidates) if room else {}
        none = arriving.take(torch.arange(0))
        stored = [self.merge(old.take(places), chosen.get(label, none)) for label, places in stays.items()]
        seen |= {str(label): seen.get(str(label), 0) + count for label, count in arriving_of.items()}
        return {**client.memory, **pack_samples(Batch.concatenate(stored)), "seen": seen}

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

    def find_room(self, stored: int, arriving: int) -> int:
        """Return how many of a class's new samples are chosen beside so many stored ones.

        As many as there is room for; without room, as many as are stored, whose style they change.
        """
        room = self.settings.budget - stored
        return min(arriving, room or stored * (self.settings.returning == "restyle"))

    def choose(self, candidates: Candidates) -> dict[int, Batch]:
        """Return the new samples of each class to store."""
        name = self.settings.selection
        if name == "sre2l":
            return recover_images(candidates, self.settings.sre2l)
        places = PLACES[name](candidates, getattr(self.settings, name, None))
        return {label: candidates.new.take(of_class) for label, of_class in places.items()}

    def merge(self, old: Batch, new: Batch) -> Batch:
        """Return the samples of a class to store: old and new ones, or old ones with the new ones' styles."""
        if len(old.labels) < self.settings.budget:
            return Batch.concatenate([old, new])
        if not len(new.labels):
            return old
        mixed = old.inputs.clone()
        mixed[: len(new.labels)] = mix_styles(old.inputs[: len(new.labels)], new.inputs, self.settings.mix)
        return Batch(mixed, old.labels, old.tasks)


def choose_at_random(candidates: Candidates, _: None) -> dict[int, Tensor]:
    """Return places of so many samples of each class as there is room for."""
    chosen = {}
    for label, room in candidates.room.items():
        places = candidates.find_places(label)
        random = candidates.client.make_generator("coreset")
        chosen[label] = places[torch.randperm(len(places), generator=random)[:room]]
    return chosen


def choose_by_herding(candidates: Candidates, _: None) -> dict[int, Tensor]:
    """Return the places of each class's samples whose mean feature, with the stored ones', nears the prototype."""
    client, network = candidates.client, candidates.network
    old_features, new_features = embed(client, network, candidates.old), embed(client, network, candidates.new)
    old_labels = candidates.old.labels.cpu()
    chosen = {}
    for label, room in candidates.room.items():
        places, stays = candidates.find_places(label), candidates.stays[label]
        of_new, of_old = new_features[places], old_features[old_labels.eq(label).nonzero().flatten()]
        prototype = running_mean(of_old, candidates.seen.get(str(label), 0), of_new)
        chosen[label] = places[select_by_herding(of_new, room, prototype, old_features[stays])]
    return chosen


# Rules by `selection` that choose among a client's samples.
PLACES: dict[str, Callable[[Candidates, Any], dict[int, Tensor]]] = {
    "herding": choose_by_herding,
    "random": choose_at_random,
    "ocs": choose_by_gradients,
    "csrel": choose_by_reducible_loss,
    "bcsr": choose_by_weights,
}


def embed(client: Client, network: Network, raw: Batch) -> Tensor:
    """Return the backbone's features [n, F] of samples that are prepared, not augmented."""
    return extract_in_parts(client, network.backbone, raw)


@torch.no_grad()
def extract_in_parts(client: Client, extract: Callable[[Tensor], Tensor], raw: Batch) -> Tensor:
    """Return any features [n, F] of such samples, on the CPU."""
    places, prepare = torch.arange(len(raw.labels)).split(EMBED), client.run.batches.prepare_inputs
    return torch.cat([extract(prepare(raw.take(part)).inputs) for part in places]).cpu()
