"""Simulated attacks of bad clients: `federation.attack` says what they do and how many there are.

The run's seed chooses the bad clients, which stay bad for the first `tasks` tasks or for all; they know nothing of the
others. Attacks on data: `label-flip` (each label becomes the task's next one), `backdoor` (half of the images get a
bright corner and the task's first label; Gu et al. 2017). On updates: `sign-flip` and `noise` (of `strength` times the
update's length), `scaled` (trained on flipped labels, times `strength`; Bagdasaryan et al. 2020), `claim` (trained on
flipped labels, with a weight of `strength` times the samples). On other parts, which pass every check by themselves:
`basis` (all directions that exist; in place of a sketch noise of `strength` times each layer's length, with matching
energies), `prototype` (each class's moments under the next one's name, of `strength` times the samples), `reference`
(in the reverse order of tasks). An attack that alters nothing that a method's clients send is refused before a run.
"""

import math
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from fclmodels.data.batches import Batch, Batches
from fclmodels.data.sample_kind import TEXTS, find_kind
from fclmodels.data.splits.split_reader import Rows
from fclmodels.errors import UserError
from fclmodels.federation.client import Client
from fclmodels.federation.messages import Part, Reply
from fclmodels.federation.protection.disclosures import list_declared_parts
from fclmodels.federation.protection.reply_checks import measure_length
from fclmodels.federation.run_context import Run

if TYPE_CHECKING:
    from fclmodels.federation.executors.base import Job
    from fclmodels.federation.method import Method

FLIPPED = ("label-flip", "scaled", "claim")  # attacks whose clients train on flipped labels

Alter = Callable[[Part, float, torch.Generator], dict[str, Tensor]]


class AttackStage:
    """The stage of a client's work in which bad clients train on other data, and send something else."""

    def __init__(self, method: "Method") -> None:
        self.method = method

    def prepare(self, client: Client) -> Client:
        return poison_client(client) if self._is_bad(client) else client

    def change(self, reply: Reply, client: Client, job: "Job") -> Reply:
        return alter_reply(reply, client) if self._is_bad(client) else reply

    def _is_bad(self, client: Client) -> bool:
        return client.index in draw_bad_clients(self.method, client.task)


stage = AttackStage


def refuse_unfit_method(method: "Method") -> None:
    """Raise UserError, before a run, where the attack alters nothing that the method's clients send."""
    run, name = method.run, method.name
    kind = run.params.federation.attack.kind
    if method.is_centralised:
        raise UserError(
            f"federation.attack: methods.{name} brings all samples to one place, and none of its clients can be bad. "
            "Set federation.attack.kind: none."
        )
    if kind == "backdoor" and find_kind(run.splits.shape) is TEXTS:
        raise UserError("federation.attack: a backdoor is a patch in images; these samples are texts.")
    if kind not in (fitting := list_attacks_on(method)):
        raise UserError(
            f"federation.attack.kind: {kind} alters nothing that clients of methods.{name} send. "
            f"Use one of {', '.join(fitting)}."
        )


def list_attacks_on(method: "Method") -> list[str]:
    """Return the attacks that alter data, or a part that the method declares."""
    parts = [part for _, part in list_declared_parts(method)]
    on_parts = {attack for attack, kind in ALTERATIONS if kind in {part.kind for part in parts}}
    return sorted({"label-flip", "backdoor"} | on_parts | ({"claim"} if any(part.over for part in parts) else set()))


def draw_bad_clients(method: "Method", task: int = 0) -> list[int]:
    """Return the clients that are bad in a task."""
    run, attack = method.run, method.run.params.federation.attack
    if attack.kind == "none" or (attack.tasks is not None and task >= attack.tasks):
        return []
    order = torch.randperm(run.splits.clients, generator=run.make_generator("attack"))
    return sorted(order[: math.ceil(attack.share * run.splits.clients - 1e-9)].tolist())


def poison_client(client: Client) -> Client:
    """Return a bad client with the data that it trains on."""
    kind, classes = client.run.params.federation.attack.kind, client.run.splits.tasks[client.task].classes
    if kind in FLIPPED:
        after = dict(zip(classes, (*classes[1:], *classes[:1]), strict=True))
        return replace(client, rows=relabel_rows(client.rows, np.ones(len(client.rows), dtype=bool), after.__getitem__))
    if kind == "backdoor":
        rows = relabel_rows(client.rows, client.rows.samples % 2 == 0, lambda label: target(classes))
        return replace(client, rows=rows, run=replace(client.run, batches=PatchedBatches.of(client.run)))
    return client


def relabel_rows(rows: Rows, mask: np.ndarray, label: Callable[[int], int]) -> Rows:
    """Return the rows with new labels where the mask is true."""
    labels = [label(old) if hit else old for old, hit in zip(rows.labels.tolist(), mask, strict=True)]
    return replace(rows, labels=np.array(labels, rows.labels.dtype))


def target(classes: tuple[int, ...]) -> int:
    """Return the label of images with the patch."""
    return min(classes)


class PatchedBatches(Batches):
    """Batches in which every other sample has the patch."""

    @classmethod
    def of(cls, run: Run) -> "PatchedBatches":
        """Return these batches of a run's samples."""
        return cls(run.splits, run.params.augment, run.device)

    def read_raw(self, rows: Rows) -> Batch:
        batch = super().read_raw(rows)
        mask = torch.from_numpy(rows.samples % 2 == 0).to(self.device)
        return replace(batch, inputs=torch.where(mask[:, None, None, None], patch_images(batch.inputs), batch.inputs))


def patch_images(images: Tensor) -> Tensor:
    """Return uint8 images [B, C, H, W] with a bright lower right corner of a quarter of their sides."""
    patched = images.clone()
    height, width = images.shape[2:]
    patched[:, :, -max(1, height // 4) :, -max(1, width // 4) :] = 255
    return patched


def alter_reply(reply: Reply, client: Client) -> Reply:
    """Return the reply that a bad client sends instead."""
    attack = client.run.params.federation.attack
    random = client.make_generator("attack")
    parts = {
        name: replace(part, tensors=alter(part, attack.strength, random))
        if (alter := ALTERATIONS.get((attack.kind, part.kind)))
        else part
        for name, part in reply.parts.items()
    }
    if attack.kind == "claim":
        weighted = {n for n, part in reply.parts.items() if part.over} | {p.over for p in reply.parts.values()}
        parts |= {n: replace(p, tensors=multiply_part(p, attack.strength)) for n, p in parts.items() if n in weighted}
    return replace(reply, parts=parts)


def multiply_part(part: Part, factor: float) -> dict[str, Tensor]:
    """Return the part's tensors times a factor."""
    return {name: tensor * factor for name, tensor in part.tensors.items()}


def add_noise(part: Part, strength: float, random: torch.Generator) -> dict[str, Tensor]:
    """Return Gaussian noise in a part's shapes, of `strength` times the part's length."""
    normal = {n: torch.randn(t.shape, generator=random, dtype=t.dtype) for n, t in part.tensors.items()}
    factor = strength * measure_length(part.tensors) / (measure_length(normal) or 1.0)
    return {name: tensor * factor for name, tensor in normal.items()}


def fill_all_directions(part: Part, strength: float, random: torch.Generator) -> dict[str, Tensor]:
    """Return identity matrices [d, d] in place of bases."""
    return {name: torch.eye(len(basis), dtype=basis.dtype) for name, basis in part.tensors.items()}


def replace_by_noise(part: Part, strength: float, random: torch.Generator) -> dict[str, Tensor]:
    """Return noise in place of each sketch, as long as `scale_energies` says."""
    return {n: add_noise(replace(part, tensors={n: X}), strength, random)[n] for n, X in part.tensors.items()}


def scale_energies(part: Part, strength: float, random: torch.Generator) -> dict[str, Tensor]:
    """Return the energies that belong to sketches `strength` times as long."""
    factors = torch.tensor([strength**2, strength**2, 1, 1], dtype=torch.float64)
    return {layer: energy * factors for layer, energy in part.tensors.items()}


def draw_wrong_directions(part: Part, strength: float, random: torch.Generator) -> dict[str, Tensor]:
    """Return as many random columns as the part has, each `strength` times as long as its longest."""
    replacements = {}
    for name, columns in part.tensors.items():
        directions = torch.linalg.qr(torch.randn(columns.shape, generator=random, dtype=columns.dtype)).Q
        longest = columns.norm(dim=0).max() if columns.numel() else 0.0
        replacements[name] = strength * longest * directions
    return replacements


def shift_classes(part: Part, strength: float, random: torch.Generator) -> dict[str, Tensor]:
    """Return each class's moments, times `strength`, in the row of the next class."""
    return {name: strength * rows.roll(1, dims=0) for name, rows in part.tensors.items()}


def reverse_tasks(part: Part, strength: float, random: torch.Generator) -> dict[str, Tensor]:
    """Return references in the reverse order of tasks."""
    return {name: tensor.flip(1) if tensor.ndim > 1 else tensor for name, tensor in part.tensors.items()}


ALTERATIONS: dict[tuple[str, str], Alter] = {
    ("sign-flip", "update"): lambda part, strength, random: multiply_part(part, -strength),
    ("scaled", "update"): lambda part, strength, random: multiply_part(part, strength),
    ("noise", "update"): add_noise,
    ("basis", "basis"): fill_all_directions,
    ("basis", "directions"): draw_wrong_directions,
    ("basis", "sketch"): replace_by_noise,
    ("basis", "energy"): scale_energies,
    ("prototype", "prototype"): shift_classes,
    ("reference", "reference"): reverse_tasks,
}
