"""DyTox+FL: its losses by hand and in NumPy, what a task trains and what stays, and tuning on exemplars."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from numpy.testing import assert_allclose
from scipy.special import expit, log_softmax, softmax
from torch import Tensor

from fclmodels.data.splits.split_reader import Splits
from fclmodels.errors import UserError
from fclmodels.federation.server import Server
from fclmodels.methods.dytox import Dytox, compare_and_distil, compare_one_hot
from fclmodels.methods.parts.exemplar_memory import list_classes
from fclmodels.methods.parts.replay_memory import unpack_samples
from fclmodels.methods.parts.task_tokens import build_task_tokens, embed_tokens
from fclmodels.testing.tiny_splits import CONVIT

ADAM = ("optimizer.kind=adamw", "optimizer.lr=0.003", "model.drop_path=0")


def bce(z: np.ndarray, y: np.ndarray) -> float:
    hot = np.eye(z.shape[1])[y]
    return float(-(hot * np.log(expit(z)) + (1 - hot) * np.log(expit(-z))).mean())


def test_the_loss_by_hand() -> None:
    """z = (0.4, -0.3, 1.2), the teacher's (0.6, 0.1), y = 2: 1/3 of 0.576884 and 2/3 of 0.002309."""
    z, y, old = torch.tensor([[0.4, -0.3, 1.2]]), torch.tensor([2]), torch.tensor([[0.6, 0.1]])
    assert compare_one_hot(z, y).item() == pytest.approx(0.576884, abs=1e-6)
    assert compare_and_distil(z, y, old, 1.0).item() == pytest.approx(0.193834, abs=1e-6)
    assert compare_and_distil(z, y, z[:, :2], 1.0).item() == pytest.approx(0.576884 / 3, abs=1e-6)


@pytest.fixture
def dytox_of(method_of: Callable, splits_of: Callable[..., Splits]) -> Callable[..., Any]:
    def make(*overrides: str, tasks: int = 2, **settings: Any) -> Any:
        own = {"tuning_epochs": 1, **settings}
        splits = splits_of(tasks=tasks, head="per-task")
        return method_of(Dytox, *CONVIT, *ADAM, *overrides, splits=splits, **own)

    return make


def linear(x: np.ndarray, of: dict[str, np.ndarray], name: str) -> np.ndarray:
    return x @ of[f"{name}.weight"].T + of[f"{name}.bias"]


def normed(x: np.ndarray, of: dict[str, np.ndarray], name: str) -> np.ndarray:
    x = (x - x.mean(-1, keepdims=True)) / np.sqrt(x.var(-1, keepdims=True) + 1e-5)
    return x * of[f"{name}.weight"] + of[f"{name}.bias"]


def numbers_of(tensors: dict[str, Tensor]) -> dict[str, np.ndarray]:
    return {name: tensor.double().numpy() for name, tensor in tensors.items()}


def test_a_clients_loss_in_the_second_task_against_numpy(
    dytox_of: Callable, client_of: Callable, federate: Any
) -> None:
    """BCE and KL over all columns, lam = 2/4, and 0.1 of the divergence head's; each head reads its own token."""
    method = dytox_of("federation.batch_size=64", temperature=2.0)
    ended = federate(method, 1)
    server = method.start_task(ended, 1)
    memory = method.select_exemplars(client_of(method, 1), method.make_payload(ended)).memory
    client = client_of(method, 1, 1, memory=memory)
    training = method.prepare_training(client, method.make_payload(server))
    ((batch,),) = (list(epoch) for epoch in method.yield_epochs(training))
    assert set(batch.tasks.tolist()) == {0, 1}
    loss = method.compute_loss(training, batch).item()

    def logits_of(server: Server) -> tuple[np.ndarray, list[np.ndarray]]:
        network, tokens = method.networks.load(server.spec, server.weights).eval(), build_task_tokens(method.token_spec)
        tokens.load_state_dict(server.networks["tokens"])
        with torch.no_grad():
            embedded = [e.double().numpy() for e in embed_tokens(network, tokens, batch.inputs)]
        weights, own = numbers_of(server.weights), numbers_of(server.networks["tokens"])
        heads = [linear(normed(e, own, f"{t}.norm"), weights, f"heads.{t}") for t, e in enumerate(embedded)]
        return np.concatenate(heads, axis=1), embedded

    (z, embedded), (answers, _) = logits_of(server), logits_of(ended)
    labels = batch.labels.numpy()  # tasks of their own classes: columns in the order of labels
    p, q = softmax(answers / 2, 1), log_softmax(z[:, :2] / 2, 1)
    expected = bce(z, labels) / 2 + 4 * (p * (log_softmax(answers / 2, 1) - q)).mean() / 2
    own = numbers_of(server.networks["tokens"])
    divergence = linear(normed(embedded[1], own, "1.divergence.0"), own, "1.divergence.1")
    expected += 0.1 * bce(divergence, np.maximum(labels - 1, 0))
    assert loss == pytest.approx(expected, rel=1e-4)


def test_the_first_task_is_bce_alone(dytox_of: Callable, client_of: Callable) -> None:
    method = dytox_of("federation.batch_size=64")
    server = method.start_task(method.create_server(), 0)
    client = client_of(method, 0)
    answer = method.train(client, method.make_payload(server))
    (batch,) = method.run.batches.iterate_ordered(client.rows, 64)
    with torch.no_grad():
        logits = method.make_predictor(server)(batch.inputs).logits.double().numpy()
    assert answer.loss == pytest.approx(bce(logits, batch.labels.numpy()), rel=1e-4)
    assert not answer.tensors["tokens-update"]["0.divergence.1.weight"].any()


def test_a_task_trains_its_own_token_and_head_alone(dytox_of: Callable, after_each_task: Any) -> None:
    """Without tuning, earlier tokens, norms and heads keep their bits, and later tasks' tokens are as drawn."""
    method = dytox_of(tasks=3, tuning_epochs=0)
    first, second, _ = after_each_task(method)
    drawn = method.auxiliaries.create_initial()["tokens"]
    for name, tensor in second.networks["tokens"].items():
        before = first.networks["tokens"][name]
        if name.startswith("0."):
            assert torch.equal(tensor, before)
        if name.startswith("2."):
            assert torch.equal(tensor, drawn[name])
    assert not torch.equal(second.networks["tokens"]["1.token"], drawn["1.token"])
    assert not torch.equal(first.networks["tokens"]["0.token"], drawn["0.token"])
    assert torch.equal(second.weights["heads.0.weight"], first.weights["heads.0.weight"])
    assert not torch.equal(second.weights["backbone.embed.positions"], first.weights["backbone.embed.positions"])


def test_tuning_leaves_the_encoder(dytox_of: Callable, client_of: Callable, federate: Any) -> None:
    """It moves old tokens and heads too, on as many exemplars of each class, at a learning rate of its own."""
    method = dytox_of("optimizer.lr_decay=0.5", exemplars=4, tuning_lr=0.01)
    ended = federate(method, 1)
    server, memory = method.start_task(ended, 1), {}
    for task, of in ((0, ended), (1, server)):
        memory = method.select_exemplars(client_of(method, 2, task, memory=memory), method.make_payload(of)).memory
    assert list_classes(unpack_samples(memory)) == [(0, 0), (0, 1), (1, 2), (1, 3)]
    answer = method.tune_on_exemplars(client_of(method, 2, 1, -2, memory=memory), method.make_payload(server))
    form = method.make_tune_form(1, -2)["update"].tensors
    assert answer.tensors["update"].keys() == form.keys()
    assert not any("embed" in name or "layers" in name for name in form)
    assert answer.tensors["update"]["heads.0.weight"].any()
    assert answer.tensors["tokens-update"]["0.token"].any()
    # One step of AdamW on four exemplars: as long as its learning rate, times the client's weight.
    longest = answer.tensors["tokens-update"]["1.token"].abs().max().item() / 8
    assert longest == pytest.approx(0.01, rel=0.05)


def test_tokens_of_first_tasks_do_not_depend_on_how_many_follow(dytox_of: Callable) -> None:
    """So that a stream may go on: a server with fewer tokens gets those that it lacks."""
    two, three = dytox_of(tasks=2), dytox_of(tasks=3)
    before, after = (method.auxiliaries.create_initial()["tokens"] for method in (two, three))
    assert all(torch.equal(tensor, after[name]) for name, tensor in before.items())
    grown = three.start_task(
        Server(two.create_server().spec, two.create_server().weights, 0, networks={"tokens": before}), 1
    )
    assert grown.networks["tokens"].keys() == grown.knowledge["anchor-tokens"].keys() == after.keys()


def test_an_earlier_state_answers_on_a_longer_stream(dytox_of: Callable, federate: Any) -> None:
    two, three = dytox_of(tasks=2), dytox_of(tasks=3)
    server = federate(two, 1)
    (batch,) = two.run.batches.iterate_ordered(two.run.splits.select_rows(0, "test"), 64)
    with torch.no_grad():
        logits = [method.make_predictor(server)(batch.inputs).logits for method in (two, three)]
    assert torch.equal(*logits)


@pytest.mark.slow
def test_old_classes_are_not_lost(dytox_of: Callable, federate: Callable) -> None:
    """With exemplars, half of the first task's samples and more are right among all classes."""
    method = dytox_of("federation.rounds=8", "optimizer.lr=0.01", tuning_epochs=4)
    server = federate(method)
    (batch,) = method.run.batches.iterate_ordered(method.run.splits.select_rows(0, "train"), 64)
    with torch.no_grad():
        answers = method.make_predictor(server)(batch.inputs).logits.argmax(1)
    assert (answers == batch.labels).double().mean() > 0.5


def test_the_loss_against_numpy_over_columns() -> None:
    random = np.random.default_rng(0)
    z, old, y = random.normal(size=(5, 6)), random.normal(size=(5, 4)), random.integers(6, size=5)
    p, q = log_softmax(old, 1), log_softmax(z[:, :4], 1)
    expected = bce(z, y) / 3 + 2 / 3 * (np.exp(p) * (p - q)).mean()
    tensors = (torch.from_numpy(array) for array in (z, y, old))
    assert_allclose(compare_and_distil(*tensors, 1.0), expected, rtol=1e-10)


@pytest.mark.parametrize("settings", [("model.head=per-task",), (*CONVIT, "model.head=growing")])
def test_other_networks_are_refused(settings: tuple[str, ...], method_of: Callable) -> None:
    with pytest.raises(UserError, match=r"methods\.dytox.*Use model\.backbone: convit and model\.head: per-task"):
        method_of(Dytox, *settings)
