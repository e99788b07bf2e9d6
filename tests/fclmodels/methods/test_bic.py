"""BiC+FL: its loss in NumPy, what is held out, who corrects what, and that no correction changes no bit."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from scipy.special import log_softmax, softmax

from fclmodels.errors import UserError
from fclmodels.methods.bic import Bic, correct_heads, make_neutral
from fclmodels.methods.fedavg import FedAvg
from fclmodels.numerics.exemplar_losses import fit_correction
from fclmodels.storage import trees

STREAMS: dict[str, dict[str, Any]] = {"growing": {}, "per-task": {"head": "per-task"}}
CORRECTION = {"scale": torch.tensor(0.8, dtype=torch.float64), "shift": torch.tensor(-0.1, dtype=torch.float64)}


@pytest.mark.parametrize("stream", STREAMS)
def test_the_loss_against_numpy(
    stream: str, method_of: Callable, client_of: Callable, splits_of: Callable, after_each_task: Callable, mlp: Any
) -> None:
    """In the third task; the teacher has its own correction, of the second task's classes."""
    method = method_of(Bic, "federation.batch_size=64", splits=splits_of(tasks=3, **STREAMS[stream]), temperature=3.0)
    ended = after_each_task(method)[1]
    ended = replace(ended, knowledge={**ended.knowledge, "correction": CORRECTION})
    server = method.start_task(ended, 2)
    memory = method.select_exemplars(client_of(method, 1, 1), method.make_payload(ended)).memory
    client = client_of(method, 1, 2, memory=memory)
    training = method.prepare_training(client, method.make_payload(server))
    (batch,) = next(method.yield_epochs(training))
    training.network.eval()
    loss = float(method.compute_loss(training, batch).detach())

    z, old = (mlp.compute_logits(weights, batch.inputs) for weights in (server.weights, ended.weights))
    old[:, 2:4] = 0.8 * old[:, 2:4] - 0.1
    distance = -(softmax(old / 3, axis=1) * log_softmax(z[:, :4] / 3, axis=1)).sum(1).mean()
    right = -log_softmax(z, axis=1)[np.arange(len(z)), batch.labels.numpy()].mean()
    assert loss == pytest.approx(2 / 3 * distance + right / 3, rel=1e-5)


def test_what_is_held_out_is_balanced_the_same_in_each_round_and_not_trained_on(
    method_of: Callable, client_of: Callable, federate: Callable
) -> None:
    method = method_of(Bic, held_out=0.5, exemplars=8)
    ended = federate(method, 1)
    memory = method.select_exemplars(client_of(method, 1, 0), method.make_payload(ended)).memory
    rows, stored, held_out = method.hold_out(client_of(method, 1, 1, memory=memory))
    again = method.hold_out(client_of(method, 1, 1, round=1, memory=memory))[2]
    counts = held_out.labels.bincount().tolist()
    assert len({*counts}) == 1
    assert len(counts) == 4
    assert torch.equal(held_out.inputs, again.inputs)
    everything = len(method.select_rows(1, 1)) + len(method.hold_out(client_of(method, 1, 0, memory=memory))[1].labels)
    assert len(rows) + len(stored.labels) + len(held_out.labels) == everything
    trained = [image.flatten().tolist() for image in stored.inputs]
    assert not any(image.flatten().tolist() in trained for image in held_out.inputs[: sum(counts[:2])])


@pytest.mark.parametrize("stream", STREAMS)
def test_the_server_averages_what_clients_fit_and_answers_with_it(
    stream: str, method_of: Callable, client_of: Callable, splits_of: Callable, federate: Callable, mlp: Any
) -> None:
    method = method_of(Bic, splits=splits_of(**STREAMS[stream]))
    fits: dict[int, Any] = {}
    answer_fit = method.exchanges["fit"].answer

    def note(client: Any, payload: Any) -> Any:
        held_out = method.hold_out(client)[2]
        inputs = method.run.batches.prepare_inputs(held_out).inputs
        logits = torch.from_numpy(mlp.compute_logits(payload["weights"].tensors, inputs))
        fits[client.index] = (
            len(held_out.labels),
            *fit_correction(logits, held_out.labels, torch.tensor([2, 3]), 250, 0.01),
        )
        return answer_fit(client, payload)

    method.exchanges["fit"] = replace(method.exchanges["fit"], answer=note)
    server = federate(method)
    sizes, *numbers = (np.array(column, float) for column in zip(*fits.values(), strict=True))
    expected = [np.average(values, weights=sizes) for values in numbers]
    correction = server.knowledge["correction"]
    assert [float(correction[name]) for name in ("scale", "shift")] == pytest.approx(expected, rel=1e-4)
    batch = next(method.run.batches.iterate_ordered(method.run.splits.select_test_rows(1), 50))
    z = mlp.compute_logits(server.weights, batch.inputs)
    z[:, 2:] = expected[0] * z[:, 2:] + expected[1]
    answers = method.make_predictor(server)(batch.inputs).logits.detach()
    assert answers.numpy() == pytest.approx(z, rel=1e-3, abs=1e-5)


def test_the_neutral_correction_changes_no_bit(method_of: Callable, federate: Callable) -> None:
    method = method_of(Bic)
    server = federate(method, 1)
    assert trees.digest(correct_heads(server.weights, server.spec, make_neutral())) == trees.digest(server.weights)


def test_the_first_task_is_fedavg(method_of: Callable, federate: Callable) -> None:
    mine, fedavg = (federate(method_of(kind), 1) for kind in (Bic, FedAvg))
    assert trees.digest(mine.weights) == trees.digest(fedavg.weights)


def test_a_client_without_exemplars_says_next_to_nothing(
    method_of: Callable, client_of: Callable, federate: Callable
) -> None:
    method = method_of(Bic)
    server = method.start_task(federate(method, 1), 1)
    answer = method.answer_fit(client_of(method, 1, 1), method.make_payload(server))
    assert float(answer.tensors["weight"]["weight"]) == pytest.approx(1e-9)
    assert [float(x) for x in answer.tensors["correction"].values()] == [0, 0]


def test_a_loss_over_the_tasks_own_classes_is_refused(method_of: Callable) -> None:
    with pytest.raises(UserError, match=r"methods.bic: .* Use model.loss_over: seen"):
        method_of(Bic, "model.loss_over=task")
