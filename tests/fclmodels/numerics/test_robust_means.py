"""Robust means against NumPy and hand-made cases: whoever is at which place, and what bad vectors can do."""

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.testing import assert_allclose
from scipy.stats import trim_mean

from fclmodels.errors import UserError
from fclmodels.numerics import robust_means
from fclmodels.numerics.robust_means import Aggregation, robust_mean

FEW = settings(max_examples=30)
RULES: tuple[Aggregation, ...] = ("clipped", "median", "trimmed-mean", "krum", "multi-krum")
ORDERLESS: tuple[Aggregation, ...] = ("median", "trimmed-mean")


def mean(kind: Aggregation, X: np.ndarray, bad: float = 0.2, clip: float = 1.0, w: Any = None) -> np.ndarray:
    """A rule's mean of the rows of X, which travel as w x in two tensors."""
    w = np.ones(len(X)) if w is None else np.asarray(w, float)
    sent = torch.from_numpy(X * w[:, None])
    vectors = [{"a": x[:2].reshape(2, 1), "b": x[2:]} for x in sent]
    result = robust_mean(kind, bad, clip, vectors, torch.from_numpy(1 / w), torch.from_numpy(w))
    assert result["a"].shape == (2, 1)
    return torch.cat([result["a"].flatten(), result["b"]]).numpy()


def drawn(seed: int, n: int, d: int = 5) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=(n, d))


def krum_of(X: np.ndarray, f: int) -> np.ndarray:
    """Scores as Blanchard et al. write them."""
    D = ((X[:, None] - X) ** 2).sum(-1)
    return np.array([np.sort(np.delete(D[i], i))[: max(1, len(X) - f - 2)].sum() for i in range(len(X))])


@FEW
@given(seed=st.integers(0, 99), n=st.integers(1, 12), weights=st.booleans())
def test_median_and_trimmed_mean_are_numpys_and_scipys_whatever_the_weights(seed: int, n: int, weights: bool) -> None:
    X = drawn(seed, n)
    w = np.random.default_rng(seed).uniform(0.5, 50, n) if weights else None
    assert_allclose(mean("median", X, w=w), np.median(X, 0), atol=1e-9)
    assert_allclose(mean("trimmed-mean", X, 0.0, w=w), X.mean(0), atol=1e-9)
    if n >= 5:
        cut = -(-n // 5)
        assert_allclose(mean("trimmed-mean", X, 0.2, w=w), trim_mean(X, cut / n + 1e-12), atol=1e-9)


@FEW
@given(seed=st.integers(0, 99), n=st.integers(5, 12))
def test_krum_takes_what_its_scores_say(seed: int, n: int) -> None:
    X, f = drawn(seed, n), 1
    order = krum_of(X, f).argsort()
    assert_allclose(mean("krum", X, 1 / n), X[order[0]], atol=1e-9)
    assert_allclose(mean("multi-krum", X, 1 / n), X[order[: n - f]].mean(0), atol=1e-9)


@FEW
@given(seed=st.integers(0, 99), n=st.integers(1, 12), clip=st.floats(0.1, 3))
def test_clipping_weighs_what_is_no_longer_than_the_bound(seed: int, n: int, clip: float) -> None:
    X, w = drawn(seed, n), np.random.default_rng(seed).uniform(0.5, 50, n)
    lengths = np.linalg.norm(X, axis=1)
    bound = clip * np.sort(lengths)[(n - 1) // 2]
    expected = np.average(X * np.minimum(1, bound / lengths)[:, None], axis=0, weights=w)
    assert_allclose(mean("clipped", X, clip=clip, w=w), expected, atol=1e-9)
    assert_allclose(mean("clipped", X, clip=1e9, w=w), np.average(X, axis=0, weights=w), atol=1e-9)


@pytest.mark.parametrize("kind", RULES)
@FEW
@given(seed=st.integers(0, 30), n=st.integers(5, 9), data=st.data())
def test_it_does_not_matter_who_stands_where(kind: Aggregation, seed: int, n: int, data: st.DataObject) -> None:
    X = drawn(seed, n)
    order = list(data.draw(st.permutations(range(n))))
    result, again = mean(kind, X, 1 / n), mean(kind, X[order], 1 / n)
    if kind in ORDERLESS:
        assert (result == again).all()
    assert_allclose(again, result, atol=1e-9)


@pytest.mark.parametrize("kind", RULES)
@FEW
@given(seed=st.integers(0, 30), f=st.integers(1, 3), scale=st.sampled_from([1.0, 1e3, 1e8]), together=st.booleans())
def test_f_arbitrary_vectors_cannot_carry_the_mean_away(
    kind: Aggregation, seed: int, f: int, scale: float, together: bool
) -> None:
    """With n > 2 f + 2 within a few lengths of the good ones; the plain mean goes wherever they say."""
    good = drawn(seed, 2 * f + 4)
    evil = scale * (np.ones((f, 5)) if together else drawn(seed + 1, f))
    X = np.concatenate([evil, good])
    largest = np.linalg.norm(good, axis=1).max()
    assert np.linalg.norm(mean(kind, X, f / len(X))) <= 5**0.5 * largest + 1e-6
    if scale == 1e8 and together:
        assert np.linalg.norm(X.mean(0)) > 1e6


@pytest.mark.parametrize("kind", RULES)
def test_equal_vectors_are_their_mean_and_of_one_it_is_that_one(kind: Aggregation) -> None:
    for n in (1, 2, 5):
        X = np.repeat(drawn(0, 1), n, 0)
        assert_allclose(mean(kind, X, 0.0), X[0], atol=1e-9)
        assert_allclose(mean(kind, 0 * X, 0.0), 0 * X[0], atol=1e-9)


def test_large_tensors_pass_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    X = drawn(3, 7)
    whole = mean("median", X)
    monkeypatch.setattr(robust_means, "NUMBERS", 8)
    assert (mean("median", X) == whole).all()


def test_too_many_bad_ones_for_a_rule_are_refused_by_its_name() -> None:
    with pytest.raises(UserError, match=r"robust\.bad: krum needs more than 4 replies for 1 bad ones, not 4"):
        mean("krum", drawn(0, 4), 0.2)
    with pytest.raises(UserError, match=r"robust\.bad: 1 of 2 replies cut at both ends leave none"):
        mean("trimmed-mean", drawn(0, 2), 0.2)
