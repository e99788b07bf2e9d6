"""Stored features: the ridge regression that moves them, and how near it comes."""

from collections.abc import Callable

import numpy as np
import pytest
import torch
from numpy.testing import assert_allclose

from fclmodels.methods.fedprotip import FedProTIP
from fclmodels.methods.parts.feature_memory import RIDGE, STORED, compute_features, move_features

# Nothing is protected, so that features drift.
DRIFTING = ("model.backbone=mlp", "model.hidden=24", "optimizer.lr=0.2", "federation.rounds=4")


def test_features_move_by_the_ridge_regression_of_those_that_are_seen() -> None:
    """In its primal form, by NumPy."""
    random = np.random.default_rng(0)
    A, before, after = (random.normal(size=shape) for shape in ((7, 5), (9, 5), (9, 5)))
    ridge = RIDGE * np.trace(before @ before.T) / 9
    E = np.linalg.solve(before.T @ before + ridge * np.eye(5), before.T @ (after - before))
    assert_allclose(move_features(*map(torch.from_numpy, (A, before, after))), A + A @ E)


def test_features_that_do_not_move_leave_others_where_they_are() -> None:
    A, X = torch.randn(7, 5), torch.randn(3, 5)
    assert torch.equal(move_features(A, X, X), A)
    assert move_features(A, torch.zeros(3, 5), torch.zeros(3, 5)).isfinite().all()


def test_moved_features_are_nearer_to_what_the_network_makes_of_the_images_now(
    method_of: Callable, after_each_task: Callable, client_of: Callable, splits_of: Callable, federate: Callable
) -> None:
    """Of the first task's images after the second, over five seeds with partitions of their own: nearer in the mean."""
    distances = {"drift": [], "features": []}
    for seed in range(5):
        splits = splits_of(train=20, seed=seed, same_classes=True)
        for later, of_seeds in distances.items():
            method = method_of(
                FedProTIP, *DRIFTING, splits=splits, seed=seed, tip_later=later, threshold=0.01, vectors="trained"
            )
            memories = {}
            remember = method.identity.remember

            def note(client, load, payload, remember=remember, memories=memories):  # type: ignore[no-untyped-def]
                memory, drift = remember(client, load, payload)
                memories[client.index, client.task] = memory
                return memory, drift

            method.identity.remember = note
            server = federate(method, 2)
            network = method.networks.load(server.spec, server.weights)
            for k in range(4):
                batches = list(method.run.batches.iterate_ordered(splits.select_rows(0, "train", k), 64))
                now = compute_features(network, batches)
                of_seeds.append(float((memories[k, 1]["features"]["0"] - now).norm() / now.norm()))
    assert np.mean(distances["drift"]) < 0.8 * np.mean(distances["features"]), distances
    assert np.mean(distances["features"]) > 0.05


@pytest.mark.parametrize("later", ["drift", "features"])
def test_the_server_knows_how_far_features_have_moved(
    later: str, method_of: Callable, after_each_task: Callable, splits_of: Callable
) -> None:
    """Over all clients, by a forward pass of both models; it keeps the earlier one during a task only."""
    splits = splits_of(train=20)
    method = method_of(FedProTIP, *DRIFTING, splits=splits, tip_later=later)
    first, second = after_each_task(method)
    assert "before" not in first.knowledge
    assert "before" not in second.knowledge
    drifts = second.knowledge["tip"]["drifts"]
    assert drifts[0] is None  # nothing was learned before
    if later == "features":
        assert drifts == [None, None]
        return
    start = method.start_task(first, 1)
    moved = size = 0.0
    for k in range(4):
        batches = list(method.run.batches.iterate_ordered(splits.select_rows(1, "train", k), 64))
        X, Y = (
            compute_features(method.networks.load(second.spec, weights), batches)
            for weights in (start.weights, second.weights)
        )
        moved, size = moved + float((Y - X).square().sum()), size + float(X.square().sum())
    assert drifts[1] == pytest.approx((moved / size) ** 0.5, rel=1e-4)
    (line,) = (line for line in method.list_remarks(second.knowledge) if "features" in line)
    assert f"{100 * drifts[1]:.0f} %" in line


def test_a_client_stores_no_more_than_512_features_of_a_task(
    method_of: Callable, client_of: Callable, federate: Callable, splits_of: Callable
) -> None:
    method = method_of(FedProTIP, "model.backbone=mlp", splits=splits_of(train=600, clients=1), samples=None)
    server = federate(method, 1)
    payload = method.core_bases.make_payload(server, server.knowledge["bases"] | {"features": torch.zeros(12, 0)})
    memory = method.core_bases.answer(client_of(method, 0), payload).memory
    assert memory["features"]["0"].shape == (STORED, 12)
    assert memory["labels"]["0"].shape == (STORED,)
