"""The head that PIP's server fits to all classes' Gaussians: by hand, under drift, and as the federation runs it."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from fclmodels.backbones.model.prompt_adapters import shrink_prompts
from fclmodels.errors import UserError
from fclmodels.methods.parts.refitted_head import RefittedHead
from fclmodels.methods.pip_dualp import PipDualP
from fclmodels.methods.pip_l2p import PipL2P
from fclmodels.storage import trees

VIT = tuple(
    f"model.{setting}"
    for setting in ("backbone=vit", "patch=3", "width=8", "depth=2", "attention_heads=2", "mlp_width=8")
)
KINDS = [(PipDualP, {"g_layers": (0,), "e_layers": (1,), "length": 2}), (PipL2P, {"pool": 4, "top_k": 2, "length": 2})]
BOTH = pytest.mark.parametrize(("kind", "settings"), KINDS, ids=["dualp", "l2p"])


def features_of(method: Any, server: Any, rows: Any) -> tuple[np.ndarray, np.ndarray]:
    """Return the features of rows as they are at inference, and their labels."""
    network = method.networks.load(server.spec, server.weights).eval()
    (batch,) = method.run.batches.iterate_ordered(rows, 1000)
    with torch.no_grad():
        return network.backbone(batch.inputs).double().numpy(), batch.labels.numpy()


@BOTH
def test_after_the_first_task_the_head_is_the_linear_discriminant(
    kind: Any, settings: dict[str, Any], method_of: Callable, federate: Callable
) -> None:
    method = method_of(kind, *VIT, refit=True, **settings)
    server = federate(method, 1)
    X, y = features_of(method, server, method.run.splits.select_rows(0, "train"))
    means = np.stack([X[y == c].mean(0) for c in range(2)])
    Sigma = sum((X[y == c] - means[c]).T @ (X[y == c] - means[c]) for c in range(2)) / len(X)
    W = means @ np.linalg.inv(Sigma + 0.01 * np.trace(Sigma) / 8 * np.eye(8))
    head = method.find_head(server)
    np.testing.assert_allclose(head.weight, W, rtol=1e-3, atol=1e-3)
    np.testing.assert_allclose(head.bias, -(W * means).sum(1) / 2, rtol=1e-3, atol=1e-3)


@BOTH
def test_training_is_that_without_it(
    kind: Any, settings: dict[str, Any], method_of: Callable, federate: Callable
) -> None:
    """It only answers: prompts and trained heads are the same to the bit."""
    plain, refitted = (federate(method_of(kind, *VIT, refit=refit, **settings)) for refit in (False, True))
    assert trees.digest(plain.weights) == trees.digest(refitted.weights)


@BOTH
@pytest.mark.parametrize("lr", [1e-30, 0.5])
def test_earlier_means_move_by_the_drift_of_samples_near_them(
    lr: float, kind: Any, settings: dict[str, Any], method_of: Callable, federate: Callable
) -> None:
    """On the second task's samples, with the prompts that the first task's keys choose."""
    method = method_of(kind, *VIT, f"optimizer.lr={lr}", refit=True, **settings)
    first, second = federate(method, 1), federate(method, 2)
    rows, keys = method.run.splits.select_rows(1, "train"), "backbone.prompts.keys"
    before, _ = features_of(method, first, rows)
    shrunk = shrink_prompts(second.weights, method.network.adapter, 1)
    heads = {name: tensor for name, tensor in first.weights.items() if name.startswith("heads.")}
    after, _ = features_of(method, replace(first, weights={**shrunk, **heads, keys: first.weights[keys]}), rows)
    classes = first.knowledge["classes"]
    old, new = classes["means"].numpy(), second.knowledge["classes"]["means"][:2].numpy()
    spread = np.trace(classes["scatter"].numpy()) / classes["weight"].sum().item()
    near = np.exp(-((before[None] - old[:, None]) ** 2).sum(2) / (2 * spread))
    expected = old + near @ (after - before) / near.sum(1, keepdims=True)
    np.testing.assert_allclose(new, expected, atol=1e-5)
    assert np.allclose(new, old, atol=1e-5) == (lr < 1e-3)


@pytest.mark.parametrize(
    ("settings", "overrides", "line"),
    [
        ({}, ("model.head=per-task",), "refit does nothing under model.head: per-task"),
        ({"head": "own"}, (), "refit fits one head for all clients"),
    ],
)
def test_settings_under_which_there_is_no_such_head_are_refused(
    settings: dict[str, Any], overrides: tuple[str, ...], line: str, method_of: Callable
) -> None:
    with pytest.raises(UserError, match=line):
        method_of(PipDualP, *VIT, *overrides, refit=True, **KINDS[0][1], **settings)


def test_without_it_nothing_is_asked(method_of: Callable) -> None:
    method = method_of(PipDualP, *VIT, **KINDS[0][1])
    assert not any(isinstance(e.answer.__self__, RefittedHead) for e in method.exchanges.values())
