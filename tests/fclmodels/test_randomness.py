"""Keyed randomness: a stream for each key, and torch's own generator stays out of it."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fclmodels.randomness import derive_seed, make_generator, seed_torch

CPU = torch.device("cpu")
KEYS = st.lists(st.integers() | st.text(max_size=6), max_size=5).map(tuple)


@given(one=KEYS, two=KEYS)
def test_different_keys_have_different_seeds(one: tuple, two: tuple) -> None:
    assert (derive_seed(*one) == derive_seed(*two)) == (one == two)


@pytest.mark.parametrize(
    "near",
    [
        (1, "batches", 2, 3, 4),
        (0, "dropout", 2, 3, 4),
        (0, "batches", 1, 3, 4),
        (0, "batches", 2, 4, 3),
        (0, "batches", 2, 3, 5),
        (0, "batches", 2, 3),
        (0, "batches", 2, 34),
        ("0", "batches", 2, 3, 4),
        (0, "batches/int:2", 3, 4),
        (0, 'batches", 2', 3, 4),
    ],
)
def test_each_part_of_the_key_counts(near: tuple) -> None:
    key = (0, "batches", 2, 3, 4)
    streams = [torch.rand(8, generator=make_generator(*k)).tolist() for k in (key, near, key)]
    assert streams[0] == streams[2]
    assert streams[0] != streams[1]


def test_a_seed_fits_a_generator_and_stays_what_it_was() -> None:
    """Pinned: a change would silently give every run other results."""
    assert 0 <= derive_seed(0, "init") < 2**63
    assert make_generator(0, "init").initial_seed() == derive_seed(0, "init")
    assert derive_seed(0, "init") == 3953688860265627247


def test_a_generator_leaves_the_ambient_one_alone() -> None:
    before = torch.random.get_rng_state()
    torch.rand(3, generator=make_generator(0, "x"))
    assert torch.equal(torch.random.get_rng_state(), before)


def test_ambient_draws_follow_the_key_only_and_leave_no_trace() -> None:
    numbers = []
    for outside in (1, 2):
        torch.manual_seed(outside)
        before = torch.random.get_rng_state()
        with seed_torch(0, "dropout", 3, device=CPU):
            numbers.append(torch.rand(4).tolist())
        assert torch.equal(torch.random.get_rng_state(), before)
    with seed_torch(0, "dropout", 4, device=CPU):
        numbers.append(torch.rand(4).tolist())
    assert numbers[0] == numbers[1] != numbers[2]


def test_ambient_puts_the_generator_back_after_an_error() -> None:
    before = torch.random.get_rng_state()
    with pytest.raises(RuntimeError), seed_torch(0, "dropout", device=CPU):
        torch.rand(-torch.randint(1, 9, ()))
    assert torch.equal(torch.random.get_rng_state(), before)
