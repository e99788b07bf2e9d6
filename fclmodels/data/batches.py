"""Rows of the manifest as batches on the device: gathered, augmented, permuted, normalised."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from fclmodels.data.augment import as_inputs, augment
from fclmodels.data.splits import Rows, Splits
from fclmodels.errors import UserError
from fclmodels.kinds import TEXTS, kind_of
from fclmodels.randomness import generator
from fclmodels.settings import AugmentSettings

# So many bytes of float pixels are made at once: few enough for the cache, enough that Python is not felt.
CHUNK_BYTES = 8_000_000


@dataclass(frozen=True)
class Batch:
    """inputs [B, C, H, W] floats or [B, 2, L] token ids, labels [B] in the stream's label space, tasks [B]; all on the
    device. samples [B]: which of the prepared ones they are, where that is known."""

    inputs: Tensor
    labels: Tensor
    tasks: Tensor
    samples: Tensor | None = None

    def take(self, places: Tensor) -> "Batch":
        """The samples at these places, an index on any device."""
        places = places.to(self.labels.device)
        samples = None if self.samples is None else self.samples[places]
        return Batch(self.inputs[places], self.labels[places], self.tasks[places], samples)

    @staticmethod
    def concatenate(parts: Sequence["Batch"]) -> "Batch":
        return Batch(*(torch.cat([getattr(part, name) for part in parts]) for name in ("inputs", "labels", "tasks")))


class Batches:
    def __init__(self, splits: Splits, augmentation: AugmentSettings, device: torch.device) -> None:
        if kind_of(splits.shape) is TEXTS and augmentation != AugmentSettings():
            raise UserError("augment: these samples are texts, which nothing here augments. Leave the block out.")
        self.splits = splits
        self.augmentation = augmentation
        self.device = device
        self._permutations = _permutations(splits, device)

    def shuffled(self, rows: Rows, size: int, random: torch.Generator) -> Iterator[Batch]:
        """One epoch in random order, augmented; the last batch may be smaller."""
        order = torch.randperm(len(rows), generator=random)
        on_device = self.augmenting(random)
        for raw in self._chunks(rows, order, size):
            yield from self._slices(self._augmented(raw, on_device), size)

    def ordered(self, rows: Rows, size: int) -> Iterator[Batch]:
        """All rows as they stand, not augmented."""
        for raw in self._chunks(rows, torch.arange(len(rows)), size):
            yield from self._slices(raw, size)

    def raw(self, rows: Rows) -> Batch:
        """These rows with their pixels (uint8) or token ids (int32) as prepared: what a client can store."""
        columns = [torch.from_numpy(column) for column in (rows.samples, rows.labels, rows.tasks)]
        return Batch(*(t.to(self.device) for t in (self.splits.images[columns[0]], *columns[1:], columns[0])))

    def of_raw(self, raw: Batch, on_device: torch.Generator) -> Batch:
        """Stored samples as a batch to train on: augmented, permuted by their tasks, normalised."""
        return self.ready(self._augmented(raw, on_device))

    def augmenting(self, random: torch.Generator) -> torch.Generator:
        """A generator for augmentation on the device, keyed by a draw from one on the CPU."""
        return generator("augment", int(torch.randint(2**62, (), generator=random)), device=self.device)

    def _chunks(self, rows: Rows, order: Tensor, size: int) -> Iterator[Batch]:
        """A few batches at once, with the raw samples as inputs; none where there are no rows."""
        numbers = int(np.prod(self.splits.shape))
        length = size * max(1, CHUNK_BYTES // (4 * numbers * size))
        for part in order.split(length) if len(order) else ():
            yield self.raw(rows.take(part.numpy()))

    def _slices(self, raw: Batch, size: int) -> Iterator[Batch]:
        ready = self.ready(raw)
        assert ready.samples is not None
        parts = (ready.inputs, ready.labels, ready.tasks, ready.samples)
        for batch in zip(*(part.split(size) for part in parts), strict=True):
            yield Batch(*batch)

    def _augmented(self, raw: Batch, on_device: torch.Generator) -> Batch:
        return replace(raw, inputs=augment(raw.inputs, self.augmentation, on_device))

    def ready(self, raw: Batch) -> Batch:
        """What a network takes in: pixels permuted and normalised."""
        return replace(raw, inputs=as_inputs(self._permuted(raw.inputs, raw.tasks), self.splits.mean, self.splits.std))

    def _permuted(self, images: Tensor, tasks: Tensor) -> Tensor:
        """Pixels in the order of each row's task; all channels of a pixel move together."""
        if self._permutations is None:
            return images
        flat = images.flatten(2)
        index = self._permutations[tasks][:, None].expand_as(flat)
        return flat.gather(2, index).view_as(images)


def _permutations(splits: Splits, device: torch.device) -> Tensor | None:
    """[tasks, pixels], or None where no task is permuted."""
    if all(task.permutation is None for task in splits.tasks):
        return None
    pixels = splits.shape[1] * splits.shape[2]
    identity = torch.arange(pixels)
    rows = [identity if task.permutation is None else pixel_order(task.permutation, pixels) for task in splits.tasks]
    return torch.stack(rows).to(device)


def pixel_order(permutation: int, pixels: int) -> Tensor:
    """[pixels]: which one stands where, under a task's permutation."""
    return torch.randperm(pixels, generator=generator("pixels", permutation))
