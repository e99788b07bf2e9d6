"""Bad clients, for studies of what they can do: `federation.attack` says what they do and how many there are.

Who is bad is drawn from the run's seed and stays so, for the first `tasks` or for all; they know nothing of the others.
Of their data: `label-flip` (each label becomes the task's next one), `backdoor` (half of the images get a bright corner
and the task's first label; Gu et al. 2017). Of updates: `sign-flip` and `noise` (of `strength` times the update's
length), `scaled` (of flipped labels, times `strength`; Bagdasaryan et al. 2020), `claim` (of flipped labels, said to be
of `strength` times the samples). Of knowledge, all of it such as passes every check by itself: `basis` (all directions
there are; for a sketch noise of `strength` times each layer's length, with energies to match), `prototype` (each
class's moments under the next one's name, of `strength` times the samples), `reference` (in the order of the tasks
turned round). What alters nothing that a method's clients send is refused before a run.
"""

import math
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from fclmodels.data.batches import Batch, Batches
from fclmodels.data.splits import Rows
from fclmodels.errors import UserError
from fclmodels.federation.client import Client
from fclmodels.federation.messages import Part, Reply
from fclmodels.federation.run import Run
from fclmodels.federation.soundness import length
from fclmodels.kinds import TEXTS, kind_of

if TYPE_CHECKING:
    from fclmodels.methods.base import Method

FLIPPED = ("label-flip", "scaled", "claim")  # what they train on has the next label

Alter = Callable[[Part, float, torch.Generator], dict[str, Tensor]]


def refuse_what_alters_nothing(method: "Method") -> None:
    """Before a run: an attack on what the method's clients do not send."""
    run, name = method.run, method.name
    kind = run.params.federation.attack.kind
    if kind == "none":
        return
    if method.pooled_bytes is not None:
        raise UserError(
            f"federation.attack: methods.{name} brings all samples to one place, and none of its clients can be bad. "
            "Set federation.attack.kind: none."
        )
    if kind == "backdoor" and kind_of(run.splits.shape) is TEXTS:
        raise UserError("federation.attack: a backdoor is a patch in images; these samples are texts.")
    if kind not in (fitting := attacks_on(method)):
        raise UserError(
            f"federation.attack.kind: {kind} alters nothing that clients of methods.{name} send. "
            f"Use one of {', '.join(fitting)}."
        )


def attacks_on(method: "Method") -> list[str]:
    """Those that alter data, or a part of what the method declares to be sent in some task."""
    last = len(method.run.splits.tasks) - 1
    sent = method.sends(last, method.run.rounds(last) - 1).values()
    parts = [part for of_question in sent for part in of_question.values()]
    on_parts = {attack for attack, kind in ALTERATIONS if kind in {part.kind for part in parts}}
    return sorted({"label-flip", "backdoor"} | on_parts | ({"claim"} if any(part.over for part in parts) else set()))


def bad_clients(method: "Method", task: int = 0) -> list[int]:
    run, attack = method.run, method.run.params.federation.attack
    if attack.kind == "none" or (attack.tasks is not None and task >= attack.tasks):
        return []
    order = torch.randperm(run.splits.clients, generator=run.generator("attack"))
    return sorted(order[: math.ceil(attack.share * run.splits.clients - 1e-9)].tolist())


def poisoned(client: Client) -> Client:
    """A bad client with the data that it trains on."""
    kind, classes = client.run.params.federation.attack.kind, client.run.splits.tasks[client.task].classes
    if kind in FLIPPED:
        after = dict(zip(classes, (*classes[1:], *classes[:1]), strict=True))
        return replace(client, rows=relabelled(client.rows, np.ones(len(client.rows), dtype=bool), after.__getitem__))
    if kind == "backdoor":
        rows = relabelled(client.rows, client.rows.samples % 2 == 0, lambda label: target(classes))
        return replace(client, rows=rows, run=replace(client.run, batches=Patched.of(client.run)))
    return client


def relabelled(rows: Rows, chosen: np.ndarray, label: Callable[[int], int]) -> Rows:
    labels = [label(old) if hit else old for old, hit in zip(rows.labels.tolist(), chosen, strict=True)]
    return replace(rows, labels=np.array(labels, rows.labels.dtype))


def target(classes: tuple[int, ...]) -> int:
    """What a patched image is to be taken for."""
    return min(classes)


class Patched(Batches):
    """Every other sample has the patch."""

    @classmethod
    def of(cls, run: Run) -> "Patched":
        return cls(run.splits, run.params.augment, run.device)

    def raw(self, rows: Rows) -> Batch:
        batch = super().raw(rows)
        chosen = torch.from_numpy(rows.samples % 2 == 0).to(self.device)
        return replace(batch, inputs=torch.where(chosen[:, None, None, None], patched(batch.inputs), batch.inputs))


def patched(images: Tensor) -> Tensor:
    """uint8 images [B, C, H, W] with a bright lower right corner of a quarter of their sides."""
    patched = images.clone()
    height, width = images.shape[2:]
    patched[:, :, -max(1, height // 4) :, -max(1, width // 4) :] = 255
    return patched


def altered(reply: Reply, client: Client) -> Reply:
    """What a bad client sends in the place of a reply."""
    attack = client.run.params.federation.attack
    random = client.generator("attack")
    parts = {
        name: replace(part, tensors=alter(part, attack.strength, random))
        if (alter := ALTERATIONS.get((attack.kind, part.kind)))
        else part
        for name, part in reply.parts.items()
    }
    if attack.kind == "claim":
        weighted = {n for n, part in reply.parts.items() if part.over} | {p.over for p in reply.parts.values()}
        parts |= {n: replace(p, tensors=times(p, attack.strength)) for n, p in parts.items() if n in weighted}
    return replace(reply, parts=parts)


def times(part: Part, factor: float) -> dict[str, Tensor]:
    return {name: tensor * factor for name, tensor in part.tensors.items()}


def noise(part: Part, strength: float, random: torch.Generator) -> dict[str, Tensor]:
    """Gaussian, of so many times the part's length."""
    drawn = {n: torch.randn(t.shape, generator=random, dtype=t.dtype) for n, t in part.tensors.items()}
    factor = strength * length(part.tensors) / (length(drawn) or 1.0)
    return {name: tensor * factor for name, tensor in drawn.items()}


def all_directions(part: Part, strength: float, random: torch.Generator) -> dict[str, Tensor]:
    return {name: torch.eye(len(basis), dtype=basis.dtype) for name, basis in part.tensors.items()}


def noisy_layers(part: Part, strength: float, random: torch.Generator) -> dict[str, Tensor]:
    """Each tensor's own noise, as long as its energy says it is."""
    return {n: noise(replace(part, tensors={n: X}), strength, random)[n] for n, X in part.tensors.items()}


def of_more_energy(part: Part, strength: float, random: torch.Generator) -> dict[str, Tensor]:
    """What goes with sketches that are `strength` times as long."""
    factors = torch.tensor([strength**2, strength**2, 1, 1], dtype=torch.float64)
    return {layer: energy * factors for layer, energy in part.tensors.items()}


def wrong_directions(part: Part, strength: float, random: torch.Generator) -> dict[str, Tensor]:
    """As many columns as there were, at random, each so many times as long as the longest."""
    found = {}
    for name, columns in part.tensors.items():
        drawn = torch.linalg.qr(torch.randn(columns.shape, generator=random, dtype=columns.dtype)).Q
        longest = columns.norm(dim=0).max() if columns.numel() else 0.0
        found[name] = strength * longest * drawn
    return found


def next_classes(part: Part, strength: float, random: torch.Generator) -> dict[str, Tensor]:
    return {name: strength * rows.roll(1, dims=0) for name, rows in part.tensors.items()}


def turned_round(part: Part, strength: float, random: torch.Generator) -> dict[str, Tensor]:
    return {name: tensor.flip(1) if tensor.ndim > 1 else tensor for name, tensor in part.tensors.items()}


ALTERATIONS: dict[tuple[str, str], Alter] = {
    ("sign-flip", "update"): lambda part, strength, random: times(part, -strength),
    ("scaled", "update"): lambda part, strength, random: times(part, strength),
    ("noise", "update"): noise,
    ("basis", "basis"): all_directions,
    ("basis", "directions"): wrong_directions,
    ("basis", "sketch"): noisy_layers,
    ("basis", "energy"): of_more_energy,
    ("prototype", "prototype"): next_classes,
    ("reference", "reference"): turned_round,
}
