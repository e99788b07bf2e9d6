"""iCaRL+FL: its loss and its answers in NumPy, who says what after a task, and that it remembers."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pytest
import torch
from scipy.special import expit
from torch import Tensor

from fclmodels.backbones.model.spec import to_local_labels
from fclmodels.federation.prediction import Columns
from fclmodels.federation.server import Server
from fclmodels.methods.fedavg import FedAvg
from fclmodels.methods.icarl import Icarl
from fclmodels.methods.parts.joined_heads import find_columns, list_task_columns
from fclmodels.methods.parts.replay_memory import unpack_samples
from fclmodels.storage import trees

STREAMS: dict[str, dict[str, Any]] = {
    "growing": {},
    "shared": {"same_classes": True},
    "per-task": {"head": "per-task"},
}


def memory_of(method: Icarl, server: Server, client_of: Callable, index: int = 1) -> dict[str, Any]:
    """What a client remembers of the first task."""
    memory: dict[str, Any] = method.select_exemplars(client_of(method, index, 0), method.make_payload(server)).memory
    return memory


@pytest.mark.parametrize("stream", STREAMS)
def test_the_loss_against_numpy(
    stream: str, method_of: Callable, client_of: Callable, splits_of: Callable, federate: Callable, mlp: Any
) -> None:
    """On a batch of new rows and exemplars: the teacher's opinion in old columns, labels in the task's own."""
    method = method_of(Icarl, "federation.batch_size=32", splits=splits_of(**STREAMS[stream]), exemplars=4)
    ended = federate(method, 1)
    server = method.start_task(ended, 1)
    memory = memory_of(method, ended, client_of)
    client = client_of(method, 1, 1, memory=memory)
    training = method.prepare_training(client, method.make_payload(server))
    (batch,) = next(method.yield_epochs(training))
    assert sorted(batch.tasks.unique().tolist()) == [0, 1]
    training.network.eval()
    loss = float(method.compute_loss(training, batch).detach())

    z = mlp.compute_logits(server.weights, batch.inputs)
    teacher = expit(mlp.compute_logits(ended.weights, batch.inputs))
    targets = np.zeros_like(z)
    targets[np.arange(len(z)), batch.labels.numpy()] = 1  # 0 and 1 are in the first head, 2 and 3 in the second
    if stream != "shared":
        targets[:, :2] = teacher
    p = expit(z)
    assert loss == pytest.approx(-(targets * np.log(p) + (1 - targets) * np.log(1 - p)).mean(), rel=1e-5)


@pytest.mark.parametrize("stream", STREAMS)
def test_answers_are_those_of_the_nearest_mean_of_exemplars(
    stream: str, method_of: Callable, client_of: Callable, splits_of: Callable, federate: Callable, mlp: Any
) -> None:
    method = method_of(Icarl, splits=splits_of(**STREAMS[stream]), exemplars=6)
    server = federate(method, 1)
    columns = method.list_columns(server)
    by_column: dict[int, list[np.ndarray]] = {}
    for index in range(method.run.splits.clients):
        samples = unpack_samples(memory_of(method, server, client_of, index))
        assert samples is not None
        phi = mlp.compute_features(server.weights, method.run.batches.prepare_inputs(samples).inputs)
        for label, f in zip(samples.labels.tolist(), phi / np.linalg.norm(phi, axis=1, keepdims=True), strict=True):
            by_column.setdefault(columns.labels.tolist().index(label), []).append(f)
    means = np.stack([np.mean(by_column[column], 0) for column in sorted(by_column)])
    means /= np.linalg.norm(means, axis=1, keepdims=True)
    batch = next(method.run.batches.iterate_ordered(method.run.splits.select_test_rows(0), 50))
    phi = mlp.compute_features(server.weights, batch.inputs)
    phi /= np.linalg.norm(phi, axis=1, keepdims=True)
    nearest = np.linalg.norm(phi[:, None] - means[None], axis=2).argmin(1)
    assert method.make_predictor(server)(batch.inputs).logits.argmax(1).tolist() == nearest.tolist()


def test_a_client_without_rows_of_the_task_speaks_for_its_exemplars(
    method_of: Callable, client_of: Callable, splits_of: Callable, federate: Callable
) -> None:
    """Else the means of classes that it alone has would be of old features, or missing."""
    splits = splits_of(tasks=2, clients=2, train={(0, 0): 8, (0, 1): 8, (1, 1): 8})
    method = method_of(Icarl, splits=splits, exemplars=4)
    ended = federate(method, 1)
    memory = memory_of(method, ended, client_of, 0)
    server = method.start_task(ended, 1)
    answer = method.select_exemplars(client_of(method, 0, 1, memory=memory), method.make_payload(server))
    assert answer.tensors["means"]["weight"].tolist() == [2, 2, 0, 0]
    assert trees.digest(answer.memory) == trees.digest(memory)


def test_who_speaks_in_a_run(experiment_of: Callable, splits_of: Callable, tmp_path: Path) -> None:
    splits = splits_of(tasks=2, clients=3, train={(0, 0): 8, (0, 1): 8, (1, 1): 8, (1, 2): 8})
    experiment_of(method="icarl", splits=splits).run(tmp_path / "run")
    ledger = pl.read_parquet(tmp_path / "run" / "ledger.parquet").filter(pl.col("round") < 0, direction="up")
    assert set(ledger["part"]) == {"means"}
    assert sorted(ledger.select("task", "client").iter_rows()) == [(t, c) for t in range(2) for c in range(3)]


def test_a_class_without_exemplars_is_never_the_answer(
    method_of: Callable, splits_of: Callable, federate: Callable
) -> None:
    """One exemplar for four classes: three of them have none."""
    method = method_of(Icarl, splits=splits_of(clients=1), exemplars=1)
    server = federate(method)
    batch = next(method.run.batches.iterate_ordered(method.run.splits.select_test_rows(1), 50))
    assert set(method.make_predictor(server)(batch.inputs).logits.argmax(1).tolist()) == {0}


def test_the_first_task_is_fedavg_with_binary_cross_entropy(
    method_of: Callable, federate: Callable, monkeypatch: pytest.MonkeyPatch
) -> None:
    mine = federate(method_of(Icarl), 1)

    def binary(self: FedAvg, network: Any, features: Tensor, labels: Tensor, task: int) -> Tensor:
        z = network.compute_logits(features)
        return torch.nn.functional.binary_cross_entropy_with_logits(z, torch.eye(z.shape[1])[labels])

    monkeypatch.setattr(FedAvg, "compute_cross_entropy", binary)
    assert trees.digest(mine.weights) == trees.digest(federate(method_of(FedAvg), 1).weights)


@pytest.mark.parametrize("stream", STREAMS)
def test_columns_are_those_of_the_predictor(stream: str, method_of: Callable, splits_of: Callable) -> None:
    splits = splits_of(tasks=3, **STREAMS[stream])
    spec = method_of(splits=splits).run.make_spec(3)
    columns = Columns.of(spec, torch.device("cpu"))
    pairs = [(task, label) for task, classes in enumerate(spec.tasks) for label in classes]
    tasks, labels = torch.tensor(pairs).unbind(1)
    places = find_columns(spec, labels, tasks)
    assert columns.labels[places].tolist() == labels.tolist()
    if spec.head == "per-task":
        assert columns.owners[places].tolist() == tasks.tolist()
        assert to_local_labels(spec, 2, labels[tasks == 2]).tolist() == [0, 1]
    assert sorted(places[tasks == 2].tolist()) == list_task_columns(spec, torch.device("cpu"))[-1].tolist()


def test_the_bound_for_noise_holds_and_is_reached(
    method_of: Callable, client_of: Callable, splits_of: Callable, federate: Callable
) -> None:
    """By a client whose exemplars all have the same features; sums of m unit vectors and m of them are sqrt(2) m."""
    method = method_of(Icarl, splits=splits_of(clients=1), exemplars=3)
    server = federate(method, 1)
    part = method.make_select_form(0, -1)["means"]
    sums = method.select_exemplars(client_of(method, 0, 0), method.make_payload(server)).tensors["means"]
    length = sum(float(X.square().sum()) for X in sums.values()) ** 0.5
    assert part.bound == pytest.approx(2**0.5 * 3)
    assert length <= part.bound


@pytest.mark.slow
@pytest.mark.parametrize(
    "settings",
    [
        ("federation.secagg.on=true",),
        ("federation.privacy.noise_multiplier=0.1", "federation.weighting=uniform"),
    ],
)
def test_sums_and_noise_cover_the_means(
    settings: tuple[str, ...], experiment_of: Callable, splits_of: Callable, tmp_path: Path
) -> None:
    experiment_of("federation.rounds=1", *settings, method="icarl", splits=splits_of()).run(tmp_path / "run")
