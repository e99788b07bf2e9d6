"""LoRM: factors train in turns, and what is merged is the least-squares solution on the clients' inputs."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from fclmodels.backbones.adapters.low_rank import name_factor
from fclmodels.backbones.inputs.layer_capture import watch_layers
from fclmodels.errors import UserError
from fclmodels.federation.engine.replies import Replies
from fclmodels.federation.exchange import TRAIN
from fclmodels.methods.lorm import Lorm, average_tasks
from fclmodels.testing.tiny_splits import VIT

FULL: dict[str, Any] = {"rank": 2, "targets": ["value", "perceptron-out"], "share": 1.0, "head_share": 1.0}
LAYERS = ("layers.0.self_attention.in_proj", "layers.0.mlp.2")


@pytest.fixture
def method(method_of: Callable) -> Any:
    return method_of(Lorm, *VIT, "model.loss_over=task", **FULL)


def capture(
    method: Any, weights: dict[str, torch.Tensor], client: Any, layers: tuple[str, ...]
) -> dict[str, np.ndarray]:
    """The inputs [n, d] of some layers over a client's samples, on this model."""
    network = method.observed.load(method.run.make_spec(client.task + 1), weights).eval()
    inputs: dict[str, np.ndarray] = {}

    def note(name: str, module: Any, x: torch.Tensor) -> None:
        inputs[name.removeprefix("backbone.frozen.")] = x.flatten(0, -2).double().numpy()

    (batch,) = method.run.batches.iterate_ordered(client.rows, 1000)
    with torch.no_grad(), watch_layers(network, note):
        network.compute_logits(network.backbone(batch.inputs))
    return {name: inputs[name] for name in layers}


@pytest.mark.parametrize("round", [0, 1])
def test_a_rounds_factors_are_the_least_squares_solution(
    round: int, method: Any, client_of: Callable, tmp_path: Any
) -> None:
    """Of every client's outputs on its own inputs: by lstsq over all rows, of B on A x."""
    server = method.start_task(method.create_server(), 0)
    for name in method.list_factors(0, "B"):
        server.weights[name] = torch.randn(server.weights[name].shape, generator=torch.Generator().manual_seed(1)) / 9
    payload, replies, rows, outputs = method.make_payload(server), Replies([0, 1, 2], tmp_path), {}, {}
    factor = "A" if round else "B"
    for index in range(3):
        client = client_of(method, index, round=round)
        training = method.prepare_training(client, payload)
        training.run()
        trained = dict(training.network.named_parameters())
        moved = {name for name, w in server.weights.items() if not torch.equal(trained[name], w)}
        assert {name[-1] for name in moved if "prompts" in name} == {factor}
        own = {name: p.detach().clone() for name, p in training.network.state_dict().items() if name in server.weights}
        for place, layer in enumerate(LAYERS):
            X = capture(method, own, client, LAYERS)[layer]
            name = name_factor(0, place, factor)
            X = X if factor == "A" else X @ own[name_factor(0, place, "A")].double().numpy().T
            rows.setdefault(name, []).append(X)
            outputs.setdefault(name, []).append(X @ own[name].double().numpy().T)
        replies.add(index, method.exchanges[TRAIN].reply(client, payload)[0])
    after = method.aggregate(server, replies).weights
    for name, X in rows.items():
        right = np.linalg.lstsq(np.concatenate(X), np.concatenate(outputs[name]), rcond=1e-6)[0].T
        rows_of_all = np.concatenate(X)  # along directions that no row has, what the round began with stays
        np.testing.assert_allclose(rows_of_all @ after[name].double().numpy().T, rows_of_all @ right.T, atol=2e-4)
    fixed = method.list_factors(0, "B" if round else "A")
    assert all(torch.equal(after[name], server.weights[name]) for name in fixed)


def test_after_a_task_the_answer_is_the_least_squares_solution_over_tasks(
    method: Any, federate: Callable, client_of: Callable
) -> None:
    """W_0 + change, its change on all tasks' inputs nearest to each task's own B_t A_t."""
    one, two = federate(method, 1), federate(method, 2)
    X, Y = [], []
    for task, server in enumerate((one, two)):
        weights = average_tasks(server.weights, task)
        for index in range(4):
            inputs = capture(method, weights, client_of(method, index, task), LAYERS)[LAYERS[0]]
            A, B = (server.weights[name_factor(task, 0, factor)].double().numpy() for factor in "AB")
            X.append(inputs)
            Y.append(inputs @ (B @ A).T)
    right = np.linalg.lstsq(np.concatenate(X), np.concatenate(Y), rcond=1e-6)[0].T
    weights = method.find_answering_weights(two)
    A, B = ([weights[name_factor(task, 0, factor)].double().numpy() for task in range(2)] for factor in "AB")
    np.testing.assert_allclose(sum(b @ a for a, b in zip(A, B, strict=True)), right, atol=1e-3)


def test_a_client_alone_gets_back_what_it_learned(method: Any, client_of: Callable, tmp_path: Any) -> None:
    server = method.start_task(method.create_server(), 0)
    client, payload = client_of(method, 1), method.make_payload(server)
    training = method.prepare_training(client, payload)
    training.run()
    replies = Replies([1], tmp_path)
    replies.add(1, method.exchanges[TRAIN].reply(client, payload)[0])
    after = method.aggregate(server, replies).weights
    for name in (*method.list_factors(0, "B"), "heads.0.weight", "heads.0.bias"):
        torch.testing.assert_close(after[name], training.network.state_dict()[name], atol=1e-4, rtol=1e-3)


def test_diagonals_travel_as_vectors(method_of: Callable) -> None:
    method = method_of(Lorm, *VIT, rank=2)
    shapes = {name: tuple(t.shape) for name, t in method.make_update_form(0, 1)["solved"].tensors.items()}
    assert shapes["gram." + name_factor(0, 0, "A")] == (8,)
    assert shapes["gram.heads.0.weight"] == (8, 8)
    assert {tuple(t.shape) for t in method.make_grams_form(0, -1)["grams"].tensors.values()} == {(8,)}
    assert set(method.make_update_form(0, 1)["update"].tensors) == {"heads.0.bias"}


def test_a_task_trains_without_earlier_ones(method: Any, federate: Callable, client_of: Callable) -> None:
    server = method.start_task(federate(method, 1), 1)
    client = client_of(method, 0, task=1)
    network = method.prepare_training(client, method.make_payload(server)).network
    assert not any(network.get_parameter(name).any() for name in method.list_factors(0, "B"))
    assert all(server.weights[name].any() for name in method.list_factors(0, "B"))


@pytest.mark.parametrize("settings", [{"rank": 2, "share": 1.0}, {}], ids=["rank 2", "defaults"])
@pytest.mark.parametrize("round", [0, 1])
def test_masks_change_nothing_where_inputs_span_less_than_all(
    round: int,
    settings: dict[str, Any],
    method_of: Callable,
    client_of: Callable,
    mask: Callable,
    tmp_path: Any,
) -> None:
    """Sums in fixed point have noise along directions that no input has; at the defaults r = 16 is above d = 8."""
    method = method_of(Lorm, *VIT, "model.loss_over=task", **settings)
    server = method.start_task(method.create_server(), 0)
    for name in method.list_factors(0, "B"):
        server.weights[name] = torch.randn(server.weights[name].shape, generator=torch.Generator().manual_seed(1)) / 9
    payload, plain, masked = method.make_payload(server), Replies([0, 1, 2], tmp_path), Replies([0], tmp_path)
    replies = [method.exchanges[TRAIN].reply(client_of(method, i, round=round), payload)[0] for i in range(3)]
    for index, reply in enumerate(replies):
        plain.add(index, reply)
    masked.add(0, mask(replies))
    right, mine = (method.aggregate(server, of).weights for of in (plain, masked))
    for name, tensor in right.items():
        torch.testing.assert_close(mine[name], tensor, atol=1e-4, rtol=1e-3)


def test_what_it_cannot_do_is_refused(experiment_of: Callable) -> None:
    private = ("federation.weighting=uniform", "federation.privacy.noise_multiplier=1")
    with pytest.raises(UserError, match=r"lorm divides by sums of inputs"):
        experiment_of(*private, method="lorm")
    with pytest.raises(UserError, match=r"federation\.server_lr: lorm .* Use 1"):
        experiment_of("federation.server_lr=0.5", method="lorm")
    with pytest.raises(UserError, match=r"federation\.server_lr: lorm .* server_lr_schedule: constant"):
        experiment_of("federation.server_lr_schedule=1/t", method="lorm")
