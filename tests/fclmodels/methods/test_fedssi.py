"""FedSSI: importance along a surrogate's path against worked numbers; the penalty by autograd; limit cases."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from numpy.testing import assert_allclose

from fclmodels.data.batches import Batch
from fclmodels.errors import UserError
from fclmodels.methods.fedavg import FedAvg
from fclmodels.methods.fedssi import FedSsi, divide_path, follow_path
from fclmodels.methods.parts.surrogate import Surrogate


def test_the_worked_path_and_its_importance(scalar_surrogate: tuple[Surrogate, Batch]) -> None:
    path, way = follow_path(*scalar_surrogate)
    assert_allclose([path["weight"].item(), way["weight"].item()], [0.010809, 0.044], atol=1e-6)
    omega = divide_path(path, way, 1e-3)["weight"].item()
    assert_allclose([omega, 0.1 * omega * 0.3**2], [3.681502, 0.033134], atol=1e-4)


def test_what_learning_did_not_lower_has_no_importance() -> None:
    omega = divide_path({"w": torch.tensor([-1.0, 2.0])}, {"w": torch.tensor([1.0, 0.0])}, 0.5)["w"]
    assert omega.tolist() == [0, 4]


@pytest.mark.parametrize("head", ["growing", "per-task"])
def test_importance_sums_over_tasks_about_the_last_model(
    head: str, method_of: Callable, client_of: Callable, after_each_task: Callable
) -> None:
    method = method_of(FedSsi, f"model.head={head}", "federation.rounds=1")
    servers, memories, memory = after_each_task(method), [], {}
    for task in (0, 1):
        client = client_of(method, 1, task, round=-1, memory=memory)
        alone = method.add_importance(client_of(method, 1, task, round=-1), method.make_payload(servers[task])).memory
        memory = method.add_importance(client, method.make_payload(servers[task])).memory
        memories.append((alone, memory))
    (_, first), (alone, both) = memories
    for name, omega in both["importance"].items():
        expected = alone["importance"][name].clone()
        expected[: len(first["importance"][name])] += first["importance"][name]
        assert_allclose(omega, expected, rtol=1e-6)
        assert torch.equal(both["centre"][name], servers[1].weights[name])
    assert any(name.startswith("heads.") for name in both["importance"]) == (head == "growing")


@pytest.mark.parametrize("alpha", [0.3, 1e9])
def test_a_step_descends_the_penalty_where_there_is_a_spring(
    alpha: float, method_of: Callable, client_of: Callable, after_each_task: Callable
) -> None:
    """Against FedAvg's step from the same weights to w': w* + (w' - w*) / (1 + 2 lr alpha Omega), new rows as w'.

    However stiff, it ends between w' and w*.
    """
    settings = ("federation.rounds=1", "federation.batch_size=64", "optimizer.lr=0.1")
    method, plain = method_of(FedSsi, *settings, alpha=alpha), method_of(FedAvg, *settings)
    first, _ = after_each_task(method)
    memory = method.add_importance(client_of(method, 1, 0, round=-1), method.make_payload(first)).memory
    server = method.start_task(first, 1)
    memory["centre"] = {name: centre - 0.5 for name, centre in memory["centre"].items()}
    ours = method.train(client_of(method, 1, 1, memory=memory), method.make_payload(server)).tensors
    theirs = plain.train(client_of(plain, 1, 1), plain.make_payload(server)).tensors
    weight = ours["weight"]["weight"].item()
    for name, omega in memory["importance"].items():
        own, plains = (server.weights[name] + update["update"][name] / weight for update in (ours, theirs))
        centre, rows = memory["centre"][name], slice(len(omega))
        expected = centre + (plains[rows] - centre) / (1 + 0.1 * 2 * alpha * omega)
        assert_allclose(own[rows], expected, atol=1e-6)
        assert torch.equal(own[len(omega) :], plains[len(omega) :])


def test_a_surrogate_that_diverges_is_an_error_that_names_its_rate(method_of: Callable, client_of: Callable) -> None:
    method = method_of(FedSsi, surrogate_lr=1e6, **{"lambda": 1.0})
    server = method.start_task(method.create_server(), 0)
    with pytest.raises(UserError, match=r"client 1's surrogate diverged .* Lower methods\.fedssi\.surrogate_lr"):
        method.add_importance(client_of(method, 1, round=-1), method.make_payload(server))


@pytest.mark.parametrize(("settings", "tasks"), [({"alpha": 0}, None), ({}, 1)])
def test_without_penalty_and_in_the_first_task_it_is_fedavg_to_the_bit(
    settings: dict[str, Any], tasks: int | None, method_of: Callable, federate: Callable
) -> None:
    ours = federate(method_of(FedSsi, **settings), tasks).weights
    plain = federate(method_of(FedAvg), tasks).weights
    assert all(torch.equal(ours[name], plain[name]) for name in plain)
