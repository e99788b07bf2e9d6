"""Batches: every row once, normalised, permuted by its own task, and from keyed randomness alone."""

from collections.abc import Callable
from copy import copy
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import Tensor

from fclmodels.data import batches as module
from fclmodels.data.batches import Batch, Batches
from fclmodels.data.splits.split_reader import Rows, Splits
from fclmodels.settings.schema import AugmentSettings

CPU = torch.device("cpu")
PLAIN = AugmentSettings()


def seeded(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def pixels(splits: Splits, rows: Rows) -> Tensor:
    return (splits.images[torch.from_numpy(rows.samples)].double() / 255 - 0.5) / 0.25


def joined(parts: list[Batch]) -> Batch:
    return Batch(*(torch.cat([getattr(part, name) for part in parts]) for name in ("inputs", "labels", "tasks")))


@pytest.fixture
def everything(splits_of: Callable[..., Splits]) -> tuple[Splits, Rows]:
    splits = splits_of(tasks=3, shape=(2, 5, 4))
    return splits, Rows.concatenate([splits.select_rows(task, "train") for task in range(3)])


@pytest.mark.parametrize("size", [1, 7, 96, 1000])
def test_ordered_batches_are_all_rows_as_they_stand(everything: tuple[Splits, Rows], size: int) -> None:
    splits, rows = everything
    parts = list(Batches(splits, AugmentSettings(flip=True, crop_padding=1), CPU).iterate_ordered(rows, size))
    assert [len(part.labels) for part in parts[:-1]] == [size] * (len(parts) - 1)
    whole = joined(parts)
    torch.testing.assert_close(whole.inputs.double(), pixels(splits, rows), rtol=0, atol=1e-5)
    assert whole.labels.tolist() == rows.labels.tolist()
    assert whole.tasks.tolist() == rows.tasks.tolist()
    assert whole.inputs.dtype == torch.float32


@pytest.mark.parametrize("size", [1, 7, 1000])
def test_a_shuffled_epoch_has_every_row_once(everything: tuple[Splits, Rows], size: int) -> None:
    splits, rows = everything
    parts = list(Batches(splits, PLAIN, CPU).iterate_shuffled(rows, size, seeded(0)))
    whole, order = joined(parts), torch.randperm(len(rows), generator=seeded(0))
    assert whole.labels.tolist() == rows.labels[order].tolist()
    torch.testing.assert_close(whole.inputs.double(), pixels(splits, rows.take(order.numpy())), rtol=0, atol=1e-5)
    assert order.tolist() != sorted(order.tolist())


def test_where_there_are_no_rows_there_is_no_batch(everything: tuple[Splits, Rows]) -> None:
    splits, rows = everything
    made, none = Batches(splits, PLAIN, CPU), rows.take(np.array([], int))
    assert [*made.iterate_ordered(none, 4), *made.iterate_shuffled(none, 4, seeded(0))] == []


def test_chunks_are_no_seams(everything: tuple[Splits, Rows], monkeypatch: pytest.MonkeyPatch) -> None:
    """Pixels are made some batches at once; without augmentation, how many does not show."""
    splits, rows = everything
    made = Batches(splits, PLAIN, CPU)
    one = joined(list(made.iterate_shuffled(rows, 7, seeded(0))))
    monkeypatch.setattr(module, "CHUNK_BYTES", 1)
    parts = list(made.iterate_shuffled(rows, 7, seeded(0)))
    assert [len(part.labels) for part in parts] == [7] * 13 + [5]
    assert torch.equal(joined(parts).inputs, one.inputs)


def test_epochs_differ_and_repeat_with_their_generator(everything: tuple[Splits, Rows]) -> None:
    splits, rows = everything
    made = Batches(splits, AugmentSettings(flip=True, crop_padding=1, brightness=0.5), CPU)

    def epochs(seed: int) -> list[Tensor]:
        random = seeded(seed)
        return [joined(list(made.iterate_shuffled(rows, 8, random))).inputs for _ in range(2)]

    torch.manual_seed(1)
    first = epochs(0)
    torch.manual_seed(2)
    before = torch.random.get_rng_state()
    again = epochs(0)
    assert torch.equal(torch.random.get_rng_state(), before)
    assert all(torch.equal(one, two) for one, two in zip(first, again, strict=True))
    assert not torch.equal(first[0], first[1])
    assert not torch.equal(first[0], epochs(1)[0])


def test_training_is_augmented_and_the_images_are_not_changed(everything: tuple[Splits, Rows]) -> None:
    splits, rows = everything
    before = splits.images.clone()
    augmented, plain = (Batches(splits, a, CPU) for a in (AugmentSettings(brightness=0.9), PLAIN))
    one, two = (joined(list(made.iterate_shuffled(rows, 8, seeded(0)))) for made in (augmented, plain))
    assert one.labels.tolist() == two.labels.tolist()
    assert not torch.equal(one.inputs, two.inputs)
    assert torch.equal(splits.images, before)


def test_each_task_has_a_permutation_of_its_own_pixels(splits_of: Callable[..., Splits]) -> None:
    """Task 0 has none. All channels of a pixel move together, in the same way for every sample, client and run."""
    splits = splits_of(tasks=3, permuted=True, same_classes=True, shape=(2, 5, 4))
    moves = []
    for task in range(3):
        rows = splits.select_rows(task, "test")
        got = joined(list(Batches(splits, PLAIN, CPU).iterate_ordered(rows, 5))).inputs.double()
        was = pixels(splits, rows)
        positions = []
        for place in range(20):
            source = [
                q for q in range(20) if torch.allclose(got.flatten(2)[..., place], was.flatten(2)[..., q], atol=1e-5)
            ]
            assert len(source) == 1
            positions.append(source[0])
        assert sorted(positions) == list(range(20))
        moves.append(positions)
    assert moves[0] == list(range(20))
    assert moves[1] != moves[0]
    assert moves[2] not in moves[:2]


def test_tasks_mixed_in_a_batch_keep_their_permutations(splits_of: Callable[..., Splits]) -> None:
    splits = splits_of(tasks=3, permuted=True, same_classes=True, shape=(2, 5, 4))
    made = Batches(splits, PLAIN, CPU)
    rows = [splits.select_rows(task, "train") for task in range(3)]
    alone = joined([batch for part in rows for batch in made.iterate_ordered(part, 8)])
    order = np.random.default_rng(0).permutation(len(alone.labels))
    mixed = joined(list(made.iterate_ordered(Rows.concatenate(rows).take(order), 8)))
    assert torch.equal(mixed.inputs, alone.inputs[order])


def test_tasks_mixed_in_a_batch_are_normalised_each_by_its_own_mean_and_std(splits_of: Callable[..., Splits]) -> None:
    splits = copy(splits_of(tasks=2, shape=(2, 5, 4)))
    own = [((0.1, 0.2), (0.3, 0.4)), ((0.5, 0.6), (0.7, 0.8))]
    splits.tasks = tuple(replace(t, mean=mean, std=std) for t, (mean, std) in zip(splits.tasks, own, strict=True))
    rows = Rows.concatenate([splits.select_rows(task, "train") for task in (1, 0)])
    batch = joined(list(Batches(splits, PLAIN, CPU).iterate_ordered(rows, 1000)))
    images = splits.images[torch.from_numpy(rows.samples)].numpy() / 255
    mean, std = np.array(own)[rows.tasks].transpose(1, 0, 2)[..., None, None]
    np.testing.assert_allclose(batch.inputs.numpy(), (images - mean) / std, atol=1e-5)


def test_the_permutation_comes_from_the_streams_seed_alone(splits_of: Callable[..., Splits]) -> None:
    splits = splits_of(tasks=2, permuted=True, same_classes=True)
    first = Batches(splits, PLAIN, CPU)._permutations
    torch.manual_seed(9)
    assert torch.equal(Batches(splits, PLAIN, CPU)._permutations, first)
    splits.tasks = (splits.tasks[0], replace(splits.tasks[1], permutation=77))
    changed = Batches(splits, PLAIN, CPU)._permutations
    assert not torch.equal(changed[1], first[1])


def test_stored_samples_are_pixels_as_prepared_and_pass_as_the_rows_do(splits_of: Callable[..., Splits]) -> None:
    """Of several tasks at once, each with its own permutation."""
    splits = splits_of(tasks=3, permuted=True, same_classes=True, shape=(2, 5, 4))
    rows = Rows.concatenate([splits.select_rows(task, "train") for task in (2, 0, 1)])
    made = Batches(splits, PLAIN, CPU)
    raw = made.read_raw(rows)
    assert raw.inputs.dtype == torch.uint8
    assert torch.equal(raw.inputs, splits.images[torch.from_numpy(rows.samples)])
    expected, got = joined(list(made.iterate_ordered(rows, 7))), made.augment_raw(raw, seeded(0))
    assert all(torch.equal(getattr(got, name), getattr(expected, name)) for name in ("inputs", "labels", "tasks"))


def test_stored_samples_are_augmented_as_the_rows_are(everything: tuple[Splits, Rows]) -> None:
    splits, rows = everything
    made = Batches(splits, AugmentSettings(flip=True, crop_padding=1, brightness=0.5), CPU)
    random = seeded(0)
    order = torch.randperm(len(rows), generator=random)
    got = made.augment_raw(made.read_raw(rows).take(order), made.make_device_generator(random))
    (expected,) = made.iterate_shuffled(rows, len(rows), seeded(0))
    assert torch.equal(got.inputs, expected.inputs)
    assert got.labels.tolist() == expected.labels.tolist()


def test_joined_batches_say_which_samples_they_know() -> None:
    """Rows of the prepared array, -1 for a replayed sample, and nothing where none of them is known."""
    known = Batch(torch.ones(2, 3), torch.tensor([0, 1]), torch.zeros(2), torch.tensor([7, 5]))
    replayed = Batch(torch.zeros(1, 3), torch.tensor([4]), torch.ones(1))
    joined = Batch.concatenate([known, replayed])
    assert joined.samples is not None
    assert (joined.samples.tolist(), joined.labels.tolist()) == ([7, 5, -1], [0, 1, 4])
    assert Batch.concatenate([replayed, replayed]).samples is None
