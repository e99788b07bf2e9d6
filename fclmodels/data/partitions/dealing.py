"""Hands the samples of all pools to clients: numbers from the partition's law, then an even draw.

Test samples of a class follow its train samples: a client gets the share of the one that it has of the other. Where
clients share images there is nothing to divide, and every client has all test samples.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from fclmodels.data.partitions.base import Partition, Portion, largest_remainder, participants
from fclmodels.data.streams.base import Layout, Pool, Samples
from fclmodels.errors import UserError

EVERYONE = -1


@dataclass(frozen=True)
class Given:
    """Samples by position [n], the client that gets each (-1: everyone), and the task in which."""

    samples: np.ndarray
    clients: np.ndarray
    tasks: np.ndarray

    @staticmethod
    def concatenate(parts: Sequence["Given"]) -> "Given":
        columns = ("samples", "clients", "tasks")
        return Given(*(np.concatenate([getattr(part, column) for part in parts]) for column in columns))


def deal(layout: Layout, samples: Samples, partition: Partition) -> tuple[Given, Given]:
    """All train samples and all test samples with their clients."""
    settings, tasks = partition.settings, len(layout.tasks)
    if settings.task_share < 1 and any(task.classes_by_client for task in layout.tasks):
        raise UserError("partition.task_share: clients with tasks of their own see all of them. Use task_share: 1.")
    present = participants(settings.clients, tasks, settings.task_share, partition.generator("participants"))
    pairs = [_deal_pool(pool, samples, present, partition) for pool in layout.pools]
    train, test = (Given.concatenate(parts) for parts in zip(*pairs, strict=True))
    return train, test


def _deal_pool(pool: Pool, samples: Samples, present: np.ndarray, partition: Partition) -> tuple[Given, Given]:
    test = samples.test[pool.rows]
    column = np.zeros(len(samples.classes), np.int64)
    column[list(pool.classes)] = np.arange(len(pool.classes))
    halves = [(rows, column[samples.labels[rows]]) for rows in (pool.rows[~test], pool.rows[test])]
    if pool.owners is not None:
        return _as_owned(pool, *halves)
    trained, tested = (np.bincount(columns, minlength=len(pool.classes)) for _, columns in halves)
    may = (pool.task_of >= 0) & np.take_along_axis(present, np.maximum(pool.task_of, 0), axis=1)
    portion = Portion(pool.name, tuple(samples.classes[c] for c in pool.classes), trained, may)
    allotted = partition.allot(portion, partition.generator("amounts", pool.key))
    if pool.promised:
        _refuse_broken_promise(portion, allotted)
    if partition.shares_images:
        return _everything(pool, *halves[0], allotted > 0), _for_everyone(pool, *halves[1], allotted > 0)
    follows = followed(allotted, tested, partition.generator("test amounts", pool.key))
    return (
        _drawn(pool, *halves[0], allotted, partition.generator("samples", pool.key)),
        _drawn(pool, *halves[1], follows, partition.generator("test samples", pool.key)),
    )


def _as_owned(pool: Pool, *halves: tuple[np.ndarray, np.ndarray]) -> tuple[Given, Given]:
    """Each sample to its owner; halves are rows and columns of the train and of the test samples."""
    assert pool.owners is not None
    (trainers, testers) = owners = [pool.owners[rows] for rows, _ in halves]
    if idle := sorted(set(testers.tolist()) - set(trainers.tolist())):
        raise UserError(f"client {idle[0]} has no training samples in {pool.name}. Give it more samples, or none.")
    train, test = (
        Given(rows, clients, pool.task_of[clients, columns])
        for (rows, columns), clients in zip(halves, owners, strict=True)
    )
    return train, test


def _refuse_broken_promise(portion: Portion, allotted: np.ndarray) -> None:
    without = np.argwhere(portion.may & (allotted == 0))
    if len(without):
        client, c = without[0]
        raise UserError(
            f"partition: client {client} gets no sample of {portion.classes[c]}, which the stream gives it. Use iid, "
            "dirichlet with min_per_class: 1 or class-share with eta: 1, fewer clients, or samples: shared."
        )


def followed(allotted: np.ndarray, tested: np.ndarray, generator: np.random.Generator) -> np.ndarray:
    """Test samples [clients, k] in the proportions of the train samples [clients, k]; of each class tested [k], all."""
    trained = allotted.sum(axis=0)
    return largest_remainder(allotted / np.maximum(trained, 1), tested * (trained > 0), generator)


def _drawn(
    pool: Pool, rows: np.ndarray, columns: np.ndarray, allotted: np.ndarray, generator: np.random.Generator
) -> Given:
    """Of each class as many samples to each client as allotted [clients, k] says; columns are the rows' classes."""
    order = generator.permutation(np.flatnonzero((allotted.sum(axis=0) > 0)[columns]))
    order = order[np.argsort(columns[order], kind="stable")]
    clients = np.repeat(np.tile(np.arange(len(allotted)), allotted.shape[1]), allotted.T.ravel())
    return Given(rows[order], clients, pool.task_of[clients, columns[order]])


def _everything(pool: Pool, rows: np.ndarray, columns: np.ndarray, held: np.ndarray) -> Given:
    """All samples of a class to each client that holds it [clients, k]."""
    clients, classes = np.nonzero(held)
    parts = [rows[part] for part in _by_class(columns, held.shape[1], classes)]
    sizes = [len(part) for part in parts]
    return Given(np.concatenate(parts), np.repeat(clients, sizes), np.repeat(pool.task_of[clients, classes], sizes))


def _for_everyone(pool: Pool, rows: np.ndarray, columns: np.ndarray, held: np.ndarray) -> Given:
    """All samples of a class once in each task in which some client holds it."""
    clients, classes = np.nonzero(held)
    tasks, classes = np.unique(np.stack([pool.task_of[clients, classes], classes]), axis=1)
    parts = [rows[part] for part in _by_class(columns, held.shape[1], classes)]
    samples = np.concatenate(parts)
    return Given(samples, np.full(len(samples), EVERYONE), np.repeat(tasks, [len(part) for part in parts]))


def _by_class(columns: np.ndarray, k: int, wanted: np.ndarray) -> list[np.ndarray]:
    """The indices of each wanted class's samples."""
    order = np.argsort(columns, kind="stable")
    blocks = np.split(order, np.cumsum(np.bincount(columns, minlength=k))[:-1])
    return [blocks[c] for c in wanted]
