"""A backbone trained in one place, before any stream and on other data: what `model.weights` can start from.

AdamW over all samples under a rate that falls as half a cosine. What is left is a folder with weights.safetensors, in
which tensors have the backbone's own names, and card.json, which says on what they were trained.
"""

import json
import math
import os
import shutil
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from pydantic import Field, NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt, create_model
from safetensors.torch import save_file
from torch import Tensor

from fclmodels import state
from fclmodels.backbones.network import Network, build
from fclmodels.backbones.spec import ModelSpec
from fclmodels.data.augment import as_inputs, augment
from fclmodels.data.partitions.held_out import cut_test, units_of
from fclmodels.data.prepare import Prepared
from fclmodels.errors import UserError
from fclmodels.explain import describe, explain
from fclmodels.fingerprint import source_closure
from fclmodels.kinds import TEXTS, kind_of
from fclmodels.params import Check
from fclmodels.plugins import find
from fclmodels.randomness import ambient, generator, seed_of
from fclmodels.settings import (
    CHOICES,
    AugmentSettings,
    BackboneSettings,
    Params,
    Settings,
    SourceSettings,
    TrackingSettings,
    blocks_of,
)
from fclmodels.store import Store
from fclmodels.written import Written

FORMAT = 1
WEIGHTS, CARD = "weights.safetensors", "card.json"
NAMED = 40  # classes that a description names
Told = Callable[[str], None]


class AdamW(Settings):
    lr: PositiveFloat = Field(1e-3, le=1e30, description="AdamW's rate at the start; it falls to 0 as half a cosine")
    weight_decay: NonNegativeFloat = Field(0.05, le=1e6, description="weight decay")


class PretrainSettings(Settings):
    epochs: PositiveInt = Field(10, le=1_000_000, description="times over all training samples")
    batch_size: PositiveInt = Field(128, le=1_000_000, description="samples a step")
    test: float = Field(0.1, gt=0, lt=1, description="share of samples held out where the source has no official split")
    threads: PositiveInt = Field(1, le=256, description="torch threads; the last bits of the weights depend on them")
    seed: NonNegativeInt = Field(0, description="seed of all that is random in training")
    name: str | None = Field(
        None, pattern="^[A-Za-z0-9][A-Za-z0-9._-]*$", description="in MLflow's registry; null: backbone and source"
    )


class PretrainParams(Settings):
    """The whole of pretrain/params.yaml, with every default filled in."""

    data: SourceSettings
    model: BackboneSettings
    optimizer: AdamW
    augment: AugmentSettings
    pretrain: PretrainSettings
    tracking: TrackingSettings
    device: str

    @property
    def name(self) -> str:
        """Of the weights: what was trained, and on what."""
        return self.pretrain.name or f"{self.model.backbone}-{self.data.source}"


BLOCKS = blocks_of(PretrainParams)
OWN = ("optimizer", "pretrain")  # blocks that params.yaml has otherwise or not at all
_ALONE: dict[str, Any] = {"device": (Params.model_fields["device"].annotation, Params.model_fields["device"])}
_Alone = create_model("_Alone", __base__=Settings, **_ALONE)  # the settings outside of all blocks


class _PretrainCheck(Check):
    @cached_property
    def known(self) -> list[str]:
        shared = (row.path for row in explain() if row.path.partition(".")[0] in BLOCKS.keys() - set(OWN))
        own = (row.path for block in OWN for row in describe(BLOCKS[block], f"{block}."))
        return [*PretrainParams.model_fields, *shared, *own]


def load(path: str | Path, overrides: Sequence[str] = ()) -> PretrainParams:
    """The settings of a file after overrides `a.b=value`; one error lists all that is wrong, in file order."""
    written = Written(str(path))
    written.read_file(Path(path))
    for number, text in enumerate(overrides):
        written.override(number, text)
    check = _PretrainCheck(written)
    if "source" not in check.block(("data",)):
        check.refuse(("data", "source"), "data.source is not there. Name what to train on: fcl list sources.")
    outside = check.settings((), _Alone, {k: v for k, v in check.block(()).items() if k not in BLOCKS})
    blocks = {n: check.choice(n) if n in CHOICES else check.settings((n,), cls) for n, cls in BLOCKS.items()}
    check.done()
    return PretrainParams(**blocks, **dict(outside))


@dataclass(frozen=True)
class Samples:
    """Prepared samples that are trained on, or held out."""

    prepared: Prepared
    rows: np.ndarray
    device: torch.device

    def batches(self, order: Tensor, size: int) -> Iterator[tuple[Tensor, Tensor]]:
        """Samples as prepared and their labels, in this order of the rows."""
        labels = self.prepared.samples["label"].to_numpy()
        for part in order.split(size):
            rows = self.rows[part.numpy()]
            samples, of_rows = self.prepared.array[rows], labels[rows].astype(np.int64)
            yield torch.from_numpy(samples).to(self.device), torch.from_numpy(of_rows).to(self.device)

    def inputs(self, samples: Tensor) -> Tensor:
        return as_inputs(samples, self.prepared.meta.mean, self.prepared.meta.std)

    def __len__(self) -> int:
        return len(self.rows)


@dataclass(frozen=True)
class Trained:
    """A backbone's tensors by its own names, the mean loss of each epoch, accuracy on held-out samples."""

    weights: dict[str, Tensor]
    losses: list[float]
    accuracy: float
    train: int
    held_out: int


def train(params: PretrainParams, prepared: Prepared, device: torch.device, told: Told) -> Trained:
    """Train the backbone under a linear head over all classes."""
    trained_on, held_out = cut(prepared, params.pretrain, device)
    classes = tuple(range(len(prepared.meta.classes)))
    spec = ModelSpec(params.model.model_dump(mode="json"), prepared.meta.shape, "growing", (classes,))
    network = build(spec, generator(params.pretrain.seed, "init")).to(device)
    losses = []
    with ambient(params.pretrain.seed, "dropout", device=device):
        for epoch, loss in enumerate(epochs(network, trained_on, params), start=1):
            told(f"epoch {epoch} of {params.pretrain.epochs}: loss {loss:.3f}")
            if not math.isfinite(loss):
                raise UserError(f"optimizer.lr: the loss is {loss} in epoch {epoch}. Use a smaller rate.")
            losses.append(loss)
    # Each on its own: a state dict's tensors would hold on to the network.
    weights = {name: tensor.detach().cpu().clone() for name, tensor in network.backbone.state_dict().items()}
    return Trained(weights, losses, accuracy(network, held_out), len(trained_on), len(held_out))


def cut(prepared: Prepared, settings: PretrainSettings, device: torch.device) -> tuple[Samples, Samples]:
    """Train and held-out samples: the official split where there is one, else a share of each class."""
    if kind_of(prepared.meta.shape) is TEXTS:
        raise UserError(f"data.source: {prepared.meta.source} holds texts; this trains on images. Name another source.")
    table = prepared.samples
    held_out = (table["official"] == "test").fill_null(False).to_numpy().copy()
    free = np.flatnonzero(table["official"].is_null().to_numpy())
    units = units_of(table["group"].cast(int).fill_null(-1).to_numpy())
    random = np.random.default_rng(seed_of(settings.seed, "held out"))
    held_out[free] = cut_test(table["label"].to_numpy()[free], units[free], settings.test, random)
    if held_out.all() or not held_out.any():
        raise UserError(f"pretrain.test: {settings.test} of {len(table)} samples leaves none on one side.")
    trained_on = Samples(prepared, np.flatnonzero(~held_out), device)
    return trained_on, Samples(prepared, np.flatnonzero(held_out), device)


def epochs(network: Network, samples: Samples, params: PretrainParams) -> Iterator[float]:
    """Train; the mean loss over the samples, epoch by epoch."""
    chosen, lr = params.pretrain, params.optimizer.lr
    optimiser = torch.optim.AdamW(network.parameters(), lr, weight_decay=params.optimizer.weight_decay, fused=True)
    steps = chosen.epochs * math.ceil(len(samples) / chosen.batch_size)
    step = 0
    for epoch in range(chosen.epochs):
        network.train()
        order = torch.randperm(len(samples), generator=generator(chosen.seed, "batches", epoch))
        random = generator(chosen.seed, "augment", epoch, device=samples.device)
        total = torch.zeros((), device=samples.device)
        for raw, labels in samples.batches(order, chosen.batch_size):
            for group in optimiser.param_groups:
                group["lr"] = lr * half_cosine(step / steps)
            loss = F.cross_entropy(network(samples.inputs(augment(raw, params.augment, random))), labels)
            optimiser.zero_grad()
            loss.backward()
            optimiser.step()
            total += loss.detach() * len(labels)
            step += 1
        yield float(total) / len(samples)


def half_cosine(done: float) -> float:
    """From 1 at the start to 0 at the end."""
    return (1 + math.cos(math.pi * done)) / 2


@torch.inference_mode()
def accuracy(network: Network, samples: Samples) -> float:
    network.eval()
    batches = samples.batches(torch.arange(len(samples)), 1024)
    right = sum(int((network(samples.inputs(raw)).argmax(1) == labels).sum()) for raw, labels in batches)
    return right / len(samples)


class Pretraining:
    """One training; `key` is a digest of all that its weights depend on, under which the store remembers them."""

    def __init__(
        self, params: PretrainParams, prepared: Prepared, store: Store, device: torch.device, told: Told
    ) -> None:
        self.params = params
        self.prepared = prepared
        self.store = store
        self.device = device
        self.told = told
        backbone = find("backbone", params.model.backbone)
        settings = {n: getattr(params, n).model_dump(mode="json") for n in ("model", "optimizer", "augment")}
        depends_on = {
            **settings,
            "pretrain": params.pretrain.model_dump(mode="json", exclude={"name"}),
            "backbone": backbone(params.model).depends_on(),
            "data": prepared.meta.digest,
            "device": device.type,
            "torch": torch.__version__,
            "code": source_closure(__name__, backbone.__module__),
        }
        self.key = state.digest(depends_on)

    def done(self) -> dict[str, Any] | None:
        """What came of it, where the store holds that and the weights."""
        return self.store.recall(self.key)

    def run(self) -> dict[str, Any]:
        """Train, and record what came of it."""
        started = time.perf_counter()
        trained = train(self.params, self.prepared, self.device, self.told)
        outcome = {
            "objects": {"weights": self.store.put(trained.weights)},
            "losses": trained.losses,
            "accuracy": trained.accuracy,
            "samples": {"train": trained.train, "held_out": trained.held_out},
            "seconds": time.perf_counter() - started,
        }
        self.store.record(self.key, outcome)
        return outcome

    def publish(self, folder: Path, outcome: dict[str, Any]) -> dict[str, Any]:
        """Write the whole folder beside its place, then put it there; returns the card."""
        refuse_foreign(folder)
        card, folder = self.card(outcome), folder.resolve()
        partial, old = (folder.with_name(f".{folder.name}.{step}") for step in ("partial", "old"))
        for leftover in (partial, old):
            shutil.rmtree(leftover, ignore_errors=True)
        partial.mkdir(parents=True)
        try:
            weights = self.store.get(outcome["objects"]["weights"])
            save_file(weights, partial / WEIGHTS, {"description": card["description"]})
            state.write_json(partial / CARD, card)
            if folder.exists():
                os.replace(folder, old)
            os.replace(partial, folder)
        finally:
            shutil.rmtree(partial, ignore_errors=True)
        shutil.rmtree(old, ignore_errors=True)
        return card

    def card(self, outcome: dict[str, Any]) -> dict[str, Any]:
        """What the weights are and on what they were trained, as card.json says it."""
        meta, params = self.prepared.meta, self.params
        settings = params.model_dump(mode="json", serialize_as_any=True, exclude={"tracking", "device"})
        card = {
            "format": FORMAT,
            "name": params.name,
            "description": self._description(outcome["samples"]["train"]),
            "backbone": params.model.backbone,
            "source": meta.source,
            "classes": meta.classes,
            "samples": outcome["samples"],
            "shape": meta.shape,
            "mean": meta.mean,
            "std": meta.std,
            "settings": settings,
            "accuracy": outcome["accuracy"],
            "seconds": outcome["seconds"],
            "digests": {"weights": outcome["objects"]["weights"], "prepared": meta.digest, "training": self.key},
        }
        return json.loads(json.dumps(card))

    def _description(self, count: int) -> str:
        """One line, so that nobody takes these weights for others."""
        meta, begun_from = self.prepared.meta, self.params.model.weights
        folder = getattr(self.params.data, "folder", None)  # of the user's own images
        data = meta.source if folder is None else f"{meta.source} {self.params.data.root / folder}"
        names = [*meta.classes[:NAMED], *["..."] * (len(meta.classes) > NAMED)]
        history = (
            "from random weights and on nothing else: these are not the ImageNet weights of that name"
            if begun_from is None
            else f"from the weights in {begun_from} on, and so on what those had seen"
        )
        images = f"{count} images of {' x '.join(map(str, meta.shape))} in {len(meta.classes)} classes"
        return f"{self.params.model.backbone} pretrained on {data}, {images} ({', '.join(names)}), {history}."


def refuse_foreign(folder: Path) -> None:
    """Pretrained weights take the place of older ones, never of anything else. Asked before any work."""
    if folder.is_dir() and any(folder.iterdir()) and not (folder / CARD).is_file():
        raise UserError(
            f"{folder} holds something else than pretrained weights. Name another folder, or empty this one."
        )
    there = next(parent for parent in [folder, *folder.absolute().parents] if parent.exists())
    if not there.is_dir() or not os.access(there, os.W_OK):
        raise UserError(f"{folder}: {there} is not a folder that can be written to. Name another.")
