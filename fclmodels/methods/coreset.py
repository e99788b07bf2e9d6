"""STAMP's prototypical coreset (section 3.2, Algorithm 2): a few samples of each class, which each client keeps itself.

memory: `samples` as in episodic.py, at most `budget` of each class; `seen` {label: how many of the class the client
has had}; `prototypes` {labels [L], means [L, F]}, the classes' mean embeddings on the last model that was looked at.

A task's samples are chosen once, when it has ended, on the final global model, by every client that had the task. A
class that comes again when its budget is full lends its style to what is stored (eq. 6): content and task of a stored
sample stay, so that no memory grows.
"""

from typing import Literal

import torch
from pydantic import Field, PositiveInt
from torch import Tensor

from fclmodels.backbones.network import Network
from fclmodels.data.batches import Batch
from fclmodels.errors import UserError
from fclmodels.federation.client import Client
from fclmodels.federation.cohort import Cohort
from fclmodels.federation.messages import Payload, Reply
from fclmodels.federation.server import Server
from fclmodels.kinds import TEXTS, kind_of
from fclmodels.methods.aligned import Aligned
from fclmodels.methods.base import Memory
from fclmodels.methods.episodic import keeping, stored
from fclmodels.numerics.coreset import herded, mix_styles, relaxed, running_mean

CHOOSING = {"herding": herded, "relaxed": relaxed}
EMBED = 256  # samples that pass the network at once


class Coreset(Aligned):
    class Settings(Aligned.Settings):
        budget: PositiveInt = Field(20, le=100_000, description="samples of each class that a client keeps")
        selection: Literal["herding", "relaxed", "random"] = Field(
            "herding",
            description="of a class's samples: one by one towards the prototype; relaxed: by weights (Algorithm 2); "
            "random: without looking",
        )
        mix: float = Field(
            0.5, ge=0, le=1, description="share of its own style that a stored sample keeps where its class comes again"
        )

    settings: Settings

    def setup(self) -> Server:
        if kind_of(self.run.splits.shape) is TEXTS:
            raise UserError(f"methods.{self.name} mixes styles of images, these samples are texts. Use er or agem.")
        return super().setup()

    def finish_task(self, server: Server, cohort: Cohort) -> Server:
        cohort.ask("coreset", self.payload(server))
        return server

    def answer(self, client: Client, question: str, payload: Payload) -> tuple[Reply, Memory]:
        """The memory after the task's samples have come in; the answer itself is empty."""
        weights = self.whole(client, payload)
        network = self.networks.load(self.run.spec(client.task + 1), weights).eval()
        arriving = client.run.batches.raw(client.rows)
        old = stored(client.memory) or arriving.take(torch.arange(0))
        features = {"new": self.embedded(client, network, arriving), "old": self.embedded(client, network, old)}
        seen = dict(client.memory.get("seen", {}))
        kept, means = [], {}
        for label in torch.cat([old.labels, arriving.labels]).unique().tolist():
            mine, theirs = (batch.labels.cpu().eq(label).nonzero().flatten() for batch in (old, arriving))
            held, new = features["old"][mine], features["new"][theirs]
            target = running_mean(held, seen.get(str(label), 0), new)
            chosen = self.chosen(client, new, target, held)
            kept.append(self.merged(old.take(mine), arriving.take(theirs[chosen])))
            means[label] = target.float()
            seen[str(label)] = seen.get(str(label), 0) + len(new)
        prototypes = {
            "labels": torch.tensor(list(means), dtype=torch.int32),
            "means": torch.stack(list(means.values())),
        }
        memory = {**client.memory, **keeping(Batch.concatenate(kept)), "seen": seen, "prototypes": prototypes}
        return Reply({}), memory

    @torch.no_grad()
    def embedded(self, client: Client, network: Network, raw: Batch) -> Tensor:
        """The backbone's features [n, F] of samples as they are prepared, not augmented."""
        ready = client.run.batches.ready(raw).inputs
        return torch.cat([network.backbone(part) for part in ready.split(EMBED)]).cpu()

    def chosen(self, client: Client, new: Tensor, target: Tensor, held: Tensor) -> Tensor:
        """Which of a class's new samples are taken: as many as are free, or as can be mixed into what is stored."""
        free = self.settings.budget - len(held)
        count = min(len(new), free or len(held))
        if not count:
            return torch.arange(0)
        if self.settings.selection == "random":
            return torch.randperm(len(new), generator=client.generator("coreset"))[:count]
        return CHOOSING[self.settings.selection](new, count, target, held)

    def merged(self, old: Batch, new: Batch) -> Batch:
        """What is stored of a class, where its samples and some that were chosen of the new ones meet."""
        if len(old.labels) < self.settings.budget:
            return Batch.concatenate([old, new])
        if not len(new.labels):
            return old
        mixed = old.inputs.clone()
        mixed[: len(new.labels)] = mix_styles(old.inputs[: len(new.labels)], new.inputs, self.settings.mix)
        return Batch(mixed, old.labels, old.tasks)
