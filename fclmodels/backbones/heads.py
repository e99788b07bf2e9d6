"""Classification heads: one that grows with the labels, or one for each task.

Each row is drawn by itself, from the seed, its head and its label. So a head that grew task by task
equals, to the bit, one that was built for all of them.
"""

import itertools

import torch
from torch import Tensor, nn

from fclmodels.backbones.spec import ModelSpec, task_columns
from fclmodels.randomness import generator as keyed


class Heads(nn.ModuleList):
    """The linear layers from features [B, F] to logits, as their spec lays them out."""

    def __init__(self, spec: ModelSpec, features: int, seed: int) -> None:
        super().__init__()
        self.spec = spec
        for head, labels in enumerate(spec.head_labels):
            linear = nn.utils.skip_init(nn.Linear, features, len(labels))
            linear.load_state_dict(draw_rows(seed, head, labels, features))
            self.append(linear)


class GrowingHead(Heads):
    """One linear layer; its rows are the labels in order."""

    def forward(self, features: Tensor, task: int | None = None) -> Tensor:
        logits: Tensor = self[0](features)
        if task is None:
            return logits
        return logits.index_select(1, task_columns(self.spec, task, logits.device))


class TaskHeads(Heads):
    """One linear layer a task. Over all classes, a label of several tasks has the highest of their logits."""

    def forward(self, features: Tensor, task: int | None = None) -> Tensor:
        if task is not None:
            logits: Tensor = self[task](features)
            return logits
        each = torch.cat([head(features) for head in self], dim=1)
        labels = torch.tensor(list(itertools.chain(*self.spec.tasks)), device=each.device)
        lowest = each.new_full((len(each), self.spec.seen), -torch.inf)
        return lowest.scatter_reduce(1, labels.expand_as(each), each, "amax")


HEADS = {"growing": GrowingHead, "per-task": TaskHeads}


def draw_rows(seed: int, head: int, labels: tuple[int, ...], features: int) -> dict[str, Tensor]:
    """Initial rows of these labels in one head, uniform in +- 1/sqrt(F) as torch's linear layers have them."""
    bound = features**-0.5
    drawn = torch.empty(len(labels), features + 1)
    for row, label in zip(drawn, labels, strict=True):
        row.uniform_(-bound, bound, generator=keyed(seed, "head", head, label))
    return {"weight": drawn[:, :-1].contiguous(), "bias": drawn[:, -1].contiguous()}


def grow(weights: dict[str, Tensor], old: ModelSpec, new: ModelSpec, generator: torch.Generator) -> dict[str, Tensor]:
    """The weights of a network of `old` with the rows and heads that `new` has more; the rest is the same tensors.

    Only the generator's seed is used: with the seed that the network was built from, the result is
    what `build` would have drawn for `new`.
    """
    if (old.settings, old.shape, old.head, old.adapter) != (new.settings, new.shape, new.head, new.adapter):
        raise ValueError("a network grows by tasks only: settings, shape, kind of head and adapter must stay")
    if new.tasks[: len(old.tasks)] != old.tasks:
        raise ValueError("the new spec does not go on from the old one's tasks")
    grown = dict(weights)
    features = weights["heads.0.weight"].shape[1]
    for head, labels in enumerate(new.head_labels):
        known = len(old.head_labels[head]) if head < len(old.head_labels) else 0
        if known == len(labels):
            continue
        for part, fresh in draw_rows(generator.initial_seed(), head, labels[known:], features).items():
            name = f"heads.{head}.{part}"
            fresh = fresh.to(weights[f"heads.0.{part}"])
            grown[name] = torch.cat([weights[name], fresh]) if known else fresh
    return grown


def shrink(weights: dict[str, Tensor], spec: ModelSpec) -> dict[str, Tensor]:
    """The inverse of grow: the weights of a network of `spec`, which covers the first of the tasks that these do."""
    rows = {f"heads.{head}": len(labels) for head, labels in enumerate(spec.head_labels)}
    owner = {name: name.rpartition(".")[0] for name in weights}
    return {
        name: w[: rows[owner[name]]] if owner[name] in rows else w
        for name, w in weights.items()
        if owner[name] in rows or not name.startswith("heads.")
    }
