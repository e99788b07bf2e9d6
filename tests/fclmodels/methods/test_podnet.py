"""PODNet+FL and AFC+FL: losses of whole clients in the same terms, where proxies come from, and who trains them."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from fclmodels.errors import UserError
from fclmodels.federation.server import Server
from fclmodels.methods.afc import Afc
from fclmodels.methods.parts.proxy_classifier import PROXIES
from fclmodels.methods.parts.rehearsal import Rehearsed
from fclmodels.methods.podnet import Podnet
from fclmodels.numerics import pooled_distillation as pooled
from fclmodels.numerics.cosine_proxies import nca_loss
from fclmodels.storage import trees


def prepare(method: Rehearsed, ended: Server, client_of: Callable) -> tuple[Server, Any, Any]:
    """The server in the second task, a client's training there and its first batch, of rows and exemplars."""
    server = method.start_task(ended, 1)
    memory = method.select_exemplars(client_of(method, 1, 0), method.make_payload(ended)).memory
    training = method.prepare_training(client_of(method, 1, 1, memory=memory), method.make_payload(server))
    training.network.eval()
    return server, training, next(next(method.yield_epochs(training)))


def activations(weights: dict[str, Tensor], x: Tensor) -> tuple[list[Tensor], Tensor]:
    """The perceptron's block outputs, before their ReLU, and its features."""
    outputs, h = [], x.flatten(1)
    for layer in ("fc1", "fc2", "fc3"):
        outputs.append(h @ weights[f"backbone.{layer}.weight"].T + weights[f"backbone.{layer}.bias"])
        h = outputs[-1].relu()
    return outputs, h


@pytest.mark.parametrize("kind", [Podnet, Afc])
def test_the_loss_is_nca_and_the_distance_from_last_tasks_model(
    kind: type[Rehearsed], method_of: Callable, client_of: Callable, federate: Callable
) -> None:
    method = method_of(kind, "federation.batch_size=32", exemplars=2)
    ended = federate(method, 1)
    server, training, batch = prepare(method, ended, client_of)
    # A student that has left its teacher.
    start = {name: weight + 0.1 for name, weight in server.weights.items()}
    training.network.load_state_dict(start)
    loss = float(method.compute_loss(training, batch).detach())
    own, features = activations(start, batch.inputs)
    other, targets = activations(ended.weights, batch.inputs)
    proxies = training.networks[PROXIES][0]
    expected = nca_loss(proxies(features), batch.labels, proxies.scale)
    if kind is Podnet:
        spatial = sum(pooled.measure_pooled_distance(a, b) for a, b in zip(own, other, strict=True)) / 3
        distance = 5 * spatial + pooled.measure_angle(features, targets)
    else:
        importance = ended.knowledge["importance"].values()
        by_block = zip(own, other, importance, strict=True)
        distance = 4 * sum(pooled.measure_channel_distance(*block) for block in by_block) / 3
    assert {*batch.tasks.tolist()} == {0, 1}
    assert float(distance) > 0
    assert loss == pytest.approx(float((expected + 2**0.5 * distance).detach()), rel=1e-5)


@pytest.mark.parametrize("kind", [Podnet, Afc])
def test_a_student_that_is_its_teacher_has_no_distance(
    kind: type[Rehearsed], method_of: Callable, client_of: Callable, federate: Callable
) -> None:
    method = method_of(kind)
    _, training, batch = prepare(method, federate(method, 1), client_of)
    distances: list[Tensor] = []
    compare = method.compare
    method.compare = lambda *of: distances.append(compare(*of)) or distances[-1]
    method.compute_loss(training, batch)
    assert float(distances[0].detach()) == pytest.approx(0, abs=1e-6)


def test_new_proxies_are_drawn_from_features_and_old_ones_stay_in_the_rounds(
    method_of: Callable, federate: Callable, mlp: Any
) -> None:
    method = method_of(Podnet, proxies=500, tune_epochs=0)
    first = federate(method, 1).networks[PROXIES]["weight"]
    servers = []
    begin = method.begin_task
    method.begin_task = lambda server, cohort: servers.append(begin(server, cohort)) or servers[-1]
    ended = federate(method)
    begun = servers[-1]
    assert torch.equal(ended.networks[PROXIES]["weight"][:2], first[:2])
    assert torch.equal(begun.networks[PROXIES]["weight"][:2], first[:2])
    rows = [method.select_rows(1, client) for client in method.list_participants(1)]
    batches = [next(method.run.batches.iterate_ordered(one, 50)) for one in rows]
    h = np.concatenate([mlp.compute_features(begun.weights, batch.inputs) for batch in batches])
    h /= np.linalg.norm(h, axis=1, keepdims=True)
    labels = np.concatenate([batch.labels.numpy() for batch in batches])
    drawn = begun.networks[PROXIES]["weight"]
    for label in (2, 3):
        mean = h[labels == label].mean(0)
        centre = drawn[label].double().mean(0).numpy()
        assert centre @ mean / np.linalg.norm(centre) / np.linalg.norm(mean) > 0.99


def test_after_a_task_exemplars_alone_train_the_classifier(
    method_of: Callable, client_of: Callable, federate: Callable
) -> None:
    method = method_of(Podnet, tune_epochs=3)
    server = federate(method, 1)
    memory = method.select_exemplars(client_of(method, 1, 0), method.make_payload(server)).memory
    answer = method.classifier.tune_proxies(client_of(method, 1, 0, memory=memory), method.make_payload(server))
    assert answer.tensors["tuned"]["weight"][:2].any()
    assert not answer.tensors["tuned"]["weight"][2:].any()
    without = method.classifier.tune_proxies(client_of(method, 1, 0), method.make_payload(server))
    assert not any(change.any() for change in without.tensors["tuned"].values())


def test_importance_is_that_of_squared_gradients(method_of: Callable, client_of: Callable, federate: Callable) -> None:
    """Of each sample by itself: vectors of units are one channel, whose importance is 1 beside no other."""
    method = method_of(Afc, "model.backbone=cnn", "model.width=4", "model.features=8")
    server = federate(method, 1)
    client, payload = client_of(method, 1, 0), method.make_payload(server)
    sums = method.sum_gradients(client, payload).tensors["importance"]
    assert [len(channels) for channels in sums.values()] == [4, 8, 1]
    network, proxies = (
        method.load_final(client, payload).requires_grad_(True),
        method.classifier.load_proxies(payload[PROXIES].tensors),
    )
    expected = torch.zeros(8, dtype=torch.float64)
    for batch in method.run.batches.iterate_ordered(client.rows, 1):
        outputs = method.classifier.run_blocks(network, batch)
        (gradient,) = torch.autograd.grad(
            method.classifier.classify(network, proxies, outputs["features"], batch), outputs["conv2"]
        )
        expected += gradient[0].double().square().sum((1, 2))
    torch.testing.assert_close(sums["conv2"], expected, rtol=1e-4, atol=1e-12)
    assert all(float(mean.mean()) == pytest.approx(1) for mean in server.knowledge["importance"].values())


@pytest.mark.parametrize("method", ["podnet", "afc"])
@pytest.mark.parametrize(
    "settings",
    [
        ("model.backbone=resnet18",),
        ("model.backbone=vit", "model.patch=3", "model.width=8", "model.depth=2", "model.attention_heads=2"),
    ],
)
@pytest.mark.slow
def test_every_backbone_that_names_its_blocks_will_do(
    method: str, settings: tuple[str, ...], experiment_of: Callable, tmp_path: Path
) -> None:
    experiment_of("federation.rounds=1", *settings, method=method).run(tmp_path / "run")


def test_a_stream_that_has_grown_gets_proxies_for_its_new_classes(
    method_of: Callable, federate: Callable, splits_of: Callable
) -> None:
    short = federate(method_of(Podnet, splits=splits_of(tasks=2)))
    longer = method_of(Podnet, splits=splits_of(tasks=3))
    started = longer.start_task(Server.from_tree(short.to_tree()), 2)
    weight = started.networks[PROXIES]["weight"]
    assert len(weight) == 6
    assert torch.equal(weight[:4], short.networks[PROXIES]["weight"])


def test_before_a_tasks_end_the_classifier_answers(method_of: Callable, federate: Callable) -> None:
    method = method_of(Podnet)
    started = method.start_task(federate(method, 1), 1)
    inputs = next(method.run.batches.iterate_ordered(method.run.splits.select_test_rows(0), 50)).inputs
    with torch.inference_mode():
        _, features = activations(started.weights, inputs)
        proxies = method.classifier.load_proxies(started.networks[PROXIES])
        torch.testing.assert_close(method.make_predictor(started)(inputs).logits, proxies(features, classes=4))


@pytest.mark.parametrize("kind", [Podnet, Afc])
def test_the_first_task_neither_draws_proxies_nor_tunes_them(
    kind: type[Rehearsed], method_of: Callable, federate: Callable
) -> None:
    """As in the releases."""
    short, long = (federate(method_of(kind, tune_epochs=epochs), 1) for epochs in (0, 3))
    assert trees.digest(short.networks[PROXIES]) == trees.digest(long.networks[PROXIES])
    method = method_of(kind)
    begun = method.start_task(method.create_server(), 0)
    assert method.begin_task(begun, None) is begun  # nobody is asked


def test_old_proxies_stay_under_weight_decay_and_adam(method_of: Callable, client_of: Callable, federate: Any) -> None:
    method = method_of(Podnet, "optimizer.kind=adam", "optimizer.weight_decay=0.1", tune_epochs=0)
    server = method.start_task(federate(method, 1), 1)
    moved = method.train(client_of(method, 1, 1), method.make_payload(server)).tensors["proxies-update"]["weight"]
    assert not moved[:2].any()
    assert moved[2:].any()


def test_afcs_channels_are_asked_of_nobodys_samples(method_of: Callable, monkeypatch: pytest.MonkeyPatch) -> None:
    method = method_of(Afc, "model.backbone=cnn", "model.width=4", "model.features=8")
    monkeypatch.setattr(type(method), "select_rows", None)
    (outline,) = method.make_importance_form(1, -1).values()
    assert [tuple(tensor.shape) for tensor in outline.tensors.values()] == [(4,), (8,), (1,)]


def test_a_block_that_is_not_there_is_refused(method_of: Callable, client_of: Callable, federate: Callable) -> None:
    method = method_of(Podnet, blocks=("fc9",))
    with pytest.raises((UserError, ValueError), match="fc9 is not a block"):
        federate(method, 1)


def test_the_first_task_is_nca_alone(method_of: Callable, federate: Callable) -> None:
    mine, heavier = (federate(method_of(Podnet, spatial=weight), 1) for weight in (5.0, 50.0))
    assert trees.digest(mine.weights) == trees.digest(heavier.weights)
