"""Samples set apart from training: the test share of a source without an official split, and each client's val share.

Samples that show the same thing (a sample in several tasks, an image in several domains) are one unit and stay on one
side.
"""

import numpy as np


def number_units(groups: np.ndarray) -> np.ndarray:
    """Return the unit [N] of each sample: its group, or a unit of its own where it has none (negative)."""
    alone = np.flatnonzero(groups < 0)
    raw = groups.astype(np.int64)
    raw[alone] = groups.max(initial=-1) + 1 + np.arange(len(alone))
    return np.unique(raw, return_inverse=True)[1].ravel()


def cut_test(strata: np.ndarray, units: np.ndarray, share: float, generator: np.random.Generator) -> np.ndarray:
    """Return a mask [N] of test samples: a share of each stratum's units; a unit is in its first sample's stratum."""
    _, first, unit = np.unique(units, return_index=True, return_inverse=True)
    rank, size = rank_within(strata[first], generator)
    return (rank < round_half_up(share * size))[unit.ravel()]


def cut_val(
    clients: np.ndarray,
    tasks: np.ndarray,
    labels: np.ndarray,
    units: np.ndarray,
    share: float,
    generator: np.random.Generator,
) -> np.ndarray:
    """Return a mask [n] of val samples: in each task a share of each client's samples, classes in proportion.

    A unit is decided where it comes first (lowest task, then lowest client) and keeps its side elsewhere. Each client
    keeps a train sample of each class that it has in a task.
    """
    order = np.lexsort((units, clients, tasks))
    decided, first = np.unique(units[order], return_index=True)
    first = order[first]
    val = np.zeros(units.max(initial=-1) + 1, bool)
    val[decided] = _cut_evenly(_number_combinations(tasks, clients)[first], labels[first], share, generator)
    cells = _number_combinations(tasks, clients, labels)
    trained = np.bincount(cells, weights=~val[units]) > 0
    numbers, first = np.unique(cells, return_index=True)
    val[units[first[~trained[numbers]]]] = False
    return val[units]


def _cut_evenly(groups: np.ndarray, labels: np.ndarray, share: float, generator: np.random.Generator) -> np.ndarray:
    """Return a mask [n] of a share of each group, evenly from its classes; one of a class stays while others can go."""
    cells = _number_combinations(groups, labels)
    rank, size = rank_within(cells, generator)
    offset = generator.random(cells.max(initial=-1) + 1)[cells]
    turn = np.where(rank == 0, np.inf, (rank - 1 + offset) / np.maximum(size - 1, 1))
    order = np.lexsort((turn, groups))
    place = np.empty_like(order)
    place[order] = np.arange(len(order))
    starts, sizes = _find_runs(groups)
    return place - starts < round_half_up(share * sizes)


def rank_within(keys: np.ndarray, generator: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
    """Return the random rank [n] of each element among those with the same key, and their number [n]."""
    order = np.lexsort((generator.random(len(keys)), keys))
    place = np.empty_like(order)
    place[order] = np.arange(len(order))
    starts, sizes = _find_runs(keys)
    return place - starts, sizes


def round_half_up(numbers: np.ndarray) -> np.ndarray:
    """Round to the nearest whole number, halves up."""
    return np.floor(numbers + 0.5 + 1e-9)


def _find_runs(keys: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return where the run of each element's key starts in sorted order [n], and its length [n]."""
    _, key, sizes = np.unique(keys, return_inverse=True, return_counts=True)
    return (np.cumsum(sizes) - sizes)[key.ravel()], sizes[key.ravel()]


def _number_combinations(*columns: np.ndarray) -> np.ndarray:
    """Return a number [n] for each combination of values, without gaps."""
    key = np.zeros(len(columns[0]), np.int64)
    for column in columns:
        key = key * (column.max(initial=0) + 1) + column
    return np.unique(key, return_inverse=True)[1].ravel()
