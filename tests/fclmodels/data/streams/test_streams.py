"""Streams: which classes and samples each task has, and which client meets them when."""

import math
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from fclmodels.data.streams.base import Layout, SampleTable, Stream
from fclmodels.errors import UserError
from fclmodels.plugins import find


def samples(
    classes: int, each: int = 3, domains: int = 1, tested: int = 1, own_label_spaces: bool = False
) -> SampleTable:
    """`each` samples of each class in each domain, the first `tested` of them test rows, in a mixed order."""
    domain, label, copy = (axis.ravel() for axis in np.indices((domains, classes, each)))
    order = np.random.default_rng(7).permutation(len(label))
    return SampleTable(
        label[order],
        domain[order],
        (copy < tested)[order],
        tuple(f"c{i}" for i in range(classes)),
        tuple(f"d{i}" for i in range(domains)),
        own_label_spaces,
    )


def stream(kind: str, **settings: object) -> Stream:
    plugin = find("stream", kind)
    return plugin(plugin.Settings(kind=kind, **settings))


def groups(layout: Layout) -> list[tuple[int, ...]]:
    return [task.classes for task in layout.tasks]


@given(st.integers(1, 40), st.data())
def test_class_incremental_tasks_cut_all_classes_evenly(classes: int, data: st.DataObject) -> None:
    tasks = data.draw(st.integers(1, classes))
    order = data.draw(st.sampled_from(["given", "sorted", "shuffled"]))
    result = groups(stream("class-incremental", tasks=tasks, class_order=order).lay_out(samples(classes), 2))
    assert sorted(c for group in result for c in group) == list(range(classes))
    assert len(result) == tasks
    assert {len(group) for group in result} <= {classes // tasks, math.ceil(classes / tasks)}


def test_a_task_has_all_samples_of_its_classes_and_no_others() -> None:
    table = samples(6)
    layout = stream("class-incremental", tasks=3).lay_out(table, 2)
    assert groups(layout) == [(0, 1), (2, 3), (4, 5)]
    for pool, classes in zip(layout.pools, groups(layout), strict=True):
        assert pool.rows.tolist() == np.flatnonzero(np.isin(table.labels, classes)).tolist()


def test_the_numbers_of_classes_may_be_listed() -> None:
    layout = stream("class-incremental", tasks=3, classes_per_task=[5, 2, 1]).lay_out(samples(10), 1)
    assert groups(layout) == [(0, 1, 2, 3, 4), (5, 6), (7,)]


def test_classes_may_be_named_task_by_task() -> None:
    layout = stream("class-incremental", classes=[["c4"], ["c0", "c2"]]).lay_out(samples(5), 1)
    assert groups(layout) == [(4,), (0, 2)]
    assert [task.name for task in layout.tasks] == ["c4", "c0, c2"]


def test_sorted_order_is_by_name() -> None:
    table = samples(3)
    named = SampleTable(table.labels, table.domains, table.test, ("pear", "apple", "fig"), ("d",))
    assert groups(stream("class-incremental", tasks=3, class_order="sorted").lay_out(named, 1)) == [(1,), (2,), (0,)]


def test_shuffled_order_belongs_to_the_seed() -> None:
    orders = [
        groups(stream("class-incremental", tasks=20, class_order="shuffled", seed=seed).lay_out(samples(20), 1))
        for seed in (0, 0, 1)
    ]
    assert orders[0] == orders[1] != orders[2]


def test_task_incremental_differs_by_its_heads_alone() -> None:
    task, growing = stream("task-incremental", tasks=2), stream("class-incremental", tasks=2)
    assert (task.head, growing.head) == ("per-task", "growing")
    assert groups(task.lay_out(samples(4), 1)) == groups(growing.lay_out(samples(4), 1))


def test_domain_incremental_takes_domains_in_the_named_order() -> None:
    table = samples(3, domains=3)
    layout = stream("domain-incremental", domains=["d2", "d0"]).lay_out(table, 1)
    assert [task.name for task in layout.tasks] == ["d2", "d0"]
    assert groups(layout) == [(0, 1, 2), (0, 1, 2)]
    assert [set(table.domains[pool.rows]) for pool in layout.pools] == [{2}, {0}]


def test_a_domain_has_the_classes_that_it_trains() -> None:
    table = samples(3, domains=2)
    some = (table.domains == 0) | (table.labels != 1) | table.test
    part = SampleTable(table.labels[some], table.domains[some], table.test[some], table.classes, table.domain_names)
    assert groups(stream("domain-incremental").lay_out(part, 1)) == [(0, 1, 2), (0, 2)]


def test_datasets_have_a_head_each() -> None:
    result = stream("datasets")
    assert result.head == "per-task"
    layout = result.lay_out(samples(2, domains=2, own_label_spaces=True), 1)
    assert [task.name for task in layout.tasks] == ["d0", "d1"]


def test_permuted_pixels_are_the_same_samples_under_other_permutations() -> None:
    table = samples(3)
    layout = stream("permuted-pixels", tasks=4).lay_out(table, 5)
    seeds = [task.permutation for task in layout.tasks]
    assert seeds[0] is None
    assert None not in seeds[1:]
    assert len(set(seeds)) == 4
    assert all(pool.rows.tolist() == list(range(len(table.labels))) for pool in layout.pools)
    assert {pool.key for pool in layout.pools} == {0}
    permuted = stream("permuted-pixels", tasks=4, first_task="permuted").lay_out(table, 5)
    assert permuted.tasks[0].permutation is not None
    assert [task.permutation for task in permuted.tasks[1:]] == seeds[1:]


@pytest.mark.parametrize(("per_task", "overlap", "tasks"), [(10, 1, 11), (9, 2, 14)])
def test_overlapping_classes_follow_the_arithmetic_of_fedprotip_d6(per_task: int, overlap: int, tasks: int) -> None:
    result = groups(stream("overlapping-classes", classes_per_task=per_task, overlap=overlap).lay_out(samples(100), 1))
    assert len(result) == tasks
    assert {len(group) for group in result} == {per_task}
    assert set().union(*result) == set(range(100))
    for before, after in pairwise(result):
        assert before[-overlap:] == after[:overlap]
    assert all(set(a).isdisjoint(b) for i, a in enumerate(result) for b in result[i + 2 :])


@given(st.integers(2, 6), st.integers(0, 5), st.integers(1, 6))
def test_split_samples_of_overlapping_classes_come_once(per_task: int, overlap: int, tasks: int) -> None:
    overlap = min(overlap, per_task - 1)
    table = samples(per_task + (tasks - 1) * (per_task - overlap), each=13, tested=6)
    layout = stream("overlapping-classes", classes_per_task=per_task, overlap=overlap).lay_out(table, 1)
    assert len(layout.tasks) == tasks
    rows = np.concatenate([pool.rows for pool in layout.pools])
    assert sorted(rows.tolist()) == list(range(len(table.labels)))
    for c in range(len(table.classes)):
        for test in (False, True):
            parts = [
                ((table.labels[p.rows] == c) & (table.test[p.rows] == test)).sum()
                for p in layout.pools
                if c in p.classes
            ]
            assert max(parts) - min(parts) <= 1


def test_which_samples_an_overlapping_class_brings_is_drawn() -> None:
    first = [
        stream("overlapping-classes", seed=seed).lay_out(samples(10, each=20), 1).pools[0].rows.tolist()
        for seed in (0, 0, 1)
    ]
    assert first[0] == first[1] != first[2]


def test_repeated_samples_come_in_every_task_of_their_class() -> None:
    table = samples(7)
    layout = stream("overlapping-classes", classes_per_task=4, overlap=1, samples="repeated").lay_out(table, 1)
    assert groups(layout) == [(0, 1, 2, 3), (3, 4, 5, 6)]
    shared = set(np.flatnonzero(table.labels == 3).tolist())
    assert shared == set(layout.pools[0].rows.tolist()) & set(layout.pools[1].rows.tolist())


@given(tasks=st.integers(1, 8), width=st.integers(1, 4), clients=st.integers(1, 5))
def test_in_a_recurring_task_pool_each_task_is_drawn_from_all_classes(tasks: int, width: int, clients: int) -> None:
    """Each client meets its classes of a task in that task's pool, and another client's there never."""
    table = samples(5, each=4)
    layout = stream("task-pool", tasks=tasks, classes_per_task=width, recurring=True).lay_out(table, clients)
    assert len(layout.tasks) == len(layout.pools) == tasks
    for t, (task, pool) in enumerate(zip(layout.tasks, layout.pools, strict=True)):
        assert task.classes_by_client is not None
        assert pool.rows.tolist() == np.flatnonzero(np.isin(table.labels, task.classes)).tolist()
        for client, own in task.classes_by_client.items():
            assert len(set(own)) == width
            assert {c for c, when in zip(pool.classes, pool.task_of[client], strict=True) if when == t} == set(own)
            assert set(pool.task_of[client]) <= {t, -1}


def test_classes_recur_in_a_task_pool_of_more_tasks_than_classes() -> None:
    """Ten tasks of two of five classes: each client meets each class four times on average, not in a fixed turn."""
    layout = stream("task-pool", tasks=10, classes_per_task=2, recurring=True).lay_out(samples(5, each=4), 40)
    of_clients = [[set(task.classes_by_client[client]) for task in layout.tasks] for client in range(40)]
    counts = np.array([[sum(c in own for own in sequence) for c in range(5)] for sequence in of_clients])
    assert counts.mean() == 4
    assert counts.min() < 3 < 5 < counts.max()


@given(st.integers(1, 5), st.integers(1, 4), st.integers(0, 6), st.integers(1, 9))
def test_in_the_task_pool_each_client_meets_its_own_classes_once(
    tasks: int, width: int, more: int, clients: int
) -> None:
    layout = stream("task-pool", tasks=tasks, classes_per_task=width).lay_out(samples(tasks * width + more), clients)
    (pool,) = layout.pools
    for client in range(clients):
        own = [task.classes_by_client[client] for task in layout.tasks if task.classes_by_client]
        assert [len(classes) for classes in own] == [width] * tasks
        assert len(set().union(*own)) == tasks * width
        for t, classes in enumerate(own):
            assert np.flatnonzero(pool.task_of[client] == t).tolist() == sorted(classes)
    for task in layout.tasks:
        assert set(task.classes) == set().union(*task.classes_by_client.values())


def test_a_client_keeps_its_sequence_when_others_join() -> None:
    few, many = (stream("task-pool").lay_out(samples(10), clients).pools[0].task_of for clients in (3, 30))
    assert (few == many[:3]).all()
    assert len(np.unique(many, axis=0)) > 20


REFUSED = [
    ("class-incremental", {"tasks": 11}, {}, "stream.tasks: 10 classes cannot make 11 tasks. Use 10 or fewer."),
    ("class-incremental", {"tasks": 4, "classes_per_task": 3}, {}, "4 tasks need 12 classes, the source has 10"),
    ("class-incremental", {"tasks": 4, "classes_per_task": [3, 3]}, {}, "2 numbers for 4 tasks"),
    (
        "class-incremental",
        {"classes": [["c1"], ["c99"]]},
        {},
        "stream.classes: the source has no c99. Did you mean c9?",
    ),
    ("class-incremental", {"classes": [["c1"], ["c1"]]}, {}, "stream.classes: c1 is named twice"),
    ("class-incremental", {"classes": [["c1"], []]}, {}, "task 1 has no class"),
    ("domain-incremental", {}, {}, "needs a source with several domains, this one has 1"),
    ("domain-incremental", {"domains": ["d7"]}, {"domains": 3}, "stream.domains: the source has no d7. Did you mean d"),
    ("domain-incremental", {"domains": ["d1", "d1"]}, {"domains": 3}, "d1 is named twice"),
    ("domain-incremental", {"domains": []}, {"domains": 3}, "no domain is named"),
    ("domain-incremental", {}, {"domains": 3, "own_label_spaces": True}, "Use stream.kind: datasets"),
    ("datasets", {}, {"domains": 3}, "needs data sets with label spaces of their own"),
    ("overlapping-classes", {"overlap": 4}, {}, "stream.overlap: 4 classes a task cannot overlap by 4. Use 3 or less."),
    (
        "overlapping-classes",
        {"tasks": 5},
        {},
        "5 tasks of 4 classes that overlap by 1 need 16 classes, the source has 10. Use stream.tasks: 3",
    ),
    (
        "overlapping-classes",
        {"classes_per_task": 12},
        {},
        "need 12 classes, the source has 10. Use stream.classes_per_task: 10",
    ),
    ("overlapping-classes", {"classes_per_task": 5}, {}, "leave 1 of 10 classes over. Set stream.tasks: 2"),
    ("task-pool", {"tasks": 6}, {}, "6 tasks of 2 classes need 12 classes, the source has 10. Use stream.tasks: 5"),
    ("task-pool", {"classes_per_task": 11}, {}, "need 55 classes, the source has 10"),
    ("task-pool", {"classes_per_task": 11, "recurring": True}, {}, "classes_per_task: 11, the source has 10 classes"),
]


@pytest.mark.parametrize(("kind", "settings", "source", "message"), REFUSED)
def test_impossible_streams_are_refused(kind: str, settings: dict, source: dict, message: str) -> None:
    with pytest.raises(UserError) as refusal:
        stream(kind, **settings).lay_out(samples(10, **source), 2)
    assert message in str(refusal.value)
    assert "\n" not in str(refusal.value)


@pytest.mark.parametrize(
    ("kind", "settings"),
    [
        ("class-incremental", {"tasks": 0}),
        ("overlapping-classes", {"overlap": -1}),
        ("task-pool", {"alpha": 1}),
        ("permuted-pixels", {"first_task": "x"}),
    ],
)
def test_settings_out_of_range_or_unknown_are_errors(kind: str, settings: dict) -> None:
    with pytest.raises(ValidationError):
        stream(kind, **settings)
