"""Assigns the samples of all pools to clients: the partition says how many, an even draw which.

Test samples of a class follow its train samples: a client gets the share of the one that it has of the other. Where
clients share images there is nothing to divide, and every client has all test samples.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from fclmodels.data.partitions.base import Partition, Portion, draw_participants, round_by_largest_remainder
from fclmodels.data.streams.base import Layout, Pool, SampleTable
from fclmodels.errors import UserError

EVERYONE = -1


@dataclass(frozen=True)
class Deal:
    """Samples that clients get in tasks."""

    samples: np.ndarray  # [n], positions in the prepared table
    clients: np.ndarray  # [n], EVERYONE where all get it
    tasks: np.ndarray  # [n]

    @staticmethod
    def concatenate(parts: Sequence["Deal"]) -> "Deal":
        columns = ("samples", "clients", "tasks")
        return Deal(*(np.concatenate([getattr(part, column) for part in parts]) for column in columns))


def deal(layout: Layout, samples: SampleTable, partition: Partition) -> tuple[Deal, Deal]:
    """Assign all train samples and all test samples to clients and tasks."""
    settings, tasks = partition.settings, len(layout.tasks)
    if settings.task_share < 1 and any(task.classes_by_client for task in layout.tasks):
        raise UserError("partition.task_share: clients with tasks of their own see all of them. Use task_share: 1.")
    present = draw_participants(settings.clients, tasks, settings.task_share, partition.make_generator("participants"))
    pairs = [_deal_pool(pool, samples, present, partition) for pool in layout.pools]
    train, test = (Deal.concatenate(parts) for parts in zip(*pairs, strict=True))
    return train, test


def _deal_pool(pool: Pool, samples: SampleTable, present: np.ndarray, partition: Partition) -> tuple[Deal, Deal]:
    test = samples.test[pool.rows]
    column = np.zeros(len(samples.classes), np.int64)
    column[list(pool.classes)] = np.arange(len(pool.classes))
    halves = [(rows, column[samples.labels[rows]]) for rows in (pool.rows[~test], pool.rows[test])]
    if pool.owners is not None:
        return _deal_to_owners(pool, *halves)
    trained, tested = (np.bincount(columns, minlength=len(pool.classes)) for _, columns in halves)
    may = (pool.task_of >= 0) & np.take_along_axis(present, np.maximum(pool.task_of, 0), axis=1)
    portion = Portion(pool.name, tuple(samples.classes[c] for c in pool.classes), trained, may)
    allotted = partition.allot(portion, partition.make_generator("amounts", pool.key))
    if pool.promised:
        _refuse_broken_promise(portion, allotted)
    if partition.shares_images:
        return _deal_all(pool, *halves[0], allotted > 0), _deal_to_everyone(pool, *halves[1], allotted > 0)
    test_allotted = allot_test_samples(allotted, tested, partition.make_generator("test amounts", pool.key))
    return (
        _draw(pool, *halves[0], allotted, partition.make_generator("samples", pool.key)),
        _draw(pool, *halves[1], test_allotted, partition.make_generator("test samples", pool.key)),
    )


def _deal_to_owners(pool: Pool, *halves: tuple[np.ndarray, np.ndarray]) -> tuple[Deal, Deal]:
    """Assign each sample to its owner; halves are rows and class columns of the train and of the test samples."""
    assert pool.owners is not None
    (trainers, testers) = owners = [pool.owners[rows] for rows, _ in halves]
    if idle := sorted(set(testers.tolist()) - set(trainers.tolist())):
        raise UserError(f"client {idle[0]} has no training samples in {pool.name}. Give it more samples, or none.")
    train, test = (
        Deal(rows, clients, pool.task_of[clients, columns])
        for (rows, columns), clients in zip(halves, owners, strict=True)
    )
    return train, test


def _refuse_broken_promise(portion: Portion, allotted: np.ndarray) -> None:
    gaps = np.argwhere(portion.may & (allotted == 0))
    if len(gaps):
        client, c = gaps[0]
        raise UserError(
            f"partition: client {client} gets no sample of {portion.classes[c]}, which the stream gives it. Use iid, "
            "dirichlet with min_per_class: 1 or class-share with eta: 1, fewer clients, or samples: shared."
        )


def allot_test_samples(allotted: np.ndarray, tested: np.ndarray, generator: np.random.Generator) -> np.ndarray:
    """Return numbers of test samples [clients, k] in proportion to train samples; columns sum to tested [k]."""
    trained = allotted.sum(axis=0)
    return round_by_largest_remainder(allotted / np.maximum(trained, 1), tested * (trained > 0), generator)


def _draw(
    pool: Pool, rows: np.ndarray, columns: np.ndarray, allotted: np.ndarray, generator: np.random.Generator
) -> Deal:
    """Draw as many samples of each class for each client as allotted [clients, k]; columns are the rows' classes."""
    order = generator.permutation(np.flatnonzero((allotted.sum(axis=0) > 0)[columns]))
    order = order[np.argsort(columns[order], kind="stable")]
    clients = np.repeat(np.tile(np.arange(len(allotted)), allotted.shape[1]), allotted.T.ravel())
    return Deal(rows[order], clients, pool.task_of[clients, columns[order]])


def _deal_all(pool: Pool, rows: np.ndarray, columns: np.ndarray, has_class: np.ndarray) -> Deal:
    """Assign all samples of a class to each client that has it [clients, k]."""
    clients, classes = np.nonzero(has_class)
    parts = [rows[part] for part in _find_by_class(columns, has_class.shape[1], classes)]
    sizes = [len(part) for part in parts]
    return Deal(np.concatenate(parts), np.repeat(clients, sizes), np.repeat(pool.task_of[clients, classes], sizes))


def _deal_to_everyone(pool: Pool, rows: np.ndarray, columns: np.ndarray, has_class: np.ndarray) -> Deal:
    """Assign all samples of a class to everyone, once in each task in which some client has it [clients, k]."""
    clients, classes = np.nonzero(has_class)
    tasks, classes = np.unique(np.stack([pool.task_of[clients, classes], classes]), axis=1)
    parts = [rows[part] for part in _find_by_class(columns, has_class.shape[1], classes)]
    samples = np.concatenate(parts)
    return Deal(samples, np.full(len(samples), EVERYONE), np.repeat(tasks, [len(part) for part in parts]))


def _find_by_class(columns: np.ndarray, k: int, classes: np.ndarray) -> list[np.ndarray]:
    """Return the indices of the samples of each of these classes."""
    order = np.argsort(columns, kind="stable")
    blocks = np.split(order, np.cumsum(np.bincount(columns, minlength=k))[:-1])
    return [blocks[c] for c in classes]
