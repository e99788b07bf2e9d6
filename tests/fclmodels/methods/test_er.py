"""ER+FL: single steps against gradients worked out in NumPy or left to autograd."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from numpy.testing import assert_allclose
from torch.nn.functional import cross_entropy

from fclmodels.data.batches import Batch
from fclmodels.data.splits.split_reader import Rows, Splits
from fclmodels.federation.client import Client
from fclmodels.federation.server import Server
from fclmodels.methods.er import Er
from fclmodels.methods.parts.replay_memory import pack_samples

# One step a round, and memories that are drawn whole: what a draw would choose is no matter.
ONE_STEP = ("federation.batch_size=64", "optimizer.lr=0.1")


def third_task(method: Any) -> Server:
    server = method.create_server()
    for task in range(3):
        server = method.start_task(server, task)
    return server


def remembering(method: Any, client_of: Callable, sizes: tuple[int, ...] = (3, 2)) -> tuple[Client, Batch]:
    """Client 0 in the third task with so many samples of each earlier one in memory."""
    rows = [method.select_rows(task, 0).take(np.arange(size)) for task, size in enumerate(sizes)]
    raw = method.run.batches.read_raw(Rows.concatenate(rows))
    return client_of(method, 0, 2, memory=pack_samples(raw)), method.run.batches.augment_raw(raw, torch.Generator())


def head_gradient(W: np.ndarray, b: np.ndarray, f: np.ndarray, y: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Of the sum over samples of the cross entropy of softmax(W f + b): (P - Y)^T f and its column sums."""
    z = f @ W.T + b
    p = np.exp(z - z.max(axis=1, keepdims=True))
    p /= p.sum(axis=1, keepdims=True)
    p[np.arange(len(y)), y] -= 1
    return p.T @ f, p.sum(axis=0)


def features_of(method: Any, server: Server, inputs: torch.Tensor) -> np.ndarray:
    return method.networks.load(server.spec, server.weights).backbone(inputs).detach().double().numpy()


@pytest.mark.parametrize("loss_over", ["seen", "task"])
def test_a_step_of_a_growing_head(
    loss_over: str, method_of: Callable, client_of: Callable, splits_of: Callable[..., Splits]
) -> None:
    """Half the mean gradient of 8 new samples and half that of 5 old ones; of a task alone, over its two rows."""
    method = method_of(Er, *ONE_STEP, f"model.loss_over={loss_over}", splits=splits_of(tasks=3))
    server = third_task(method)
    client, old = remembering(method, client_of)
    (new,) = method.run.batches.iterate_ordered(client.rows, 64)
    update = method.train(client, method.make_payload(server)).tensors["update"]

    W, b = (server.weights[f"heads.0.{part}"].double().numpy() for part in ("weight", "bias"))
    gW, gb = np.zeros_like(W), np.zeros_like(b)
    for batch in (new, old):
        f, labels, tasks = features_of(method, server, batch.inputs), batch.labels.numpy(), batch.tasks.numpy()
        for task in range(3):
            mine = tasks == task
            over = [2 * task, 2 * task + 1] if loss_over == "task" else range(6)
            columns = np.array(over)
            dW, db = head_gradient(W[columns], b[columns], f[mine], labels[mine] - columns[0])
            gW[columns] += dW / (2 * len(labels))
            gb[columns] += db / (2 * len(labels))
    assert_allclose(update["heads.0.weight"] / client.weight, -0.1 * gW, atol=1e-6)
    assert_allclose(update["heads.0.bias"] / client.weight, -0.1 * gb, atol=1e-6)
    assert np.abs(gb).max() > 0.02


def test_a_step_of_heads_of_their_own(
    method_of: Callable, client_of: Callable, splits_of: Callable[..., Splits]
) -> None:
    """Each old sample through its task's head, weighed by all 5; the new ones through the new head."""
    method = method_of(Er, *ONE_STEP, splits=splits_of(tasks=3, head="per-task"))
    server = third_task(method)
    client, old = remembering(method, client_of)
    (new,) = method.run.batches.iterate_ordered(client.rows, 64)
    update = method.train(client, method.make_payload(server)).tensors["update"]
    assert update.keys() == server.weights.keys()
    for task, (batch, count) in enumerate([(old, 5), (old, 5), (new, 8)]):
        mine = (batch.tasks == task).numpy()
        W, b = (server.weights[f"heads.{task}.{part}"].double().numpy() for part in ("weight", "bias"))
        f = features_of(method, server, batch.inputs)[mine]
        dW, db = head_gradient(W, b, f, batch.labels.numpy()[mine] - 2 * task)
        assert_allclose(update[f"heads.{task}.weight"] / client.weight, -0.1 * dW / (2 * count), atol=1e-6)
        assert_allclose(update[f"heads.{task}.bias"] / client.weight, -0.1 * db / (2 * count), atol=1e-6)
        assert np.abs(dW).max() > 0.05


def test_a_task_that_is_not_in_memory_keeps_its_head(
    method_of: Callable, client_of: Callable, splits_of: Callable[..., Splits]
) -> None:
    """Weight decay does not reach it either."""
    method = method_of(Er, *ONE_STEP, "optimizer.weight_decay=0.1", splits=splits_of(tasks=3, head="per-task"))
    server = third_task(method)
    client, _ = remembering(method, client_of, (0, 4))
    update = method.train(client, method.make_payload(server)).tensors["update"]
    assert not update["heads.0.weight"].any()
    assert update["heads.1.weight"].any()


def test_the_backbone_goes_down_both_losses(
    method_of: Callable, client_of: Callable, splits_of: Callable[..., Splits]
) -> None:
    """Autograd of the two means, each passed by itself; with normalisation over the batch it would differ."""
    method = method_of(Er, *ONE_STEP, splits=splits_of(tasks=3))
    server = third_task(method)
    client, old = remembering(method, client_of)
    (new,) = method.run.batches.iterate_ordered(client.rows, 64)
    update = method.train(client, method.make_payload(server)).tensors["update"]
    network = method.networks.load(server.spec, server.weights)
    names, parameters = zip(*network.named_parameters(), strict=True)
    objective = sum(cross_entropy(network(batch.inputs), batch.labels) for batch in (new, old)) / 2
    for name, gradient in zip(names, torch.autograd.grad(objective, parameters), strict=True):
        assert_allclose(update[name] / client.weight, -0.1 * gradient, atol=1e-6)


def test_the_loss_of_a_round_is_the_mean_of_both(
    method_of: Callable, client_of: Callable, splits_of: Callable[..., Splits]
) -> None:
    method = method_of(Er, *ONE_STEP, splits=splits_of(tasks=3))
    server = third_task(method)
    client, old = remembering(method, client_of)
    (new,) = method.run.batches.iterate_ordered(client.rows, 64)
    network = method.networks.load(server.spec, server.weights)
    expected = sum(cross_entropy(network(batch.inputs), batch.labels).item() for batch in (new, old)) / 2
    assert method.train(client, method.make_payload(server)).loss == pytest.approx(expected, rel=1e-5)


def test_normalisation_sees_new_and_old_samples_as_one_batch(
    method_of: Callable, client_of: Callable, splits_of: Callable[..., Splits]
) -> None:
    """The running mean of the first layer moves by a tenth towards that of all 13 samples."""
    method = method_of(Er, *ONE_STEP, "model.backbone=resnet18", splits=splits_of(tasks=3))
    server = third_task(method)
    client, old = remembering(method, client_of)
    (new,) = method.run.batches.iterate_ordered(client.rows, 64)
    moved = method.train(client, method.make_payload(server)).tensors["statistics"]["backbone.bn1.running_mean"]
    network = method.networks.load(server.spec, server.weights)
    seen = network.backbone.conv1(torch.cat([new.inputs, old.inputs])).mean((0, 2, 3)).detach()
    assert_allclose(moved / client.weight, 0.1 * (seen - server.weights["backbone.bn1.running_mean"]), atol=1e-6)


def test_a_stored_sample_that_is_the_batchs_only_one_changes_nothing(
    method_of: Callable, client_of: Callable, splits_of: Callable[..., Splits]
) -> None:
    """The mean of twice the same loss is FedAvg's loss."""
    method = method_of(Er, *ONE_STEP, splits=splits_of(train=1))
    server = method.start_task(method.create_server(), 0)
    client = client_of(method, 0)
    memory = pack_samples(method.run.batches.read_raw(client.rows))
    losses = [method.train(replace(client, memory=of), method.make_payload(server)).loss for of in ({}, memory)]
    assert losses[0] == pytest.approx(losses[1], rel=1e-6)
