"""Classification heads: one that grows with the labels, or one for each task.

Each row is drawn by itself, from the seed, its head and its label. So a head that grew task by task equals, to the
bit, one that was built for all tasks.
"""

import itertools

import torch
from torch import Tensor, nn

from fclmodels.backbones.model.spec import ModelSpec, get_task_columns
from fclmodels.randomness import make_generator as keyed


class Heads(nn.ModuleList):
    """The linear layers of a spec from features [B, F] to logits."""

    def __init__(self, spec: ModelSpec, features: int, seed: int) -> None:
        super().__init__()
        self.spec = spec
        for head, labels in enumerate(spec.head_labels):
            linear = nn.Linear(features, len(labels), device="meta")  # not drawn twice
            linear.load_state_dict(draw_rows(seed, head, labels, features), assign=True)
            self.append(linear)


class GrowingHead(Heads):
    """One linear layer; its rows are the labels in order."""

    def forward(self, features: Tensor, task: int | None = None) -> Tensor:
        logits: Tensor = self[0](features)
        if task is None:
            return logits
        return logits.index_select(1, get_task_columns(self.spec, task, logits.device))


class TaskHeads(Heads):
    """One linear layer a task. Without a task, a label of several tasks has the highest of its logits."""

    def forward(self, features: Tensor, task: int | None = None) -> Tensor:
        if task is not None:
            logits: Tensor = self[task](features)
            return logits
        by_head = torch.cat([head(features) for head in self], dim=1)
        labels = torch.tensor(list(itertools.chain(*self.spec.tasks)), device=by_head.device)
        lowest = by_head.new_full((len(by_head), self.spec.label_count), -torch.inf)
        return lowest.scatter_reduce(1, labels.expand_as(by_head), by_head, "amax")


HEADS = {"growing": GrowingHead, "per-task": TaskHeads}


def draw_rows(seed: int, head: int, labels: tuple[int, ...], features: int) -> dict[str, Tensor]:
    """Draw the rows of these labels in one head, uniform in +- 1/sqrt(F) like those of torch's linear layers."""
    bound = features**-0.5
    rows = torch.empty(len(labels), features + 1)
    for row, label in zip(rows, labels, strict=True):
        row.uniform_(-bound, bound, generator=keyed(seed, "head", head, label))
    bias = rows[:, -1].clone(memory_format=torch.contiguous_format)  # of a single row too, whose stride counts nowhere
    return {"weight": rows[:, :-1].contiguous(), "bias": bias}


def grow_heads(
    weights: dict[str, Tensor], old: ModelSpec, new: ModelSpec, generator: torch.Generator
) -> dict[str, Tensor]:
    """Add the rows and heads of `new` to the weights of a network of `old`; other tensors stay the same objects.

    Only the generator's seed is used: with that of the network, the rows are those of `build_network(new)`.
    """
    if (old.settings, old.shape, old.head, old.adapter) != (new.settings, new.shape, new.head, new.adapter):
        raise ValueError("a network grows by tasks only: settings, shape, kind of head and adapter must stay")
    if new.tasks[: len(old.tasks)] != old.tasks:
        raise ValueError("the new spec does not go on from the old one's tasks")
    grown = dict(weights)
    features = weights["heads.0.weight"].shape[1]
    for head, labels in enumerate(new.head_labels):
        old_count = len(old.head_labels[head]) if head < len(old.head_labels) else 0
        if old_count == len(labels):
            continue
        for part, fresh in draw_rows(generator.initial_seed(), head, labels[old_count:], features).items():
            name = f"heads.{head}.{part}"
            fresh = fresh.to(weights[f"heads.0.{part}"])
            grown[name] = torch.cat([weights[name], fresh]) if old_count else fresh
    return grown


def shrink_heads(weights: dict[str, Tensor], spec: ModelSpec) -> dict[str, Tensor]:
    """Undo grow_heads: return the weights of a network of `spec`, which covers the first tasks of these."""
    rows = {f"heads.{head}": len(labels) for head, labels in enumerate(spec.head_labels)}
    owner = {name: name.rpartition(".")[0] for name in weights}
    return {
        name: w[: rows[owner[name]]] if owner[name] in rows else w
        for name, w in weights.items()
        if owner[name] in rows or not name.startswith("heads.")
    }
