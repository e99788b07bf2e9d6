"""FedProto against hand-made numbers and NumPy; at its limits it is FedAvg, and models that never travel."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pytest
import torch

from fclmodels.federation.exchange import TRAIN
from fclmodels.federation.training.local_training import LocalTraining
from fclmodels.methods.fedavg import FedAvg
from fclmodels.methods.fedproto import FedProto, Prototypes
from fclmodels.storage import trees


def test_the_distance_of_worked_numbers() -> None:
    """Of three samples one has a class without a prototype: it adds 0, and counts."""
    features = torch.tensor([[1.0, 0], [0, 2], [1, 1]])
    prototypes = Prototypes(torch.tensor([[0.0, 0], [1, 1], [9, 9]]), torch.tensor([True, True, False]))
    assert prototypes.measure_distance(features, torch.tensor([0, 1, 2])).item() == 0.5


@pytest.mark.parametrize("head", ["growing", "per-task"])
def test_without_its_term_it_is_fedavg(head: str, method_of: Callable, federate: Callable, splits_of: Callable) -> None:
    splits = splits_of(head=head)
    plain, drawn, near = (
        federate(method_of(kind, splits=splits, **settings)).weights
        for kind, settings in ((FedAvg, {}), (FedProto, {"lambda": 0}), (FedProto, {}))
    )
    assert trees.digest(plain) == trees.digest(drawn) != trees.digest(near)


@pytest.mark.parametrize("mean", ["samples", "clients"])
def test_prototypes_are_mean_features_on_the_clients_own_models(
    mean: str, method_of: Callable, federate: Callable, client_of: Callable, splits_of: Callable
) -> None:
    """Worked out from each client's update, in a task's only round; those of the first task stay in the second."""
    splits = splits_of(clients=3, train={(t, c): 3 + c + t for t in range(2) for c in range(3)})
    method = method_of(FedProto, "federation.rounds=1", splits=splits, mean=mean)
    start = method.start_task(method.create_server(), 0)
    counts, sums = np.zeros(2), np.zeros((2, 12))
    for index in range(3):
        client = client_of(method, index)
        training = method.prepare_training(client, method.make_payload(start))
        training.run()
        (batch,) = method.run.batches.iterate_ordered(client.rows, 100)
        with torch.no_grad():
            features = training.network.eval().backbone(batch.inputs).double().numpy()
        for label in range(2):
            mine = features[batch.labels.numpy() == label]
            if len(mine):
                counts[label] += len(mine) if mean == "samples" else 1
                sums[label] += mine.sum(0) if mean == "samples" else mine.mean(0)
    one, two = federate(method, 1).knowledge["prototypes"], federate(method, 2).knowledge["prototypes"]
    np.testing.assert_allclose(one["sum"] / one["weight"][:, None], sums / counts[:, None], rtol=1e-5, atol=1e-6)
    assert two["sum"].shape == (4, 12)
    assert torch.equal(two["sum"][:2], one["sum"])
    assert (two["weight"][2:] > 0).all()


def test_features_are_drawn_to_the_prototypes(method_of: Callable, client_of: Callable) -> None:
    """The loss of a batch is cross entropy plus lambda times the distance."""
    method = method_of(FedProto, **{"lambda": 3.0})
    server = method.start_task(method.create_server(), 0)
    client = client_of(method, 0)
    training = LocalTraining(method, client, method.networks.load(server.spec, server.weights), server.weights)
    batch = next(next(client.yield_epochs()))
    plain = method.compute_loss(training, batch)
    prototypes = Prototypes(torch.randn(2, 12, generator=torch.Generator().manual_seed(0)), torch.ones(2) > 0)
    training.add(prototypes)
    features = training.compute_features(batch)
    right = plain + 3 * ((features - prototypes.means[batch.labels]) ** 2).mean()
    torch.testing.assert_close(method.compute_loss(training, batch), right)


@pytest.mark.parametrize("predicts", ["head", "prototype"])
def test_personal_models_never_travel(predicts: str, experiment_of: Callable, tmp_path: Path) -> None:
    overrides = ("federation.rounds=4", f"methods.fedproto={{models: personal, predicts: {predicts}}}")
    result = experiment_of(*overrides, method="fedproto").run(tmp_path / "run")
    ledger = pl.read_parquet(tmp_path / "run" / "ledger.parquet").filter(pl.col("direction") != "kept")
    assert ledger.filter(pl.col("part").is_in(["update", "weights"]))["bytes"].sum() == 0
    assert result["metrics"]["task_aware"]["acc"] > 0.8


def test_the_nearest_prototype_answers_where_it_is_asked_to(method_of: Callable, federate: Callable) -> None:
    method: Any = method_of(FedProto, predicts="prototype")
    server = federate(method)
    total = server.knowledge["prototypes"]
    means = (total["sum"] / total["weight"][:, None]).float()
    (batch,) = method.run.batches.iterate_ordered(method.run.splits.select_test_rows(0), 100)
    with torch.no_grad():
        features = method.networks.load(server.spec, server.weights).eval().backbone(batch.inputs)
        answers = method.make_predictor(server)(batch.inputs).logits.argmax(1)
    assert torch.equal(answers, torch.cdist(features, means).argmin(1))


def test_noise_covers_prototypes(
    experiment_of: Callable, client_of: Callable, method_of: Callable, tmp_path: Path
) -> None:
    private = ("federation.weighting=uniform", "federation.privacy.noise_multiplier=0.01")
    method = method_of(FedProto, *private, "federation.privacy.features=0.1")
    reply, _ = method.exchanges[TRAIN].reply(
        client_of(method, 0), method.make_payload(method.start_task(method.create_server(), 0))
    )
    part = reply.parts["moments"]
    assert 0.5 < np.hypot(*(float(t.norm()) for t in part.tensors.values())) <= part.bound
    result = experiment_of(*private, method="fedproto").run(tmp_path / "run")
    assert result["privacy"]["releases"] == 4
