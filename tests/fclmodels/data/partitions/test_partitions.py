"""Partitions: the laws of the kinds, and who is dealt what."""

import numpy as np
import pytest
import scipy.stats
from hypothesis import given
from hypothesis import strategies as st
from numpy.testing import assert_allclose, assert_array_equal
from pydantic import ValidationError

from fclmodels.data.partitions.base import Partition, Portion, draw_participants, round_by_largest_remainder
from fclmodels.data.partitions.class_share import cover_classes
from fclmodels.data.partitions.dirichlet import fill_empty_clients
from fclmodels.data.partitions.shards import count_shards
from fclmodels.data.splits.dealing import allot_test_samples
from fclmodels.data.splits.held_out import cut_test, cut_val, number_units
from fclmodels.errors import UserError
from fclmodels.plugins import find

OWN = ("iid", "dirichlet", "shards", "class-share")
counts_of_classes = st.lists(st.integers(20, 60), min_size=1, max_size=8).map(np.array)
seeds = st.integers(0, 2**32)


def partition(kind: str, clients: int = 4, **settings: object) -> Partition:
    plugin = find("partition", kind)
    return plugin(plugin.Settings(kind=kind, clients=clients, **settings))


def portion(counts: np.ndarray, clients: int) -> Portion:
    names = tuple(f"c{i}" for i in range(len(counts)))
    return Portion("task 3 (x)", names, np.asarray(counts), np.ones((clients, len(counts)), bool))


def allot(kind: str, counts: np.ndarray, clients: int, seed: int = 0, **settings: object) -> np.ndarray:
    return partition(kind, clients, **settings).allot(portion(counts, clients), np.random.default_rng(seed))


@given(st.sampled_from(OWN), counts_of_classes, st.integers(1, 8), seeds)
def test_every_sample_is_allotted_once_and_nobody_gets_nothing(
    kind: str, counts: np.ndarray, clients: int, seed: int
) -> None:
    settings = {"shards": {"shards": -(-len(counts) // clients)}, "class-share": {"eta": 1.0}}.get(kind, {})
    allotted = allot(kind, counts, clients, seed, **settings)
    assert_array_equal(allotted.sum(axis=0), counts)
    assert allotted.min() >= 0
    assert allotted.sum(axis=1).min() > 0


@given(counts_of_classes, st.integers(1, 8), seeds)
def test_iid_parts_are_equal(counts: np.ndarray, clients: int, seed: int) -> None:
    sizes = allot("iid", counts, clients, seed).sum(axis=1)
    assert sizes.max() - sizes.min() <= 1


def test_iid_draws_classes_like_cards() -> None:
    """A client's samples of a class are hypergeometric: drawn without regard to the class."""
    counts = np.array([30, 10])
    drawn = np.array([allot("iid", counts, 4, seed)[2, 1] for seed in range(2000)])
    law = scipy.stats.hypergeom(40, 10, 10)
    assert_allclose(drawn.mean(), law.mean(), atol=4 * law.std() / 2000**0.5)
    assert_allclose(drawn.var(), law.var(), rtol=0.15)


@pytest.mark.parametrize("alpha", [0.3, 2.0, 50.0])
def test_dirichlet_shares_have_the_moments_of_the_dirichlet_law(alpha: float) -> None:
    clients, classes = 4, 4000
    shares = allot("dirichlet", np.full(classes, 10_000), clients, alpha=alpha) / 10_000
    law = scipy.stats.dirichlet(np.full(clients, alpha))
    assert_allclose(shares.mean(axis=1), law.mean(), atol=4 * (law.var()[0] / classes) ** 0.5)
    assert_allclose(shares.var(axis=1), law.var(), rtol=0.1)
    assert_allclose(np.corrcoef(shares[:2])[0, 1], -1 / (clients - 1), atol=0.06)


def test_dirichlet_nears_iid_as_alpha_grows() -> None:
    def unevenness(alpha: float) -> float:
        return float(np.abs(allot("dirichlet", np.full(50, 400), 8, alpha=alpha) - 50).mean())

    distances = [unevenness(alpha) for alpha in (0.05, 0.5, 5, 500, 1e7)]
    assert distances == sorted(distances, reverse=True)
    assert distances[-1] < 0.5


@given(st.floats(1e-3, 100), st.integers(1, 8), st.integers(1, 2), seeds)
def test_dirichlet_keeps_its_least_number_a_class(alpha: float, clients: int, least: int, seed: int) -> None:
    allotted = allot("dirichlet", np.array([16, 40, 90]), clients, seed, alpha=alpha, min_per_class=least)
    assert allotted.min() >= least
    assert allotted.sum() == 146


def test_nobody_empty_takes_from_the_richest_what_it_has_most_of() -> None:
    before = np.array([[0, 0], [5, 2], [3, 3]])
    assert_array_equal(fill_empty_clients(before), [[1, 0], [4, 2], [3, 3]])


@given(counts_of_classes, st.integers(1, 8), st.integers(1, 8), seeds)
def test_shards_give_at_most_so_many_classes(counts: np.ndarray, clients: int, each: int, seed: int) -> None:
    each = max(min(each, counts.sum() // clients), -(-len(counts) // clients))
    allotted = allot("shards", counts, clients, seed, shards=each)
    assert_array_equal(allotted.sum(axis=0), counts)
    assert (allotted > 0).sum(axis=1).max() <= each
    pieces = count_shards(counts, clients * each, np.random.default_rng(seed))
    assert pieces.sum() == clients * each
    assert ((pieces >= 1) & (pieces <= counts)).all()


def test_shards_of_equal_classes_are_those_of_fot() -> None:
    """Split-CIFAR100 in FOT: 50 clients, 500 samples of each of 10 classes, two shards of 50 a client."""
    allotted = allot("shards", np.full(10, 500), 50)
    assert_array_equal(allotted.sum(axis=1), 100)
    assert set(np.unique(allotted)) <= {0, 50, 100}


@given(st.integers(1, 12), st.integers(1, 10), st.floats(0.05, 1), seeds)
def test_class_share_gives_eta_classes_and_leaves_none_out(clients: int, classes: int, eta: float, seed: int) -> None:
    count = int(np.floor(eta * classes + 0.5 + 1e-9))
    counts = np.full(classes, 30)
    if count == 0 or count * clients < classes:
        with pytest.raises(UserError):
            allot("class-share", counts, clients, seed, eta=eta)
        return
    allotted = allot("class-share", counts, clients, seed, eta=eta)
    assert_array_equal((allotted > 0).sum(axis=1), count)
    assert_array_equal(allotted.sum(axis=0), counts)
    for column in allotted.T:
        assert np.ptp(column[column > 0]) <= 1
    shared = allot("class-share", counts, clients, seed, eta=eta, samples="shared")
    assert_array_equal(shared, np.where(allotted > 0, 30, 0))


def test_covering_changes_one_class_of_one_client() -> None:
    has_class = np.array([[True, True, False], [True, False, False]])
    covered = cover_classes(has_class, np.ones((2, 3), bool), np.random.default_rng(0))
    assert covered.any(axis=0).all()
    assert_array_equal(covered.sum(axis=1), has_class.sum(axis=1))
    assert covered[0, 1]


@given(st.sampled_from(OWN), seeds)
def test_only_who_may_have_a_class_gets_of_it(kind: str, seed: int) -> None:
    random = np.random.default_rng(seed)
    may = random.random((6, 5)) < 0.6
    may[random.integers(6, size=5), np.arange(5)] = True
    settings = {"shards": {"shards": 5}, "class-share": {"eta": 1}}.get(kind, {})
    part = Portion("x", tuple("abcde"), np.full(5, 40), may)
    allotted = partition(kind, 6, **settings).allot(part, random)
    assert (allotted[~may] == 0).all()
    assert_array_equal(allotted.sum(axis=0), 40)


@given(st.integers(1, 50), st.integers(1, 20), st.floats(0.01, 1), seeds)
def test_each_task_has_its_share_of_the_clients(clients: int, tasks: int, share: float, seed: int) -> None:
    present = draw_participants(clients, tasks, share, np.random.default_rng(seed))
    assert_array_equal(present.sum(axis=0), max(1, round(share * clients)))


def test_clients_see_the_share_of_the_tasks_on_average_and_not_always_the_same() -> None:
    present = draw_participants(250, 40, 0.6, np.random.default_rng(0))
    presence = present.mean(axis=1)
    assert_allclose(presence.mean(), 0.6)
    assert_allclose(presence.var(), 0.6 * 0.4 / 40, rtol=0.3)


@given(st.integers(1, 9), st.lists(st.integers(0, 50), min_size=1, max_size=6).map(np.array), seeds)
def test_largest_remainder_is_within_one_of_the_exact_number(n: int, totals: np.ndarray, seed: int) -> None:
    random = np.random.default_rng(seed)
    shares = random.dirichlet(np.ones(n), len(totals)).T
    whole = round_by_largest_remainder(shares, totals, random)
    assert_array_equal(whole.sum(axis=0), totals)
    assert (np.abs(whole - shares * totals) < 1 + 1e-6).all()


def test_largest_remainder_breaks_ties_by_lot() -> None:
    firsts = [
        round_by_largest_remainder(np.full((4, 1), 0.25), np.array([1]), np.random.default_rng(s)).argmax()
        for s in range(40)
    ]
    assert set(firsts) == {0, 1, 2, 3}


def test_test_rows_follow_the_train_rows_of_each_class() -> None:
    train = np.array([[30, 0], [10, 5], [0, 15]])
    assert_array_equal(allot_test_samples(train, np.array([8, 4]), np.random.default_rng(0)), [[6, 0], [2, 1], [0, 3]])


@given(st.integers(1, 60), st.floats(0.05, 0.95), seeds)
def test_the_test_cut_takes_its_share_of_each_stratum(size: int, share: float, seed: int) -> None:
    random = np.random.default_rng(seed)
    strata = random.permutation(np.repeat([0, 1, 2], [size, 2 * size, 1]))
    cut = cut_test(strata, np.arange(len(strata)), share, random)
    for stratum in (0, 1, 2):
        there = strata == stratum
        assert cut[there].sum() == int(np.floor(share * there.sum() + 0.5 + 1e-9))


def test_what_shows_the_same_thing_stays_on_one_side_of_the_cut() -> None:
    units = np.tile(np.arange(50), 4)
    cut = cut_test(np.repeat([0, 1, 2, 3], 50), units, 0.2, np.random.default_rng(0))
    assert_array_equal(cut.reshape(4, 50), np.tile(cut[:50], (4, 1)))
    assert cut.sum() == 40


def test_units_are_groups_or_single_samples() -> None:
    units = number_units(np.array([-1, 3, -1, 3, 0]))
    assert units[1] == units[3]
    assert len(set(units)) == 4
    assert units.max() == 3


def share_of(clients: int, each: int, classes: int, tasks: int = 1) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Clients, tasks and labels of clients * each samples in each task."""
    client = np.tile(np.repeat(np.arange(clients), each), tasks)
    return client, np.repeat(np.arange(tasks), clients * each), np.arange(len(client)) % classes


@given(st.integers(1, 6), st.integers(1, 60), st.integers(1, 5), st.floats(0, 0.9), seeds)
def test_val_is_the_share_of_each_client_with_classes_in_proportion(
    clients: int, each: int, classes: int, share: float, seed: int
) -> None:
    client, task, label = share_of(clients, each, classes)
    val = cut_val(client, task, label, np.arange(len(client)), share, np.random.default_rng(seed))
    for c in range(clients):
        own = client == c
        kinds, sizes = np.unique(label[own], return_counts=True)
        count = min(int(np.floor(share * each + 0.5 + 1e-9)), each - len(kinds))
        assert val[own].sum() == count
        for kind, size in zip(kinds, sizes, strict=True):
            val_count = val[own & (label == kind)].sum()
            assert val_count < size
            if share * each <= each - len(kinds) - 1:
                assert abs(val_count - count * (size - 1) / (each - len(kinds))) < 1.5


def test_a_single_sample_stays_train() -> None:
    assert not cut_val(np.array([0]), np.array([0]), np.array([0]), np.array([0]), 0.9, np.random.default_rng(0)).any()


@given(st.integers(1, 8), st.floats(0.05, 0.6), seeds)
def test_a_unit_that_comes_again_keeps_its_side(clients: int, share: float, seed: int) -> None:
    random = np.random.default_rng(seed)
    size, tasks = 40, 4
    unit = np.concatenate([random.permutation(size) for _ in range(tasks)])
    task, client = np.repeat(np.arange(tasks), size), np.tile(np.arange(size) % clients, tasks)
    label = unit % 3
    val = cut_val(client, task, label, unit, share, random)
    for u in range(size):
        assert len(set(val[unit == u])) == 1
    cells = {(t, c, k) for t, c, k in zip(task, client, label, strict=True)}
    assert cells == {(t, c, k) for t, c, k in zip(task[~val], client[~val], label[~val], strict=True)}


def test_a_unit_is_decided_where_it_is_first_given() -> None:
    """In the first task every client has exactly its share; the others mix what was decided there."""
    random = np.random.default_rng(5)
    unit = np.concatenate([random.permutation(200) for _ in range(3)])
    task, client = np.repeat(np.arange(3), 200), np.tile(np.arange(200) % 4, 3)
    order = random.permutation(600)
    unit, task, client = unit[order], task[order], client[order]
    val = cut_val(client, task, np.zeros(600, int), unit, 0.2, random)
    assert [val[(task == 0) & (client == c)].sum() for c in range(4)] == [10, 10, 10, 10]
    assert [val[(task == 2) & (client == c)].sum() for c in range(4)] != [10, 10, 10, 10]


REFUSED = [
    (
        "iid",
        {},
        [20, 11],
        40,
        "partition: 40 clients cannot share task 3 (x): it has 31 training samples. Use fewer clients",
    ),
    ("dirichlet", {}, [20, 11], 40, "it has 31 training samples"),
    (
        "dirichlet",
        {"min_per_class": 2},
        [50, 11],
        8,
        "partition.min_per_class: 8 clients in task 3 (x) need 16 training samples of c1, there are 11. Use 1,",
    ),
    (
        "shards",
        {"shards": 4},
        [20, 11],
        8,
        "8 clients with 4 shards each cannot share task 3 (x): it has 31 training samples. Use 3 or fewer",
    ),
    ("shards", {"shards": 2}, [20] * 10, 3, "it has 10 classes. Use 4 or more"),
    (
        "class-share",
        {"eta": 0.2},
        [20, 20],
        8,
        "partition.eta: 0.2 of the 2 classes of task 3 (x) leaves a client none. Use 0.25 or more.",
    ),
    (
        "class-share",
        {"eta": 0.2},
        [20] * 10,
        3,
        "partition.eta: 3 clients with 0.2 of the classes of task 3 (x) hold 6 of 10",
    ),
    (
        "class-share",
        {"eta": 1},
        [20, 7],
        8,
        "partition: 8 clients cannot share c1 of task 3 (x): it has 7 training samples",
    ),
]


@pytest.mark.parametrize(("kind", "settings", "counts", "clients", "message"), REFUSED)
def test_impossible_partitions_are_refused(kind: str, settings: dict, counts: list, clients: int, message: str) -> None:
    with pytest.raises(UserError) as refusal:
        allot(kind, np.array(counts), clients, **settings)
    assert message in str(refusal.value)
    assert "\n" not in str(refusal.value)


def test_the_eta_that_a_refusal_names_is_enough() -> None:
    for classes in range(1, 30):
        with pytest.raises(UserError) as refusal:
            allot("class-share", np.full(classes, 90), 30, eta=0.001)
        eta = float(str(refusal.value).split("Use ")[1].split(" or")[0])
        assert allot("class-share", np.full(classes, 90), 30, eta=eta).sum() == 90 * classes


@pytest.mark.parametrize(
    ("kind", "settings"),
    [
        ("dirichlet", {"alpha": 0}),
        ("dirichlet", {"alpha": -1}),
        ("dirichlet", {"alpha": float("nan")}),
        ("class-share", {"eta": 0}),
        ("class-share", {"eta": 1.1}),
        ("shards", {"shards": 0}),
        ("iid", {"task_share": 0}),
        ("iid", {"clients": 0}),
        ("iid", {"alpha": 1}),
    ],
)
def test_settings_out_of_range_or_unknown_are_errors(kind: str, settings: dict) -> None:
    with pytest.raises(ValidationError):
        partition(kind, **settings)
