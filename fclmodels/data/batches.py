"""Rows of the manifest as batches on the device: gathered, augmented, permuted, normalised."""

from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from fclmodels.data.augment import augment, normalise
from fclmodels.data.splits import Rows, Splits
from fclmodels.randomness import generator
from fclmodels.settings import AugmentSettings

# So many bytes of float pixels are made at once: few enough for the cache, enough that Python is not felt.
CHUNK_BYTES = 8_000_000


@dataclass(frozen=True)
class Batch:
    """inputs [B, C, H, W] floats, labels [B] in the stream's label space, tasks [B]; all on the device."""

    inputs: Tensor
    labels: Tensor
    tasks: Tensor


class Batches:
    def __init__(self, splits: Splits, augmentation: AugmentSettings, device: torch.device) -> None:
        self.splits = splits
        self.augmentation = augmentation
        self.device = device
        self._permutations = _permutations(splits, device)

    def shuffled(self, rows: Rows, size: int, random: torch.Generator) -> Iterator[Batch]:
        """One epoch in random order, augmented; the last batch may be smaller."""
        order = torch.randperm(len(rows), generator=random)
        on_device = generator("augment", int(torch.randint(2**62, (), generator=random)), device=self.device)
        for raw in self._chunks(rows, order, size):
            yield from self._slices(replace(raw, inputs=augment(raw.inputs, self.augmentation, on_device)), size)

    def ordered(self, rows: Rows, size: int) -> Iterator[Batch]:
        """All rows as they stand, not augmented."""
        for raw in self._chunks(rows, torch.arange(len(rows)), size):
            yield from self._slices(raw, size)

    def _chunks(self, rows: Rows, order: Tensor, size: int) -> Iterator[Batch]:
        """A few batches at once, with the raw pixels as inputs."""
        pixels = int(np.prod(self.splits.shape))
        length = size * max(1, CHUNK_BYTES // (4 * pixels * size))
        columns = [torch.from_numpy(column) for column in (rows.samples, rows.labels, rows.tasks)]
        for part in order.split(length):
            samples, labels, tasks = (column[part] for column in columns)
            images, labels, tasks = (t.to(self.device) for t in (self.splits.images[samples], labels, tasks))
            yield Batch(images, labels, tasks)

    def _slices(self, raw: Batch, size: int) -> Iterator[Batch]:
        inputs = normalise(self._permuted(raw.inputs, raw.tasks), self.splits.mean, self.splits.std)
        for batch in zip(inputs.split(size), raw.labels.split(size), raw.tasks.split(size), strict=True):
            yield Batch(*batch)

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
    rows = [
        identity
        if task.permutation is None
        else torch.randperm(pixels, generator=generator("pixels", task.permutation))
        for task in splits.tasks
    ]
    return torch.stack(rows).to(device)
