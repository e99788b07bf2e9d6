"""TIP against a plain reading of FedProTIP's section 4.4 in NumPy, one sample and one client after another."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from fclmodels.numerics.task_relevance import Router, batch_relevance, compare, rate, relevance
from fclmodels.storage import trees


def scores(lengths: Tensor, references: Tensor, has_reference: Tensor) -> Tensor:
    return rate(compare(lengths, references), has_reference)


def bases_of(ranks: list[int], width: int, seed: int = 0) -> tuple[Tensor, ...]:
    """Mutually orthonormal bases with these ranks."""
    whole = np.linalg.qr(np.random.default_rng(seed).normal(size=(width, width)))[0]
    return tuple(
        torch.from_numpy(part.copy()) for part in np.split(whole[:, : sum(ranks)], np.cumsum(ranks)[:-1], axis=1)
    )


def by_vote(sample: np.ndarray, references: np.ndarray, has_reference: np.ndarray) -> tuple[list[int], np.ndarray]:
    """Votes for each task and its mean cosine, of one relevance vector [T]."""
    clients, tasks = has_reference.shape
    votes, cosines = [0] * tasks, np.full((clients, tasks), np.nan)
    for k in range(clients):
        for tau in np.flatnonzero(has_reference[k]):
            lengths = np.linalg.norm(sample) * np.linalg.norm(references[k, tau])
            cosines[k, tau] = sample @ references[k, tau] / lengths if lengths else 0
        if has_reference[k].any():
            votes[int(np.nanargmax(cosines[k]))] += 1
    return votes, np.array(
        [cosines[has_reference[:, tau], tau].mean() if has_reference[:, tau].any() else 0 for tau in range(tasks)]
    )


@given(
    ranks=st.lists(st.integers(0, 3), min_size=1, max_size=5),
    samples=st.integers(1, 6),
    seed=st.integers(0, 999),
)
def test_relevance_is_the_length_of_the_projection(ranks: list[int], samples: int, seed: int) -> None:
    bases = bases_of(ranks, 16, seed)
    features = np.random.default_rng(seed).normal(size=(samples, 16))
    result = relevance(torch.from_numpy(features), bases).numpy()
    projected = [features @ (U @ U.T).numpy() for U in bases]
    np.testing.assert_allclose(result, np.stack([np.linalg.norm(p, axis=1) for p in projected], 1), atol=1e-12)
    whole = batch_relevance(torch.from_numpy(result))
    np.testing.assert_allclose(whole, [np.linalg.norm(p) for p in projected], atol=1e-12)
    assert (result[:, [r == 0 for r in ranks]] == 0).all()


def test_all_of_a_feature_in_one_subspace_is_relevant_to_that_task_only() -> None:
    bases = bases_of([2, 1, 3], 8)
    inside = 5 * bases[1][:, 0]
    torch.testing.assert_close(relevance(inside[None], bases), torch.tensor([[0.0, 5, 0]], dtype=torch.float64))


@given(
    clients=st.integers(1, 5),
    tasks=st.integers(1, 6),
    missing=st.floats(0, 1),
    seed=st.integers(0, 9999),
)
def test_scores_are_votes_and_their_order_among_equals_that_of_mean_cosines(
    clients: int, tasks: int, missing: float, seed: int
) -> None:
    random = np.random.default_rng(seed)
    references = random.gamma(1, size=(clients, tasks, tasks))
    references[random.random((clients, tasks)) < 0.1] = 0
    has_reference = random.random((clients, tasks)) >= missing
    samples = random.gamma(1, size=(7, tasks))
    samples[0] = 0
    result = scores(*map(torch.from_numpy, (samples, references, has_reference))).numpy()
    for sample, score in zip(samples, result, strict=True):
        votes, cosines = by_vote(sample, references, has_reference)
        assert np.floor(score).astype(int).tolist() == votes
        leaders = [tau for tau in range(tasks) if votes[tau] == max(votes)]
        assert score.argmax() in leaders
        assert cosines[score.argmax()] == pytest.approx(max(cosines[leaders]), abs=1e-12)


@given(seed=st.integers(0, 999), scale=st.floats(1e-6, 1e6))
def test_neither_the_size_of_a_sample_nor_that_of_a_reference_matters(seed: int, scale: float) -> None:
    random = np.random.default_rng(seed)
    samples, references = (
        torch.from_numpy(random.gamma(1, size=(5, 4))),
        torch.from_numpy(random.gamma(1, size=(3, 4, 4))),
    )
    has_reference = torch.ones(3, 4, dtype=torch.bool)
    torch.testing.assert_close(
        scores(scale * samples, references, has_reference), scores(samples, references, has_reference)
    )
    torch.testing.assert_close(
        scores(samples, scale * references, has_reference), scores(samples, references, has_reference)
    )


def test_the_majority_beats_a_single_surer_client() -> None:
    """Two clients see the sample a little nearer to task 0; for the third it is task 1 without any doubt."""
    sample = torch.tensor([1.0, 0.9])
    references = torch.tensor([[[1, 0.8], [0.8, 1]], [[1, 0.8], [0.8, 1]], [[0.1, -1], [1, 0.9]]])
    has_reference = torch.ones(3, 2, dtype=torch.bool)
    result = scores(sample, references, has_reference)
    assert result.long().tolist() == [2, 1]
    of_task = torch.nn.functional.cosine_similarity(sample, references, dim=-1).mean(0)
    assert of_task[1] > of_task[0]
    assert scores(sample, references[1:], has_reference[1:]).argmax() == 1  # one vote each: the surer one decides


def test_a_client_votes_only_for_tasks_that_it_has_a_reference_of() -> None:
    sample, reference = torch.tensor([0.0, 1.0]), torch.eye(2)[None]
    assert scores(sample, reference, torch.tensor([[True, True]])).argmax() == 1
    assert scores(sample, reference, torch.tensor([[True, False]])).long().tolist() == [1, 0]
    assert scores(sample, reference, torch.tensor([[False, False]])).long().tolist() == [0, 0]


@pytest.mark.parametrize("tasks", [1, 2, 4])
def test_nothing_but_zeros_is_no_nan(tasks: int) -> None:
    has_reference = torch.ones(2, tasks, dtype=torch.bool)
    for references in (torch.zeros(2, tasks, tasks), torch.rand(2, tasks, tasks)):
        assert scores(torch.zeros(3, tasks), references, has_reference).isfinite().all()
        assert scores(torch.rand(3, tasks), references, has_reference).isfinite().all()
        assert scores(torch.rand(tasks), references, ~has_reference).isfinite().all()


def test_equal_votes_of_many_clients_are_decided_by_the_cosine() -> None:
    """500 votes each; the cosines differ by 1e-5, for which single precision has no room beside the votes."""
    sample = torch.tensor([1.0, 1.0 + 2e-5], dtype=torch.float64)
    references = torch.eye(2, dtype=torch.float64).repeat(1000, 1, 1)
    has_reference = torch.zeros(1000, 2, dtype=torch.bool)
    has_reference[:500, 0] = has_reference[500:, 1] = True
    assert scores(sample, references, has_reference).argmax() == 1
    assert scores(sample.flip(0), references, has_reference).argmax() == 0


def router(clients: int = 3, seed: int = 0) -> Router:
    """Tasks live in their own subspaces, all but a little; the last one has no basis of its own."""
    random = torch.Generator().manual_seed(seed)
    bases = tuple(basis.float() for basis in bases_of([3, 2, 0], 8, seed))
    references = torch.stack(
        [torch.tensor([[3.0, 0.5, 0], [0.5, 3, 0], [1, 1, 0]]) + 0.1 * torch.rand(3, 3, generator=random)] * clients
    )
    return Router(bases, references, torch.ones(clients, 3, dtype=torch.bool))


def test_a_router_tells_samples_of_different_tasks_apart() -> None:
    made = router()
    random = torch.Generator().manual_seed(1)
    of_first = torch.randn(20, 3, generator=random) @ made.bases[0].T
    of_second = torch.randn(20, 2, generator=random) @ made.bases[1].T
    assert made.score_samples(of_first).argmax(1).tolist() == [0] * 20
    assert made.score_samples(of_second).argmax(1).tolist() == [1] * 20
    assert made.score_batch(of_second).argmax() == 1


def test_each_sample_is_judged_by_itself_and_a_batch_of_one_as_its_sample() -> None:
    made, features = router(), torch.randn(12, 8, generator=torch.Generator().manual_seed(2))
    together = made.score_samples(features)
    for place in range(12):
        alone = features[place : place + 1]
        torch.testing.assert_close(made.score_samples(alone)[0], together[place])
        torch.testing.assert_close(made.score_batch(alone), together[place])


def test_a_batch_is_judged_by_the_norm_of_its_projection() -> None:
    """One long feature of task 1 outweighs four short ones of task 0, though more samples are of task 0."""
    made = router()
    short, long = made.bases[0][:, 0], 5 * made.bases[1][:, 0]
    batch = torch.stack([short, short, short, short, long])
    assert made.score_samples(batch).argmax(1).tolist() == [0, 0, 0, 0, 1]
    assert made.score_batch(batch).argmax() == 1


def test_a_router_comes_back_from_its_file(tmp_path: Path) -> None:
    made = router()
    trees.save(made.to_tree(), tmp_path / "router.safetensors")
    again = Router.from_tree(trees.load(tmp_path / "router.safetensors"))
    assert trees.digest(again.to_tree()) == trees.digest(made.to_tree())
    features = torch.randn(5, 8, generator=torch.Generator().manual_seed(3))
    assert torch.equal(again.score_samples(features), made.score_samples(features))


def test_a_sample_of_too_small_a_margin_is_not_routed() -> None:
    """The margin is the best task's mean cosine less the next one's."""
    bases = (torch.eye(3)[:, :1], torch.eye(3)[:, 1:2])
    router = Router(bases, torch.eye(2)[None], torch.ones(1, 2, dtype=torch.bool), least_margin=0.5)
    features = torch.tensor([[1.0, 0, 0], [0, 2, 0], [1, 1.01, 0], [3, 0.5, 9]])
    margins = router.measure_margins(features)
    lengths = features[:, :2] / features[:, :2].norm(dim=1, keepdim=True)
    torch.testing.assert_close(margins.float(), (lengths[:, 0] - lengths[:, 1]).abs())
    assert router.score_samples(features).argmax(1).tolist() == [0, 1, 1, 0]
    assert router.find_unsure(features).tolist() == [False, False, True, False]
    assert not replace(router, least_margin=None).find_unsure(features).any()


def test_the_releases_rule_is_the_mean_cosine_with_batches_without_the_first_entry() -> None:
    """Of three tasks; references are means of unit vectors, so that they are shorter where batches differ."""
    random = np.random.default_rng(0)
    batches = random.gamma(1, size=(3, 5, 3))  # of each task five
    batches[..., 0] = 0
    units = batches / np.linalg.norm(batches, axis=-1, keepdims=True)
    bases = bases_of([1, 1, 1], 3)
    references = torch.from_numpy(units.mean(1))[None]
    router = Router(bases, references, torch.ones(1, 3, dtype=torch.bool), rule="release")
    features = torch.from_numpy(random.gamma(1, size=(6, 3)))
    lengths = relevance(features, bases).numpy()[:, 1:]
    lengths = lengths / np.linalg.norm(lengths, axis=1, keepdims=True)
    mean_cosine = np.einsum("bt,sjt->bsj", lengths, units[..., 1:]).mean(-1)
    assert router.score_samples(features).argmax(1).tolist() == mean_cosine.argmax(1).tolist()


def test_of_two_tasks_the_releases_rule_takes_the_nearer_length() -> None:
    bases = (torch.eye(2)[:, :1], torch.eye(2)[:, 1:])
    references = torch.tensor([[[9.0, 1.0], [9.0, 5.0]]])
    router = Router(bases, references, torch.ones(1, 2, dtype=torch.bool), rule="release")
    features = torch.tensor([[7.0, 0.2], [0.0, 2.9], [0.0, 3.1], [1.0, 8.0]])
    assert router.score_samples(features).argmax(1).tolist() == [0, 0, 1, 1]
    assert router.score_batch(features[2:]).argmax() == 1
