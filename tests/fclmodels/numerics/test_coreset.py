"""Coresets: choices against brute force and SciPy, prototypes over tasks, styles worked out by hand."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from numpy.testing import assert_allclose
from torch import Tensor

from fclmodels.numerics.coreset import mix_styles, running_mean, select_by_herding

SEEDS = st.integers(0, 10**6)
NONE = torch.zeros(0, 12)


def embeddings(seed: int, n: int, stored: int) -> tuple[Tensor, Tensor]:
    """Features of a class's new and of its stored samples, as they come out of a ReLU."""
    random = np.random.default_rng(seed)
    middle = random.normal(size=12)
    X, H = (np.maximum(middle + random.normal(size=(m, 12)), 0) for m in (n, stored))
    return torch.from_numpy(X).float(), torch.from_numpy(H).float()


def distance(selected: np.ndarray, stored: np.ndarray, target: np.ndarray) -> float:
    return float(np.linalg.norm(np.concatenate([stored, selected]).mean(axis=0) - target))


@given(seed=SEEDS, n=st.integers(1, 14), k=st.integers(1, 14), stored=st.integers(0, 4))
def test_herding_is_greedy_by_brute_force(seed: int, n: int, k: int, stored: int) -> None:
    X, H = embeddings(seed, n, stored)
    target = torch.from_numpy(np.random.default_rng(seed).normal(size=12))
    x, h, t = (tensor.double().numpy() for tensor in (X, H, target))
    expected: list[int] = []
    for _ in range(min(k, n)):
        free = [i for i in range(n) if i not in expected]
        expected.append(min(free, key=lambda i: distance(x[[*expected, i]], h, t)))
    assert select_by_herding(X, k, target, H).tolist() == expected


def test_herding_by_hand() -> None:
    """Towards 3: 2 alone, with it 5 (mean 3.5) rather than 7 (4.5) or the other 2, then that 2 (mean 3)."""
    X = torch.tensor([[7.0], [2.0], [2.0], [5.0]])
    target = torch.tensor([3.0])
    assert select_by_herding(X, 3, target, torch.zeros(0, 1)).tolist() == [1, 3, 2]
    # A stored 1 draws the first choice up: the mean with 5 is 3.
    assert select_by_herding(X, 1, target, torch.ones(1, 1)).tolist() == [3]


@pytest.mark.parametrize("stored", [0, 6])
@pytest.mark.parametrize("k", [3, 10])
def test_what_is_chosen_is_nearer_than_random_subsets(stored: int, k: int) -> None:
    """For every single class; its distance as a share of that of 100 of them on average, over 20 classes."""
    shares = []
    for seed in range(20):
        X, H = embeddings(seed, 40, stored)
        target = torch.cat([X, H]).mean(0)
        x, h, t = (tensor.double().numpy() for tensor in (X, H, target))
        random = np.random.default_rng(seed)
        rivals = [distance(x[random.choice(40, k, replace=False)], h, t) for _ in range(100)]
        shares.append(distance(x[select_by_herding(X, k, target, H).numpy()], h, t) / np.mean(rivals))
    assert np.mean(shares) < 0.6
    assert max(shares) < 0.7


def test_a_class_with_no_more_samples_than_wanted() -> None:
    X, H = embeddings(0, 3, 2)
    for k in (3, 9):
        assert sorted(select_by_herding(X, k, X.mean(0), H).tolist()) == [0, 1, 2]
    assert select_by_herding(X[:1], 5, X[0], NONE).tolist() == [0]


def test_a_choice_draws_nothing_at_random() -> None:
    X, H = embeddings(3, 30, 4)
    state = torch.get_rng_state()
    selected = [select_by_herding(X.clone(), 7, X.mean(0), H.clone()).tolist() for _ in range(3)]
    assert selected[0] == selected[1] == selected[2]
    assert len(set(selected[0])) == 7
    assert torch.equal(torch.get_rng_state(), state)


def test_a_running_mean_by_hand() -> None:
    """Ten earlier samples stand at 2, which two stored ones say; five new ones at 5: (10 * 2 + 5 * 5) / 15."""
    stored, new = torch.tensor([[1.0], [3.0]]), torch.full((5, 1), 5.0)
    assert running_mean(stored, 10, new).item() == pytest.approx(3)
    assert running_mean(stored, 10, new[:0]).item() == pytest.approx(2)
    # Of earlier samples of which nothing is stored nothing is known.
    assert running_mean(stored[:0], 10, new).item() == pytest.approx(5)


@given(seed=SEEDS, sizes=st.lists(st.integers(1, 9), min_size=1, max_size=6))
def test_a_running_mean_over_tasks_is_the_mean_of_all_samples(seed: int, sizes: list[int]) -> None:
    """Where what is stored has the mean of what it stands for."""
    random = np.random.default_rng(seed)
    tasks = [random.normal(3, 2, (size, 4)).astype(np.float32) for size in sizes]
    mean, count = torch.zeros(0, 4), 0
    for X in tasks:
        mean, count = running_mean(mean, count, torch.from_numpy(X))[None], count + len(X)
    assert_allclose(mean[0], np.concatenate(tasks).astype(float).mean(axis=0), atol=1e-9)


def images(seed: int, low: int, high: int) -> Tensor:
    return torch.from_numpy(np.random.default_rng(seed).integers(low, high, (3, 2, 6, 5), dtype=np.uint8))


def test_a_mixed_style_by_hand() -> None:
    """(50, 50) and (120, 20) are mean and deviation: half of each is (85, 35), so 0 and 100 become 50 and 120."""
    content = torch.tensor([[[[0, 100], [100, 0]], [[40, 40], [40, 40]]]], dtype=torch.uint8)
    style = torch.tensor([[[[100, 140], [140, 100]], [[50, 110], [50, 110]]]], dtype=torch.uint8)
    mixed = mix_styles(content, style, 0.5)
    assert mixed.dtype == torch.uint8
    # The second channel has no contrast that could grow: its brightness goes half of the way from 40 to 80.
    assert mixed.tolist() == [[[[50, 120], [120, 50]], [[60, 60], [60, 60]]]]


@given(seed=SEEDS)
def test_with_all_of_its_own_style_an_image_stays(seed: int) -> None:
    content, style = images(seed, 0, 256), images(seed + 1, 0, 256)
    assert torch.equal(mix_styles(content, style, 1.0), content)


@given(seed=SEEDS)
def test_with_none_of_its_own_style_it_has_the_others(seed: int) -> None:
    """Each channel of each image, up to the rounding of pixels; the pattern stays the content's."""
    content, style = images(seed, 0, 256), images(seed + 1, 110, 150)
    mixed = mix_styles(content, style, 0.0).double().numpy()
    x, y = content.double().numpy(), style.double().numpy()
    assert_allclose(mixed.mean((2, 3)), y.mean((2, 3)), atol=0.5)
    assert_allclose(mixed.std((2, 3)), y.std((2, 3)), atol=0.5)
    for pattern, given_ in zip(mixed.reshape(6, -1), x.reshape(6, -1), strict=True):
        assert np.corrcoef(pattern, given_)[0, 1] > 0.99


def test_what_would_leave_the_range_of_pixels_is_cut_off() -> None:
    content = torch.tensor([[[[0] * 9 + [90]]]], dtype=torch.uint8)
    style = torch.tensor([[[[0] * 5 + [255] * 5]]], dtype=torch.uint8)
    # 9 of 10 lie a third of a deviation below the mean, one lies three above: 127.5 - 42.5 and far beyond 255.
    assert mix_styles(content, style, 0.0).flatten().tolist() == [85] * 9 + [255]
