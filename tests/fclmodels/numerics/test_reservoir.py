"""Reservoir sampling: Algorithm R itself, and the law that it is there for."""

from collections import Counter
from itertools import combinations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scipy.stats import chisquare

from fclmodels.numerics.reservoir import reservoir


def seeded(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def algorithm_r(earlier: int, arriving: int, capacity: int, random: torch.Generator) -> list[int]:
    """One sample after another, as Vitter has it."""
    places = list(range(min(earlier, capacity)))
    stored = len(places)
    draws = torch.rand(arriving, dtype=torch.float64, generator=random).tolist()
    for newcomer, (number, draw) in enumerate(
        zip(range(earlier + 1, earlier + arriving + 1), draws, strict=True), stored
    ):
        place = int(draw * number)
        if len(places) < capacity:
            places.append(newcomer)
        elif place < capacity:
            places[place] = newcomer
    return sorted(places)


@given(earlier=st.integers(0, 40), arriving=st.integers(0, 60), capacity=st.integers(1, 50), seed=st.integers(0, 99))
def test_it_is_algorithm_r(earlier: int, arriving: int, capacity: int, seed: int) -> None:
    selected = reservoir(earlier, arriving, capacity, seeded(seed))
    assert selected.dtype == torch.int64
    assert selected.tolist() == algorithm_r(earlier, arriving, capacity, seeded(seed))


@pytest.mark.parametrize("tasks", [(6,), (2, 4), (1, 1, 4), (3, 0, 2, 1), (1,) * 6], ids=str)
def test_every_subset_is_as_likely_however_the_stream_is_cut(tasks: tuple[int, ...]) -> None:
    """Two of six samples: 15 pairs, 200 of each expected. The seeds are fixed; chance fails one law in 10,000."""
    counts = Counter(pair_of(tasks, seed) for seed in range(3000))
    assert counts.keys() == set(combinations(range(6), 2))
    assert chisquare(list(counts.values())).pvalue > 1e-4


def pair_of(tasks: tuple[int, ...], seed: int) -> tuple[int, ...]:
    """The numbers in the stream of the samples that a reservoir of two ends with."""
    random, stored, earlier = seeded(seed), torch.arange(0), 0
    for arriving in tasks:
        pool = torch.cat([stored, torch.arange(earlier, earlier + arriving)])
        stored, earlier = pool[reservoir(earlier, arriving, 2, random)], earlier + arriving
    return tuple(stored.tolist())


def test_a_late_sample_is_kept_as_often_as_an_early_one() -> None:
    """A reservoir of 50 after 1000 samples in tasks of growing size: each task has its share of it."""
    sizes, stored = (50, 150, 300, 500), torch.zeros(4)
    for seed in range(300):
        tasks, earlier, random = torch.arange(0), 0, seeded(seed)
        for task, size in enumerate(sizes):
            pool = torch.cat([tasks, torch.full((size,), task)])
            tasks, earlier = pool[reservoir(earlier, size, 50, random)], earlier + size
        stored += torch.bincount(tasks, minlength=4)
    expected = 300 * 50 * torch.tensor(sizes) / 1000
    spread = (expected * (1 - torch.tensor(sizes) / 1000)).sqrt()  # a little more than that without replacement
    assert ((stored - expected).abs() < 4 * spread).all()
