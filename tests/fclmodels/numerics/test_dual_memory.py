"""DualGPM against worked numbers, the release's loops in NumPy, and what factors must leave alone."""

import numpy as np
import pytest
import torch

from fclmodels.numerics.dual_memory import DualMemory, design_factor, extend_memory

WORKED = torch.tensor([[4.0, 0, 0], [0, 2, 1], [0, 1, 2]]).double()


def test_a_factor_of_worked_numbers() -> None:
    e1 = torch.tensor([[1.0], [0], [0]]).double()
    A = design_factor(WORKED, DualMemory(e1, False), 1)
    np.testing.assert_allclose(A.abs(), [[0, 0.408248, 0.408248]], atol=1e-6)
    free = torch.eye(3).double()[:, 1:]
    np.testing.assert_allclose(design_factor(WORKED, DualMemory(free, True), 1).abs(), A.abs(), atol=1e-9)


def test_the_first_task_takes_shares_strictly_below() -> None:
    """Of 4, 3 and 1 the squares have the shares .615, .962 and 1; at least one direction is taken."""
    assert extend_memory(WORKED, None, 0.95).basis.shape[1] == 1
    assert extend_memory(WORKED, None, 0.1).basis.shape[1] == 1
    beyond = extend_memory(WORKED, None, 0.99)  # two of three: the complement is stored
    assert beyond.spans_free
    np.testing.assert_allclose(beyond.basis[:, 0].abs(), [0, 2**-0.5, 2**-0.5], atol=1e-9)


def follow_the_release(grams: list[np.ndarray], thresholds: list[float]) -> tuple[np.ndarray, bool]:
    """Its loops, a step at a time.

    `update_DualGPM` itself, run outside this project on 300 random matrices [12, 12] in sequences of five tasks, gave
    the projections of `extend_memory` to 1.7e-15. Where the first task takes half or more, it calls that basis one of
    what is free; here its complement is.
    """
    M, retains = np.zeros((0, 0)), False
    for task, (H, threshold) in enumerate(zip(grams, thresholds, strict=True)):
        total = (np.linalg.svd(H)[1] ** 2).sum()
        if task == 0:
            U, S, _ = np.linalg.svd(H)
            M = U[:, : max(1, int(np.sum(np.cumsum(S**2) / total < threshold)))]
        else:
            part = M @ M.T @ H if retains else H - M @ M.T @ H
            U, S, _ = np.linalg.svd(part)
            share, ratio, r = (S**2).sum() / total, S**2 / total, 0
            covered = share if retains else 1 - share
            for value in ratio:
                if (covered >= 1 - threshold) if retains else (covered < threshold):
                    covered += -value if retains else value
                    r += 1
                else:
                    break
            if r and retains:
                rest = M - U[:, :r] @ U[:, :r].T @ M
                M = np.linalg.svd(rest)[0][:, : M.shape[1] - r]
            elif r:
                M = np.hstack([M, U[:, :r]])
        if not retains and M.shape[1] > len(M) / 2:
            M, retains = np.linalg.svd(M)[0][:, M.shape[1] :], True
    return M, retains


@pytest.mark.parametrize("lam", [0.5, 0.8, 0.95, 0.99])
def test_it_is_the_releases_memory(lam: float) -> None:
    random = np.random.default_rng(int(1000 * lam))
    grams = []
    for _ in range(5):
        X = random.normal(size=(8, 3)) @ random.normal(size=(3, 40)) + 0.05 * random.normal(size=(8, 40))
        grams.append(X @ X.T)
    thresholds = [lam + (1 - lam) * task / 5 for task in range(5)]
    memory = None
    for count, (H, threshold) in enumerate(zip(grams, thresholds, strict=True), start=1):
        memory = extend_memory(torch.tensor(H), memory, threshold)
        M, retains = follow_the_release(grams[:count], thresholds[:count])
        assert memory.spans_free == retains
        assert memory.basis.shape[1] == M.shape[1] <= 4
        np.testing.assert_allclose(memory.basis @ memory.basis.T, M @ M.T, atol=1e-6)


def test_factors_leave_taken_inputs_alone_and_have_no_rows_where_nothing_is_free() -> None:
    random = torch.Generator().manual_seed(0)
    X = torch.randn(6, 2, generator=random).double() @ torch.randn(2, 30, generator=random).double()
    memory = DualMemory(torch.linalg.qr(X[:, :2]).Q, False)
    new = torch.randn(6, 30, generator=random).double()
    A = design_factor(new @ new.T, memory, 5)
    assert (A @ X).abs().max() < 1e-5 * X.abs().max()
    assert (A.norm(dim=1) > 0.5).sum() == 4
    assert not design_factor(X @ X.T, memory, 2).any()
