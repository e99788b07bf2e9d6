"""Training of a backbone in one place, before any stream and on other data: `model.weights` can start from it.

AdamW over all samples under a rate that falls as half a cosine. It leaves a folder with weights.safetensors, in which
tensors have the backbone's own names, and card.json, which says on what they were trained.
"""

import json
import math
import os
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from torch import Tensor

from fclmodels.backbones.model.network import Network, build_network
from fclmodels.backbones.model.spec import ModelSpec
from fclmodels.data.augment import augment, to_inputs
from fclmodels.data.prepare import Prepared
from fclmodels.data.sample_kind import TEXTS, find_kind
from fclmodels.data.splits.held_out import cut_test, number_units
from fclmodels.errors import UserError
from fclmodels.plugins import find
from fclmodels.randomness import derive_seed, make_generator, seed_torch
from fclmodels.settings.pretrain import PretrainParams, PretrainSettings
from fclmodels.source_digest import digest_sources
from fclmodels.storage import trees
from fclmodels.storage.files import replace_folder
from fclmodels.storage.object_store import Store
from fclmodels.storage.sealed_json import write_json

FORMAT = 1
WEIGHTS, CARD = "weights.safetensors", "card.json"
MOST_CLASSES = 40  # that a description names
Notify = Callable[[str], None]  # is called with a line of progress


@dataclass(frozen=True)
class PretrainSamples:
    """Prepared samples, to train on or held out."""

    prepared: Prepared
    rows: np.ndarray
    device: torch.device

    def iterate_batches(self, order: Tensor, size: int) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield samples as prepared [B, C, H, W] and their labels [B], in this order of the rows."""
        labels = self.prepared.samples["label"].to_numpy()
        for part in order.split(size):
            rows = self.rows[part.numpy()]
            samples, of_rows = self.prepared.array[rows], labels[rows].astype(np.int64)
            yield torch.from_numpy(samples).to(self.device), torch.from_numpy(of_rows).to(self.device)

    def normalize(self, samples: Tensor) -> Tensor:
        return to_inputs(samples, self.prepared.meta.mean, self.prepared.meta.std)

    def __len__(self) -> int:
        return len(self.rows)


@dataclass(frozen=True)
class TrainedBackbone:
    """Result of a training."""

    weights: dict[str, Tensor]  # by the backbone's own names
    losses: list[float]  # mean of each epoch
    accuracy: float  # on held-out samples
    train: int
    held_out: int


def train(params: PretrainParams, prepared: Prepared, device: torch.device, notify: Notify) -> TrainedBackbone:
    """Train the backbone under a linear head over all classes."""
    train_samples, held_out = split_samples(prepared, params.pretrain, device)
    classes = tuple(range(len(prepared.meta.classes)))
    spec = ModelSpec(params.model.model_dump(mode="json"), prepared.meta.shape, "growing", (classes,))
    network = build_network(spec, make_generator(params.pretrain.seed, "init")).to(device)
    losses = []
    with seed_torch(params.pretrain.seed, "dropout", device=device):
        for epoch, loss in enumerate(train_epochs(network, train_samples, params), start=1):
            notify(f"epoch {epoch} of {params.pretrain.epochs}: loss {loss:.3f}")
            if not math.isfinite(loss):
                raise UserError(f"optimizer.lr: the loss is {loss} in epoch {epoch}. Use a smaller rate.")
            losses.append(loss)
    # Copies, because a state dict's tensors would keep the network in memory.
    weights = {name: tensor.detach().cpu().clone() for name, tensor in network.backbone.state_dict().items()}
    return TrainedBackbone(weights, losses, measure_accuracy(network, held_out), len(train_samples), len(held_out))


def split_samples(
    prepared: Prepared, settings: PretrainSettings, device: torch.device
) -> tuple[PretrainSamples, PretrainSamples]:
    """Return train and held-out samples: the official split where there is one, else a share of each class."""
    if find_kind(prepared.meta.shape) is TEXTS:
        raise UserError(f"data.source: {prepared.meta.source} holds texts; this trains on images. Name another source.")
    table = prepared.samples
    held_out = (table["official"] == "test").fill_null(False).to_numpy().copy()
    free = np.flatnonzero(table["official"].is_null().to_numpy())
    units = number_units(table["group"].cast(int).fill_null(-1).to_numpy())
    random = np.random.default_rng(derive_seed(settings.seed, "held out"))
    held_out[free] = cut_test(table["label"].to_numpy()[free], units[free], settings.test, random)
    if held_out.all() or not held_out.any():
        raise UserError(f"pretrain.test: {settings.test} of {len(table)} samples leaves none on one side.")
    train_samples = PretrainSamples(prepared, np.flatnonzero(~held_out), device)
    return train_samples, PretrainSamples(prepared, np.flatnonzero(held_out), device)


def train_epochs(network: Network, samples: PretrainSamples, params: PretrainParams) -> Iterator[float]:
    """Train, and yield the mean loss over the samples of each epoch."""
    settings, lr = params.pretrain, params.optimizer.lr
    optimiser = torch.optim.AdamW(network.parameters(), lr, weight_decay=params.optimizer.weight_decay, fused=True)
    steps = settings.epochs * math.ceil(len(samples) / settings.batch_size)
    step = 0
    for epoch in range(settings.epochs):
        network.train()
        order = torch.randperm(len(samples), generator=make_generator(settings.seed, "batches", epoch))
        random = make_generator(settings.seed, "augment", epoch, device=samples.device)
        total = torch.zeros((), device=samples.device)
        for raw, labels in samples.iterate_batches(order, settings.batch_size):
            for group in optimiser.param_groups:
                group["lr"] = lr * compute_half_cosine(step / steps)
            loss = F.cross_entropy(network(samples.normalize(augment(raw, params.augment, random))), labels)
            optimiser.zero_grad()
            loss.backward()
            optimiser.step()
            total += loss.detach() * len(labels)
            step += 1
        yield float(total) / len(samples)


def compute_half_cosine(progress: float) -> float:
    """Return (1 + cos(pi progress)) / 2: from 1 at the start to 0 at the end."""
    return (1 + math.cos(math.pi * progress)) / 2


@torch.inference_mode()
def measure_accuracy(network: Network, samples: PretrainSamples) -> float:
    network.eval()
    batches = samples.iterate_batches(torch.arange(len(samples)), 1024)
    correct = sum(int((network(samples.normalize(raw)).argmax(1) == labels).sum()) for raw, labels in batches)
    return correct / len(samples)


class Pretraining:
    """A training with its `key`, a digest of all that its weights depend on, under which the store has them."""

    def __init__(
        self, params: PretrainParams, prepared: Prepared, store: Store, device: torch.device, notify: Notify
    ) -> None:
        self.params = params
        self.prepared = prepared
        self.store = store
        self.device = device
        self.notify = notify
        backbone = find("backbone", params.model.backbone)
        settings = {n: getattr(params, n).model_dump(mode="json") for n in ("model", "optimizer", "augment")}
        depends_on = {
            **settings,
            "pretrain": params.pretrain.model_dump(mode="json", exclude={"name"}),
            "backbone": backbone(params.model).list_dependencies(),
            "data": prepared.meta.digest,
            "device": device.type,
            "torch": torch.__version__,
            "code": digest_sources(__name__, backbone.__module__),
        }
        self.key = trees.digest(depends_on)

    def recall(self) -> dict[str, Any] | None:
        """Return the outcome where the store has it and the weights."""
        return self.store.recall(self.key)

    def run(self) -> dict[str, Any]:
        """Train, and record the outcome."""
        started = time.perf_counter()
        trained = train(self.params, self.prepared, self.device, self.notify)
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
        """Write the complete folder beside its place, then move it there; returns the card."""
        refuse_foreign(folder)
        card = self.build_card(outcome)
        with replace_folder(folder) as partial:
            weights = self.store.get(outcome["objects"]["weights"])
            save_file(weights, partial / WEIGHTS, {"description": card["description"]})
            write_json(partial / CARD, card)
        return card

    def build_card(self, outcome: dict[str, Any]) -> dict[str, Any]:
        """Return the content of card.json: the weights, and on what they were trained."""
        meta, params = self.prepared.meta, self.params
        settings = params.model_dump(mode="json", serialize_as_any=True, exclude={"tracking", "device"})
        card = {
            "format": FORMAT,
            "name": params.name,
            "description": self._describe(outcome["samples"]["train"]),
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

    def _describe(self, count: int) -> str:
        """Return one line, so that nobody takes these weights for others."""
        meta, first_weights = self.prepared.meta, self.params.model.weights
        folder = getattr(self.params.data, "folder", None)  # of the user's own images
        data = meta.source if folder is None else f"{meta.source} {self.params.data.root / folder}"
        names = [*meta.classes[:MOST_CLASSES], *["..."] * (len(meta.classes) > MOST_CLASSES)]
        history = (
            "from random weights and on nothing else: these are not the ImageNet weights of that name"
            if first_weights is None
            else f"from the weights in {first_weights} on, and so on what those had seen"
        )
        images = f"{count} images of {' x '.join(map(str, meta.shape))} in {len(meta.classes)} classes"
        return f"{self.params.model.backbone} pretrained on {data}, {images} ({', '.join(names)}), {history}."


def refuse_foreign(folder: Path) -> None:
    """Raise UserError, before any work, where pretrained weights would replace anything else than older ones."""
    if folder.is_dir() and any(folder.iterdir()) and not (folder / CARD).is_file():
        raise UserError(
            f"{folder} holds something other than pretrained weights. Name another folder, or empty this one."
        )
    there = next(parent for parent in [folder, *folder.absolute().parents] if parent.exists())
    if not there.is_dir() or not os.access(there, os.W_OK):
        raise UserError(f"{folder}: {there} is not a folder that can be written to. Name another.")
