"""Growing heads and heads a task: what their logits are, and that growth is independent of how tasks arrive."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fclmodels.backbones.model.heads import grow_heads, shrink_heads
from fclmodels.backbones.model.network import build_network, build_skeleton
from fclmodels.backbones.model.spec import ModelSpec, get_task_columns, to_local_labels


@st.composite
def streams(draw):
    """Tasks of labels that are numbered by first appearance and may come back later, in any order."""
    tasks, label_count = [], 0
    for _ in range(draw(st.integers(1, 5))):
        fresh = draw(st.integers(0 if label_count else 1, 3))
        old = draw(st.lists(st.integers(0, label_count - 1), unique=True, max_size=3)) if label_count else []
        classes = [*old, *range(label_count, label_count + fresh)] or [0]
        tasks.append(tuple(draw(st.permutations(classes))))
        label_count += fresh
    return tuple(tasks)


heads = st.sampled_from(["growing", "per-task"])
seeds = st.integers(0, 9)


def spec_of(tasks, head="growing"):
    return ModelSpec({"backbone": "mlp", "hidden": 4}, (1, 2, 2), head, tasks)


def seeded(seed):
    return torch.Generator().manual_seed(seed)


def same(ours, theirs):
    return list(ours) == list(theirs) and all(torch.equal(ours[name], theirs[name]) for name in ours)


@given(tasks=streams(), head=heads, seed=seeds)
def test_growing_task_by_task_gives_what_building_at_once_gives(tasks, head, seed):
    spec = spec_of(tasks[:1], head)
    weights = build_network(spec, seeded(seed)).state_dict()
    for number in range(2, len(tasks) + 1):
        longer = replace(spec, tasks=tasks[:number])
        weights, spec = grow_heads(weights, spec, longer, seeded(seed)), longer
    assert same(weights, build_network(spec, seeded(seed)).state_dict())


@given(tasks=streams(), head=heads, seed=seeds, count=st.integers(1, 5))
def test_growth_keeps_what_was_learned_to_the_bit(tasks, head, seed, count):
    old, new = spec_of(tasks[:count], head), spec_of(tasks, head)
    before = build_skeleton(old).state_dict()
    learned = {name: torch.randn(t.shape, generator=seeded(seed)) for name, t in before.items()}
    copies = {name: tensor.clone() for name, tensor in learned.items()}
    grown = grow_heads(learned, old, new, seeded(seed))
    assert same(learned, copies)
    assert all(torch.equal(grown[name][: len(tensor)], tensor) for name, tensor in copies.items())
    network = build_skeleton(new)
    network.load_state_dict(grown)
    shallow = build_skeleton(old)
    shallow.load_state_dict(copies)
    x = torch.randn(3, 1, 2, 2, generator=seeded(seed))
    for task in range(len(old.tasks)):
        torch.testing.assert_close(network.eval()(x, task), shallow.eval()(x, task))


@given(tasks=streams(), head=heads, seed=seeds, count=st.integers(1, 5))
def test_shrinking_undoes_growth_to_the_bit(tasks, head, seed, count):
    old, new = spec_of(tasks[:count], head), spec_of(tasks, head)
    weights = build_network(old, seeded(seed)).state_dict()
    assert same(shrink_heads(grow_heads(weights, old, new, seeded(1)), old), weights)


def test_where_no_class_is_new_a_growing_head_stays_the_same_tensor():
    old, new = spec_of(((0, 1, 2),)), spec_of(((0, 1, 2), (2, 0)))
    weights = build_network(old, seeded(0)).state_dict()
    grown = grow_heads(weights, old, new, seeded(1))
    assert all(grown[name] is weights[name] for name in weights)
    assert len(grown) == len(weights)


def test_new_rows_take_the_type_of_the_old_ones():
    old, new = spec_of(((0,),)), spec_of(((0,), (1,)))
    weights = {name: tensor.double() for name, tensor in build_network(old, seeded(0)).state_dict().items()}
    assert grow_heads(weights, old, new, seeded(0))["heads.0.weight"].dtype == torch.float64


def test_rows_are_drawn_apart_and_within_one_over_the_root_of_the_features():
    network = build_network(spec_of((tuple(range(50)), tuple(range(50))), "per-task"), seeded(0))
    rows = torch.cat([torch.cat([head.weight, head.bias[:, None]], 1) for head in network.heads])
    assert len({tuple(row.tolist()) for row in rows}) == 100
    # Uniform in +- 1/sqrt(4): standard deviation 0.5 / sqrt(3), here within five standard errors.
    assert rows.abs().max() <= 0.5
    assert abs(rows.std().item() - 0.5 / 3**0.5) < 0.03


@pytest.mark.parametrize(
    "new",
    [
        spec_of(((0, 1), (2,)), "per-task"),
        spec_of(((0, 2), (1,))),
        spec_of(((0, 1, 2),)),
        ModelSpec({"backbone": "mlp", "hidden": 5}, (1, 2, 2), "growing", ((0, 1), (2,))),
    ],
)
def test_refuses_to_grow_into_another_network(new):
    old = spec_of(((0, 1),))
    with pytest.raises(ValueError, match=r"grows by tasks only|does not go on"):
        grow_heads(build_network(old, seeded(0)).state_dict(), old, new, seeded(0))


@given(tasks=streams(), head=heads, seed=seeds)
def test_logits_of_a_task_and_of_all_classes(tasks, head, seed):
    spec = spec_of(tasks, head)
    network = build_network(spec, seeded(seed))
    features = torch.randn(3, 4, generator=seeded(seed))
    tables = [(h.weight.detach().numpy(), h.bias.detach().numpy()) for h in network.heads]
    scores = [features.numpy() @ weight.T + bias for weight, bias in tables]
    everything = np.full((3, spec.label_count), -np.inf)
    for number, task in enumerate(tasks):
        own = scores[number] if head == "per-task" else scores[0][:, list(task)]
        np.testing.assert_allclose(network.compute_logits(features, number).detach(), own, rtol=1e-4, atol=1e-6)
        for column, label in enumerate(task):
            everything[:, label] = np.maximum(everything[:, label], own[:, column])
    np.testing.assert_allclose(network.compute_logits(features).detach(), everything, rtol=1e-4, atol=1e-6)


def test_a_shared_labels_gradient_goes_to_the_head_with_the_highest_logit():
    network = build_network(spec_of(((0,), (0,)), "per-task"), seeded(0))
    for head, bias in zip(network.heads, (1.0, 2.0), strict=True):
        torch.nn.init.zeros_(head.weight)
        torch.nn.init.constant_(head.bias, bias)
    network.compute_logits(torch.ones(3, 4)).sum().backward()
    assert [head.bias.grad.item() for head in network.heads] == [0, 3]


@given(tasks=streams(), task=st.integers(0, 4), labels=st.lists(st.integers(0, 20), max_size=30))
def test_labels_and_columns_correspond(tasks, task, labels):
    task %= len(tasks)
    spec = spec_of(tasks)
    expected = [tasks[task].index(label) if label in tasks[task] else -1 for label in labels]
    assert to_local_labels(spec, task, torch.tensor(labels, dtype=torch.int64)).tolist() == expected
    assert get_task_columns(spec, task).tolist() == list(tasks[task])
