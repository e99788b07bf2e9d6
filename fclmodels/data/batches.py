"""Rows of the manifest as batches on the device: gathered, augmented, permuted, normalised."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from fclmodels.data.augment import Channels, augment, normalise, to_inputs
from fclmodels.data.sample_kind import TEXTS, find_kind
from fclmodels.data.splits.split_reader import Rows, Splits
from fclmodels.errors import UserError
from fclmodels.randomness import make_generator
from fclmodels.settings.schema import AugmentSettings

# Bytes of float pixels that are made at once: few enough for the cache, enough that Python's overhead is small.
CHUNK_BYTES = 8_000_000


@dataclass(frozen=True)
class Batch:
    """Samples on the device, with their labels."""

    inputs: Tensor  # floats [B, C, H, W], or token ids [B, 2, L]
    labels: Tensor  # [B], in the stream's label space
    tasks: Tensor  # [B]
    samples: Tensor | None = None  # [B], their rows in the prepared array, or -1; None: of no sample they are known

    def take(self, places: Tensor) -> "Batch":
        """Return the samples at these places, an index on any device."""
        places = places.to(self.labels.device)
        samples = None if self.samples is None else self.samples[places]
        return Batch(self.inputs[places], self.labels[places], self.tasks[places], samples)

    @staticmethod
    def concatenate(parts: Sequence["Batch"]) -> "Batch":
        inputs, labels, tasks = (torch.cat([getattr(b, name) for b in parts]) for name in ("inputs", "labels", "tasks"))
        if all(part.samples is None for part in parts):
            return Batch(inputs, labels, tasks)
        samples = [torch.full_like(part.labels, -1) if part.samples is None else part.samples for part in parts]
        return Batch(inputs, labels, tasks, torch.cat(samples))


class Batches:
    """Makes batches of the rows of splits."""

    def __init__(self, splits: Splits, augmentation: AugmentSettings, device: torch.device) -> None:
        if find_kind(splits.shape) is TEXTS and augmentation != AugmentSettings():
            raise UserError("augment: these samples are texts, which nothing here augments. Leave the block out.")
        self.splits = splits
        self.augmentation = augmentation
        self.device = device
        self._permutations = _draw_permutations(splits, device)
        own = [(task.mean, task.std) for task in splits.tasks if task.mean is not None]
        self._normalisations = torch.tensor(own, device=device) if own else None  # [tasks, 2, C]

    def iterate_shuffled(self, rows: Rows, size: int, random: torch.Generator) -> Iterator[Batch]:
        """Yield one epoch in random order, augmented; the last batch may be smaller."""
        order = torch.randperm(len(rows), generator=random)
        on_device = self.make_device_generator(random)
        for raw in self._read_chunks(rows, order, size):
            yield from self._cut_batches(self._augment(raw, on_device), size)

    def iterate_ordered(self, rows: Rows, size: int) -> Iterator[Batch]:
        """Yield all rows in their order, not augmented."""
        for raw in self._read_chunks(rows, torch.arange(len(rows)), size):
            yield from self._cut_batches(raw, size)

    def read_raw(self, rows: Rows) -> Batch:
        """Return these rows with pixels (uint8) or token ids (int32) as prepared, as a client may store them."""
        columns = [torch.from_numpy(column) for column in (rows.samples, rows.labels, rows.tasks)]
        return Batch(*(t.to(self.device) for t in (self.splits.images[columns[0]], *columns[1:], columns[0])))

    def augment_raw(self, raw: Batch, on_device: torch.Generator) -> Batch:
        """Turn stored samples into a batch to train on: augmented, permuted by their tasks, normalised."""
        return self.prepare_inputs(self._augment(raw, on_device))

    def augment_pixels(self, pixels: Tensor, on_device: torch.Generator) -> Tensor:
        """Return pixels, uint8 or floating in 0..1, altered as those of real samples are."""
        return augment(pixels, self.augmentation, on_device)

    def normalise_pixels(self, pixels: Tensor) -> Tensor:
        """Return a network's inputs of pixels that no real sample has, by the stream's mean and std; not permuted."""
        scaled = 255 * pixels if pixels.is_floating_point() else pixels
        return normalise(scaled, self.splits.mean, self.splits.std)

    def make_device_generator(self, random: torch.Generator) -> torch.Generator:
        """Return a generator for augmentation on the device, keyed by a draw from one on the CPU."""
        return make_generator("augment", int(torch.randint(2**62, (), generator=random)), device=self.device)

    def _read_chunks(self, rows: Rows, order: Tensor, size: int) -> Iterator[Batch]:
        """Yield a few batches at once, with the raw samples as inputs; none where there are no rows."""
        numbers = int(np.prod(self.splits.shape))
        length = size * max(1, CHUNK_BYTES // (4 * numbers * size))
        for part in order.split(length) if len(order) else ():
            yield self.read_raw(rows.take(part.numpy()))

    def _cut_batches(self, raw: Batch, size: int) -> Iterator[Batch]:
        ready = self.prepare_inputs(raw)
        assert ready.samples is not None
        parts = (ready.inputs, ready.labels, ready.tasks, ready.samples)
        for batch in zip(*(part.split(size) for part in parts), strict=True):
            yield Batch(*batch)

    def _augment(self, raw: Batch, on_device: torch.Generator) -> Batch:
        return replace(raw, inputs=self.augment_pixels(raw.inputs, on_device))

    def prepare_inputs(self, raw: Batch) -> Batch:
        """Turn raw samples into a network's inputs: pixels permuted and normalised."""
        mean: Channels = self.splits.mean
        std: Channels = self.splits.std
        if self._normalisations is not None:
            mean, std = self._normalisations[raw.tasks].unbind(1)
        return replace(raw, inputs=to_inputs(self._permute(raw.inputs, raw.tasks), mean, std))

    def _permute(self, images: Tensor, tasks: Tensor) -> Tensor:
        """Put pixels into the order of each row's task; all channels of a pixel move together."""
        if self._permutations is None:
            return images
        flat = images.flatten(2)
        index = self._permutations[tasks][:, None].expand_as(flat)
        return flat.gather(2, index).view_as(images)


def _draw_permutations(splits: Splits, device: torch.device) -> Tensor | None:
    """Return the order of pixels of each task [tasks, pixels]; None where no task is permuted."""
    if all(task.permutation is None for task in splits.tasks):
        return None
    pixels = splits.shape[1] * splits.shape[2]
    identity = torch.arange(pixels)
    rows = [
        identity if task.permutation is None else draw_pixel_order(task.permutation, pixels) for task in splits.tasks
    ]
    return torch.stack(rows).to(device)


def draw_pixel_order(permutation: int, pixels: int) -> Tensor:
    """Return the order of pixels [pixels] under a task's permutation."""
    return torch.randperm(pixels, generator=make_generator("pixels", permutation))
