"""After SR-FDIL: scores in NumPy, what is stored, who is drawn, and FedAvg's draws as a limit."""

from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from numpy.testing import assert_allclose

from fclmodels.methods.fedavg import FedAvg
from fclmodels.methods.parts.replay_memory import pack_samples, unpack_samples
from fclmodels.methods.sr_fdil import SrFdil, judge_domains, standardise


def test_a_domain_is_known_by_its_own_samples_alone() -> None:
    features = torch.tensor([[3.0, 0.0], [4.0, 0.5], [0.0, 2.0], [0.5, 3.0], [1.0, 1.0]])
    own = judge_domains(features, torch.tensor([0, 0, 4, 4, 4]))
    assert (own[:4] > 0.8).all()
    assert own[4] < own[:4].min()
    assert torch.equal(judge_domains(features, torch.zeros(5)), torch.ones(5))


def test_standard_scores_of_equal_values_are_0() -> None:
    assert_allclose(standardise(torch.tensor([1.0, 2.0, 3.0])), np.array([-1, 0, 1]) / np.sqrt(2 / 3), rtol=1e-6)
    assert not standardise(torch.full((4,), 0.3)).any()


def test_what_is_stored_is_nearest_to_all_clients_means(
    method_of: Callable, client_of: Callable, after_each_task: Callable
) -> None:
    """In the first task there is one domain: b alone decides, two samples of each class."""
    method = method_of(SrFdil, memory=4)
    server = after_each_task(method)[0]
    client, payload = client_of(method, 1, 0, -1), method.make_scored_payload(server)
    (batch,) = method.run.batches.iterate_ordered(client.rows, 1000)
    network = method.networks.load(server.spec, server.weights).eval()
    everyone = [
        next(method.run.batches.iterate_ordered(method.select_rows(0, k), 1000)) for k in method.list_participants(0)
    ]
    with torch.no_grad():
        f = network.backbone(batch.inputs).double().numpy()
        of_all = [(network.backbone(one.inputs).double().numpy(), one.labels.numpy()) for one in everyone]
    feats, labels = (np.concatenate(parts) for parts in zip(*of_all, strict=True))
    stored = unpack_samples(method.store_best(client, payload).memory)
    assert stored is not None
    raw = method.run.batches.read_raw(client.rows)
    for label in batch.labels.unique().tolist():
        mine = np.flatnonzero(batch.labels.numpy() == label)
        G = feats[labels == label].mean(0)
        b = f[mine] @ G / np.linalg.norm(f[mine], axis=1) / np.linalg.norm(G)
        best = mine[np.argsort(-b)[:2]]
        assert torch.equal(stored.inputs[stored.labels == label], raw.inputs[torch.tensor(best)])


def test_clients_are_drawn_by_importance(method_of: Callable) -> None:
    method = method_of(SrFdil)
    ratings = {"0": torch.tensor([1.0, 2.0]), "1": torch.tensor([0.5, 0.5]), "2": torch.tensor([0.0, 0.0])}
    server = replace(method.create_server(), knowledge={"ratings": ratings})
    random = torch.Generator().manual_seed(0)
    drawn = Counter(k for _ in range(2000) for k in method.choose_clients(server, 0, (0, 1, 2), 1, random))
    assert_allclose(drawn[0] / 2000, 0.75, atol=0.03)
    assert drawn[2] < 5
    assert sorted(method.choose_clients(server, 0, (0, 1, 2), 3, random)) == [0, 1, 2]


def test_equal_importance_draws_uniformly(method_of: Callable) -> None:
    method = method_of(SrFdil)
    server = replace(method.create_server(), knowledge={"ratings": {str(k): torch.ones(2) for k in range(4)}})
    random = torch.Generator().manual_seed(0)
    drawn = Counter(k for _ in range(2000) for k in method.choose_clients(server, 0, (0, 1, 2, 3), 2, random))
    assert_allclose([drawn[k] / 4000 for k in range(4)], 0.25, atol=0.03)


def test_importance_is_of_new_rows_and_of_stored_ones(
    method_of: Callable, client_of: Callable, federate: Callable
) -> None:
    method = method_of(SrFdil)
    server = method.start_task(federate(method, 1), 1)
    payload, raw = method.make_scored_payload(server), method.run.batches.read_raw(method.select_rows(0, 1))
    without = method.rate_samples(client_of(method, 1, 1, -1001), payload).tensors["rating"]["rating"]
    memory: dict[str, Any] = pack_samples(raw)
    client = client_of(method, 1, 1, -1001, memory=memory)
    own, correlation, stored = method.score(client, payload)
    rating = method.rate_samples(client, payload).tensors["rating"]["rating"]
    value = own + (1 + correlation) / 2
    assert_allclose(rating, [value[stored:].mean(), value[:stored].mean()], rtol=1e-6)
    assert without[1] == 0
    assert not correlation[stored:].any()  # new classes have no mean yet
    assert correlation[:stored].all()


@pytest.mark.parametrize(("settings", "tasks"), [({"choice": "uniform"}, 1), ({}, 1)])
def test_before_anything_is_stored_it_is_fedavg_to_the_bit(
    settings: dict[str, Any], tasks: int, method_of: Callable, federate: Callable
) -> None:
    few = "federation.clients_per_round=2"
    ours, plain = federate(method_of(SrFdil, few, **settings), tasks), federate(method_of(FedAvg, few), tasks)
    assert all(torch.equal(ours.weights[name], plain.weights[name]) for name in plain.weights)


def test_uniform_choice_draws_as_fedavg_in_later_tasks(method_of: Callable, federate: Callable) -> None:
    method, plain = method_of(SrFdil, choice="uniform"), method_of(FedAvg)
    server = method.start_task(federate(method, 1), 1)
    draws = [
        one.choose_clients(server, 0, (0, 1, 2, 3), 2, torch.Generator().manual_seed(3)) for one in (method, plain)
    ]
    assert draws[0] == draws[1]
