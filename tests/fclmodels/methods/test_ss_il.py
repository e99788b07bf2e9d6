"""SS-IL+FL: its loss over new and replayed samples in NumPy, its streams, and its first task."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from scipy.special import log_softmax, softmax

from fclmodels.data.batches import Batch
from fclmodels.methods.fedavg import FedAvg
from fclmodels.methods.parts.replay_memory import Replay
from fclmodels.methods.ss_il import SsIl
from fclmodels.storage import trees

STREAMS: dict[str, dict[str, Any]] = {"growing": {}, "per-task": {"head": "per-task"}}


@pytest.mark.parametrize("stream", STREAMS)
def test_the_loss_against_numpy(
    stream: str, method_of: Callable, client_of: Callable, splits_of: Callable, after_each_task: Callable, mlp: Any
) -> None:
    """In the third task, of two old groups."""
    method = method_of(SsIl, splits=splits_of(tasks=3, **STREAMS[stream]), replay=3, temperature=3.0)
    ended = after_each_task(method)[1]
    server = method.start_task(ended, 2)
    memory = method.select_exemplars(client_of(method, 1, 1), method.make_payload(ended)).memory
    client = client_of(method, 1, 2, memory=memory)
    training, again = (method.prepare_training(client, method.make_payload(server)) for _ in range(2))
    batch = next(next(method.yield_epochs(training)))
    replayed = again.find_added(Replay).draw(3)
    training.network.eval()
    loss = float(method.compute_loss(training, batch).detach())

    both = Batch.concatenate([batch, replayed])
    z, old = mlp.compute_logits(server.weights, both.inputs), mlp.compute_logits(ended.weights, both.inputs)
    expected = 0.0
    for row, label in zip(z, both.labels.tolist(), strict=True):
        side = slice(4, 6) if label >= 4 else slice(0, 4)
        expected -= log_softmax(row[side])[label - (side.start or 0)] / len(z)
    for group in (slice(0, 2), slice(2, 4)):
        p = softmax(old[:, group] / 3, axis=1)
        gap = np.log(p) - log_softmax(z[:, group] / 3, axis=1)
        expected += 9 * (p * gap).sum(1).mean()
    assert loss == pytest.approx(expected, rel=1e-5)
    assert len(replayed.labels) == 3


def test_exemplars_come_beside_the_rows_and_not_among_them(
    method_of: Callable, client_of: Callable, federate: Callable
) -> None:
    method = method_of(SsIl)
    ended = federate(method, 1)
    memory = method.select_exemplars(client_of(method, 1, 0), method.make_payload(ended)).memory
    client = client_of(method, 1, 1, memory=memory)
    training = method.prepare_training(client, method.make_payload(method.start_task(ended, 1)))
    tasks = {task for epoch in method.yield_epochs(training) for batch in epoch for task in batch.tasks.tolist()}
    assert tasks == {1}


def test_the_first_task_is_fedavg(method_of: Callable, federate: Callable) -> None:
    mine, fedavg = (federate(method_of(kind), 1) for kind in (SsIl, FedAvg))
    assert trees.digest(mine.weights) == trees.digest(fedavg.weights)
