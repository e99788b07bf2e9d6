"""What is set apart from training: the test share of a source without an official split, and each client's val share.

What shows the same thing (a sample that comes in several tasks, one image in several domains) is one unit and stays
on one side.
"""

import numpy as np


def units_of(groups: np.ndarray) -> np.ndarray:
    """The unit [N] of each sample: its group, or itself where it has none (negative)."""
    alone = np.flatnonzero(groups < 0)
    raw = groups.astype(np.int64)
    raw[alone] = groups.max(initial=-1) + 1 + np.arange(len(alone))
    return np.unique(raw, return_inverse=True)[1].ravel()


def cut_test(strata: np.ndarray, units: np.ndarray, share: float, generator: np.random.Generator) -> np.ndarray:
    """Which samples [N] are held out: the share of each stratum's units; a unit counts where its first sample is."""
    _, first, unit = np.unique(units, return_index=True, return_inverse=True)
    rank, size = ranked(strata[first], generator)
    return (rank < rounded(share * size))[unit.ravel()]


def cut_val(
    clients: np.ndarray,
    tasks: np.ndarray,
    labels: np.ndarray,
    units: np.ndarray,
    share: float,
    generator: np.random.Generator,
) -> np.ndarray:
    """Which of the clients' samples [n] are val: in each task the share of a client's samples, classes in proportion.

    A unit is decided where it is first given (lowest task, then lowest client) and keeps its side wherever it comes
    again. Each client keeps a train sample of each class that it has in a task.
    """
    order = np.lexsort((units, clients, tasks))
    decided, first = np.unique(units[order], return_index=True)
    first = order[first]
    val = np.zeros(units.max(initial=-1) + 1, bool)
    val[decided] = _proportional(_numbered(tasks, clients)[first], labels[first], share, generator)
    cells = _numbered(tasks, clients, labels)
    trained = np.bincount(cells, weights=~val[units]) > 0
    bare, there = np.unique(cells, return_index=True)
    val[units[there[~trained[bare]]]] = False
    return val[units]


def _proportional(groups: np.ndarray, labels: np.ndarray, share: float, generator: np.random.Generator) -> np.ndarray:
    """The share of each group [n], taken evenly from its classes; of each class one stays as long as others can go."""
    cells = _numbered(groups, labels)
    rank, size = ranked(cells, generator)
    offset = generator.random(cells.max(initial=-1) + 1)[cells]
    turn = np.where(rank == 0, np.inf, (rank - 1 + offset) / np.maximum(size - 1, 1))
    order = np.lexsort((turn, groups))
    place = np.empty_like(order)
    place[order] = np.arange(len(order))
    starts, sizes = _starts_and_sizes(groups)
    return place - starts < rounded(share * sizes)


def ranked(keys: np.ndarray, generator: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
    """For each element [n] its random rank among those with the same key, and how many they are."""
    order = np.lexsort((generator.random(len(keys)), keys))
    place = np.empty_like(order)
    place[order] = np.arange(len(order))
    starts, sizes = _starts_and_sizes(keys)
    return place - starts, sizes


def rounded(numbers: np.ndarray) -> np.ndarray:
    """To the nearest whole number, halves up."""
    return np.floor(numbers + 0.5 + 1e-9)


def _starts_and_sizes(keys: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """For each element [n], where its key's run starts in sorted order, and how long it is."""
    _, key, sizes = np.unique(keys, return_inverse=True, return_counts=True)
    return (np.cumsum(sizes) - sizes)[key.ravel()], sizes[key.ravel()]


def _numbered(*columns: np.ndarray) -> np.ndarray:
    """A number [n] for each combination of values, without gaps."""
    key = np.zeros(len(columns[0]), np.int64)
    for column in columns:
        key = key * (column.max(initial=0) + 1) + column
    return np.unique(key, return_inverse=True)[1].ravel()
