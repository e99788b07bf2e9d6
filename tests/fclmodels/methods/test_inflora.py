"""InfLoRA, federated: A by hand from all clients' inputs, B alone trains, and earlier inputs are left alone."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from fclmodels.backbones.adapters.low_rank import name_factor
from fclmodels.errors import UserError
from fclmodels.methods.inflora import InfLora, read_memory
from fclmodels.testing.tiny_splits import VIT


@pytest.fixture
def method(method_of: Callable) -> Any:
    return method_of(InfLora, *VIT, rank=2, targets=["key", "output"])


@pytest.fixture
def ask(client_of: Callable) -> Callable[..., dict[str, torch.Tensor]]:
    """All clients' sums of inputs."""

    def add_up(method: Any, server: Any) -> dict[str, torch.Tensor]:
        clients = [client_of(method, index, server.task) for index in method.list_participants(server.task)]
        answers = [method.answer(client, method.make_payload(server)).tensors["inputs"] for client in clients]
        return {name: sum(answer[name] for answer in answers) for name in answers[0]}

    return add_up


def test_the_sum_of_clients_is_that_of_one_place(method: Any, ask: Callable) -> None:
    """Inputs of attention are the normed tokens of all samples, of the first layer by hand."""
    server = method.start_task(method.create_server(), 0)
    grams = ask(method, server)
    rows = method.run.splits.select_rows(0, "train")
    (batch,) = method.run.batches.iterate_ordered(rows, 1000)
    frozen = method.network.frozen
    with torch.no_grad():
        X = frozen.layers[0].ln_1(frozen.embed(batch.inputs)).flatten(0, 1).double().numpy()
    H = grams["layers.0.self_attention.in_proj"]
    np.testing.assert_allclose(H, X.T @ X, rtol=1e-5, atol=1e-6)
    start = method.set_factors(server, grams)
    A = start.weights[name_factor(0, 0, "A")].numpy()
    U = np.linalg.svd(X.T @ X)[0][:, :2]
    np.testing.assert_allclose(np.abs(A @ U) * 3**0.5, np.eye(2), atol=1e-4)


def test_b_alone_trains_and_a_is_downloaded_once(method: Any, client_of: Callable) -> None:
    server = method.start_task(method.create_server(), 0)
    payload = method.make_payload(server)
    assert all(name.endswith("A") for name in payload["own-fixed"].tensors)
    sent = method.exchanges["train"].reply(client_of(method, 0), payload)[0].parts["update"].tensors
    assert {name[-1] for name in sent if "prompts" in name} == {"B"}


def test_what_travels_once_a_task_stays_the_same_in_it(method: Any, federate: Callable) -> None:
    """Over its questions too: the one before it has no A of its own, and its sums are those with any A."""
    sent: dict[tuple[int, str], torch.Tensor] = {}
    for exchange in method.exchanges.values():

        def note(server: Any, make: Callable = exchange.payload) -> Any:
            payload = make(server)
            for part in (part for part in payload.values() if part.once):
                for name, tensor in part.tensors.items():
                    assert torch.equal(sent.setdefault((server.task, name), tensor), tensor)
            return payload

        object.__setattr__(exchange, "payload", note)
    federate(method)
    assert {task for task, name in sent if name == name_factor(1, 0, "A")} == {1}
    assert (1, name_factor(0, 0, "B")) in sent


def test_a_later_task_does_not_reach_what_is_taken(method_of: Callable, federate: Callable, ask: Callable) -> None:
    """With all of the first task's directions but those beyond rank taken, A of the second is orthogonal to them."""
    method = method_of(InfLora, *VIT, rank=2, **{"lambda": 0.999})
    one = federate(method, 1)
    taken = read_memory(one)
    assert taken
    server = method.start_task(one, 1)
    later = method.set_factors(server, ask(method, server))
    for index, layer in ((0, "layers.0.self_attention.in_proj"), (2, "layers.1.self_attention.in_proj")):
        A, memory = later.weights[name_factor(1, index, "A")].double(), taken[layer]
        inside = A @ memory.basis if not memory.spans_free else A - A @ memory.basis @ memory.basis.T
        assert inside.abs().max() < 1e-5
        assert memory.basis.shape[1] <= 4


def test_noise_is_refused_by_name(experiment_of: Callable) -> None:
    private = ("federation.weighting=uniform", "federation.privacy.noise_multiplier=1")
    with pytest.raises(UserError, match=r"inflora takes directions .* Use o-lora"):
        experiment_of(*private, method="inflora")
