"""The prototypical network's loss against eq. 7 written out sample by sample."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from fclmodels.numerics.protonet import prototype_loss


def by_sample(features: np.ndarray, labels: list[int], others: dict[int, np.ndarray]) -> float:
    """Mean of -log softmax over the samples whose class has another sample in the batch."""
    losses = []
    for i, (z, label) in enumerate(zip(features, labels, strict=True)):
        prototypes = dict(others)
        for other in set(labels):
            members = [j for j, one in enumerate(labels) if one == other and j != i]
            if members:
                prototypes[other] = features[members].mean(axis=0)
            else:
                prototypes.pop(other, None)
        if label in prototypes:
            distances = {other: ((z - p) ** 2).sum() for other, p in prototypes.items()}
            losses.append(distances[label] + np.log(sum(np.exp(-d) for d in distances.values())))
    return float(np.mean(losses)) if losses else 0.0


def known_as_tensors(others: dict[int, np.ndarray], size: int) -> tuple[Tensor, Tensor]:
    means = torch.tensor(np.array(list(others.values())).reshape(-1, size))
    return means, torch.tensor(list(others), dtype=torch.int32)


@given(
    seed=st.integers(0, 10**6),
    labels=st.lists(st.integers(0, 5), min_size=1, max_size=12),
    classes=st.sets(st.integers(3, 9), max_size=4),
)
def test_it_is_eq_7_sample_by_sample(seed: int, labels: list[int], classes: set[int]) -> None:
    random = np.random.default_rng(seed)
    features = random.normal(size=(len(labels), 3))
    others = {label: random.normal(size=3) for label in sorted(classes)}
    loss = prototype_loss(torch.from_numpy(features), torch.tensor(labels), *known_as_tensors(others, 3))
    assert loss.item() == pytest.approx(by_sample(features, labels, others), rel=1e-9, abs=1e-9)


def test_a_sample_does_not_stand_for_its_own_class() -> None:
    """0 and 2 are each other's prototypes, 4 away; a known class lies between, 1 away from both: log(1 + e^3)."""
    features, others = torch.tensor([[0.0], [2.0]]), torch.tensor([[1.0]])
    loss = prototype_loss(features, torch.tensor([5, 5]), others, torch.tensor([8], dtype=torch.int32))
    assert loss.item() == pytest.approx(math.log(1 + math.exp(3)), rel=1e-6)


def test_what_is_known_of_a_class_of_the_batch_is_not_used() -> None:
    features, labels = torch.tensor([[0.0], [2.0], [5.0], [5.5]]), torch.tensor([0, 0, 1, 1])
    others, theirs = torch.tensor([[7.0], [3.0]]), torch.tensor([1, 9])
    losses = [prototype_loss(features, labels, others[rows], theirs[rows]) for rows in ([0, 1], [1])]
    assert losses[0] == losses[1]


def test_a_class_of_one_sample_is_a_rival_only() -> None:
    """3 has no other of its class to be compared with, but 0 and 2 are told from it: d = 4 against 9 and against 1."""
    features, labels = torch.tensor([[0.0], [2.0], [3.0]]), torch.tensor([0, 0, 1])
    loss = prototype_loss(features, labels, torch.zeros(0, 1), torch.zeros(0, dtype=torch.int64))
    expected = (math.log(1 + math.exp(4 - 9)) + math.log(1 + math.exp(4 - 1))) / 2
    assert loss.item() == pytest.approx(expected, rel=1e-6)


def test_where_there_is_nothing_to_tell_apart_nothing_moves() -> None:
    """Only classes of one sample; only one class and none known."""
    none = torch.zeros(0, 2), torch.zeros(0, dtype=torch.int64)
    for labels, others in (([0, 1, 2], (torch.ones(1, 2), torch.tensor([7]))), ([4, 4, 4], none)):
        features = torch.randn(3, 2, generator=torch.Generator().manual_seed(0)).requires_grad_()
        loss = prototype_loss(features, torch.tensor(labels), *others)
        loss.backward()
        assert loss.item() == 0
        assert features.grad is not None
        assert not features.grad.any()


def test_its_gradient_goes_through_the_batchs_prototypes() -> None:
    """Against differences in double precision; what is known stays fixed."""
    random = torch.Generator().manual_seed(0)
    features = torch.randn(6, 3, dtype=torch.float64, generator=random).requires_grad_()
    others = torch.randn(2, 3, dtype=torch.float64, generator=random)
    labels, theirs = torch.tensor([0, 0, 1, 1, 1, 2]), torch.tensor([2, 6])
    assert torch.autograd.gradcheck(lambda z: prototype_loss(z, labels, others, theirs), (features,))


@pytest.mark.parametrize("scale", [0.0, 1e-4, 1e3])
def test_its_gradient_is_finite(scale: float) -> None:
    """At equal features, at nearly equal ones, and where softmax is 0 or 1."""
    features = scale * torch.randn(8, 4, generator=torch.Generator().manual_seed(0))
    features.requires_grad_()
    loss = prototype_loss(features, torch.tensor([0, 0, 0, 1, 1, 1, 2, 2]), torch.ones(1, 4), torch.tensor([3]))
    loss.backward()
    assert loss.isfinite()
    assert features.grad is not None
    assert features.grad.isfinite().all()
