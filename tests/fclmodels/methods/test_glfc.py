"""GLFC, LGA and FOT's adaptation: losses in NumPy, what the proxy server rebuilds and chooses, who notices tasks."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pytest
import torch
from scipy.special import expit, softmax

from fclmodels.errors import UserError
from fclmodels.federation.server import Server
from fclmodels.methods.fedavg import FedAvg
from fclmodels.methods.glfc import Glfc
from fclmodels.methods.glfc_fot import GlfcFot
from fclmodels.methods.lga import Lga, measure_radius
from fclmodels.methods.parts.proxy_server import find_prototype
from fclmodels.methods.parts.replay_memory import Replay, unpack_samples
from fclmodels.numerics.gradient_inversion import differentiate
from fclmodels.numerics.prototypes import moments
from fclmodels.storage import trees

FEW = {"inversion_steps": 3, "iterates": 2, "inversion_lr": 0.5}


def train_second_task(
    method: Any, ended: Server, client_of: Callable, round: int = 0
) -> tuple[Server, Any, Any, torch.Tensor]:
    """The server in the second task, a client's training there, its first batch and the loss of that."""
    server = method.start_task(ended, 1)
    memory = method.select_exemplars(client_of(method, 1, 0), method.make_payload(ended)).memory
    client = client_of(method, 1, 1, round, memory=memory)
    training = method.prepare_training(client, method.make_payload(server))
    batch = next(next(method.yield_epochs(training)))
    training.network.eval()
    return server, training, batch, method.compute_loss(training, batch)


def bce(z: np.ndarray, targets: np.ndarray) -> np.ndarray:
    p = expit(z)
    return -(targets * np.log(p) + (1 - targets) * np.log(1 - p)).mean(1)


@pytest.mark.parametrize("kind", [Glfc, Lga])
def test_the_loss_against_numpy(
    kind: type[Glfc], method_of: Callable, client_of: Callable, federate: Callable, mlp: Any
) -> None:
    method = method_of(kind, "federation.batch_size=32", proxy=False, exemplars=4)
    ended = federate(method, 1)
    server, _, batch, loss = train_second_task(method, ended, client_of)
    z, teacher = (mlp.compute_logits(weights, batch.inputs) for weights in (server.weights, ended.weights))
    labels, tasks = batch.labels.numpy(), batch.tasks.numpy()
    targets = np.eye(4)[labels]
    g = 1 - expit(z[np.arange(len(z)), labels])
    if kind is Lga:
        g = g**0.5
    w = g / np.array([g[tasks == task].mean() for task in tasks])
    old = targets.copy()
    old[:, :2] = expit(teacher)
    if kind is Lga:
        w = w.clip(0.5, 5)
        expected = (w * bce(z, targets)).mean() + (w * bce(z, old)).mean()
    else:
        expected = ((w * bce(z, targets)).mean() + bce(z, old).mean()) / 2
    assert {*tasks.tolist()} == {0, 1}
    assert float(loss.detach()) == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("kind", [Glfc, Lga])
def test_in_the_first_task_there_are_labels_alone(
    kind: type[Glfc], method_of: Callable, client_of: Callable, mlp: Any
) -> None:
    """With a weight of 1, as the release has it."""
    method = method_of(kind, proxy=False)
    server = method.start_task(method.create_server(), 0)
    training = method.prepare_training(client_of(method, 0), method.make_payload(server))
    batch = next(next(method.yield_epochs(training)))
    z, labels = mlp.compute_logits(server.weights, batch.inputs), batch.labels.numpy()
    expected = bce(z, np.eye(2)[labels]).mean()
    assert float(method.compute_loss(training, batch).detach()) == pytest.approx(expected, rel=1e-5)


def test_the_server_rebuilds_what_clients_moved(
    method_of: Callable, client_of: Callable, splits_of: Callable, federate: Callable
) -> None:
    """One client, two classes: its samples nearest to their classes' means, after their steps on its own model."""
    method = method_of(
        Glfc, splits=splits_of(clients=1), inversion_steps=150, inversion_lr=0.5, iterates=1, perturb_steps=5
    )
    proxy = federate(method, 1).knowledge["proxy"]
    assert proxy["labels"].tolist() == [0, 1]
    begun = method.start_task(method.create_server(), 0)
    training = method.prepare_training(client_of(method, 0), method.make_payload(begun))
    training.run()
    network = training.network.eval()
    samples = method.run.batches.prepare_inputs(method.run.batches.read_raw(method.select_rows(0, 0)))
    with torch.no_grad():
        features = torch.nn.functional.normalize(network.backbone(samples.inputs))
    for label in (0, 1):
        mine = samples.labels == label
        gaps = (features[mine] - features[mine].mean(0)).norm(dim=1)
        image = samples.inputs[mine][gaps.argmin()][None]
        for _ in range(5):
            image = image.detach().requires_grad_()
            z = network(image)
            loss = torch.nn.functional.binary_cross_entropy_with_logits(z, torch.eye(2)[[label]])
            image = image - 0.2 * torch.autograd.grad(loss, [image])[0]
        assert float((proxy["inputs"][label] - image.detach()).square().mean()) < 0.01


def test_the_teacher_is_the_model_that_answers_best(
    method_of: Callable, federate: Callable, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The later one where scores are equal; without a proxy server the last one."""
    scores, seen = iter([0.4, 0.9, 0.9, 0.1]), []

    def judge(self: Glfc, server: Server) -> float:
        seen.append(server.weights)
        return next(scores)

    monkeypatch.setattr(Glfc, "judge", judge)
    method = method_of(Glfc, "federation.rounds=4", **FEW)
    ended = federate(method, 1)
    started = method.start_task(ended, 1)
    assert trees.digest(started.knowledge["anchor"]) == trees.digest(seen[2])
    assert started.knowledge.keys() == {"anchor"}
    plain = method_of(Glfc, proxy=False)
    ended = federate(plain, 1)
    assert trees.digest(plain.start_task(ended, 1).knowledge["anchor"]) == trees.digest(ended.weights)


def test_the_score_is_the_share_of_images_answered_right(method_of: Callable, federate: Callable, mlp: Any) -> None:
    method = method_of(Glfc, **FEW)
    server = federate(method)
    proxy = server.knowledge["proxy"]
    assert len(proxy["labels"]) == 4 * 2 * 2  # clients, classes, iterates
    right = mlp.compute_logits(server.weights, proxy["inputs"]).argmax(1) == proxy["labels"].numpy()
    assert method.judge(server) == pytest.approx(right.mean())


def test_gradients_leave_a_client_before_a_task_and_by_themselves(experiment_of: Callable, tmp_path: Path) -> None:
    experiment = experiment_of(method="glfc")
    experiment.run(tmp_path / "run")
    ledger = pl.read_parquet(tmp_path / "run" / "ledger.parquet").filter(direction="up", part="prototypes")
    assert set(ledger["kind"]) == {"gradient"}
    assert ledger.height == 8
    assert ledger["round"].max() < -1000


def test_without_a_proxy_server_sums_are_enough_and_nothing_travels_before_a_task(
    experiment_of: Callable, tmp_path: Path
) -> None:
    experiment_of("methods.glfc.proxy=false", "federation.secagg.on=true", method="glfc").run(tmp_path / "run")
    ledger = pl.read_parquet(tmp_path / "run" / "ledger.parquet").filter(pl.col("round") < -1000)
    assert ledger.is_empty()


@pytest.mark.parametrize("method", ["glfc", "lga"])
@pytest.mark.parametrize(
    "settings",
    [("federation.secagg.on=true",), ("federation.privacy.noise_multiplier=1", "federation.weighting=uniform")],
)
def test_single_gradients_are_refused_under_sums_and_noise(
    method: str, settings: tuple[str, ...], experiment_of: Callable, tmp_path: Path
) -> None:
    with pytest.raises(UserError, match="prototypes"):
        experiment_of(*settings, method=method).run(tmp_path / "run")


def test_who_does_not_notice_a_task_sends_nothing_and_loses_the_last_ones_exemplars(
    method_of: Callable, client_of: Callable, federate: Callable, mlp: Any
) -> None:
    method = method_of(Glfc, signal="entropy", **FEW)
    ended = federate(method, 1)
    assert "proxy" not in ended.knowledge  # two classes: no entropy is above ln 2
    server = method.start_task(ended, 1)
    memory = method.select_exemplars(client_of(method, 1, 0), method.make_payload(ended)).memory
    batch = next(method.run.batches.iterate_ordered(method.select_rows(1, 1), 50))
    p = softmax(mlp.compute_logits(server.weights, batch.inputs), axis=1)
    entropy = -(p * np.log(p)).sum(1).mean()
    for before, notices in ((entropy - 1.19, False), (entropy - 1.21, True)):
        client = client_of(method, 1, 1, memory={**memory, "entropy": float(before)})
        answer = method.proxy.show_prototypes(client, method.make_payload(server))
        assert bool(answer.tensors["prototypes"]["linear.bias"].any()) == notices
        samples = unpack_samples(answer.memory)
        assert samples is not None
        assert bool(len(samples.labels)) == notices


@pytest.mark.parametrize("kind", [Glfc, Lga])
def test_prototypes_may_be_shrunk_before_their_gradients_travel(
    kind: type, method_of: Callable, client_of: Callable, federate: Callable, splits_of: Callable
) -> None:
    """A gradient has the encoder's size, the server's images too, and the network sees them enlarged again."""
    splits = splits_of(shape=(1, 16, 16), tasks=2)
    small, whole, same = (
        method_of(kind, splits=splits, encoder_size=size, perturb_steps=0, **FEW) for size in (8, None, 16)
    )
    server = small.start_task(small.create_server(), 0)
    client = client_of(small, 1)
    sent = small.proxy.show_prototypes(client, small.make_payload(server)).tensors["prototypes"]
    assert sent["linear.weight"].shape == (2, 2, 12 * 2 * 2)
    training = small.prepare_training(client, small.make_payload(server))
    training.run()
    samples = small.run.batches.prepare_inputs(small.run.batches.read_raw(client.rows))
    mine = samples.labels == 0
    prototype = find_prototype(training.network, samples.inputs[mine])
    shrunk = torch.nn.functional.interpolate(prototype, (8, 8), mode="bilinear", antialias=True)
    right = differentiate(small.proxy.draw_encoder(training.network.spec), shrunk, samples.labels[mine][:1])
    for gradient, expected in zip(sent.values(), right, strict=True):
        torch.testing.assert_close(gradient[0], expected)
    ended = federate(small, 1)
    assert ended.knowledge["proxy"]["inputs"].shape[1:] == (1, 8, 8)
    first, second = (federate(method, 1) for method in (whole, same))
    assert first.knowledge["proxy"]["inputs"].shape[1:] == (1, 16, 16)
    assert all(torch.equal(tensor, second.weights[name]) for name, tensor in first.weights.items())
    assert first.knowledge["best"]["score"] == second.knowledge["best"]["score"]


@pytest.mark.parametrize("kind", [Glfc, Lga])
def test_entropy_without_a_proxy_server_is_refused(kind: type, method_of: Callable) -> None:
    with pytest.raises(UserError, match=r"^methods\.(glfc|lga)\.signal: entropy .* Use signal: boundary"):
        method_of(kind, signal="entropy", proxy=False)


def test_a_client_remembers_its_entropy_on_the_model_that_a_task_ends_with(
    method_of: Callable, client_of: Callable, federate: Callable, mlp: Any
) -> None:
    method = method_of(Glfc, signal="entropy", **FEW)
    server = federate(method, 1)
    client = client_of(method, 1)
    batch = next(method.run.batches.iterate_ordered(client.rows, 50))
    p = softmax(mlp.compute_logits(server.weights, batch.inputs), axis=1)
    memory = method.select_exemplars(client, method.make_payload(server)).memory
    assert memory["entropy"] == pytest.approx(-(p * np.log(p)).sum(1).mean(), rel=1e-5)


def test_lgas_radius_is_the_mean_variance_of_features(method_of: Callable, federate: Callable, mlp: Any) -> None:
    method = method_of(Lga, **FEW)
    server = federate(method, 1)
    rows = [method.select_rows(0, client) for client in method.list_participants(0)]
    batches = [next(method.run.batches.iterate_ordered(one, 50)) for one in rows]
    features = np.concatenate([mlp.compute_features(server.weights, batch.inputs) for batch in batches])
    labels = np.concatenate([batch.labels.numpy() for batch in batches])
    variances = [np.trace(np.cov(features[labels == c].T, bias=True)) / features.shape[1] for c in (0, 1)]
    assert server.knowledge["radius"] == pytest.approx(np.mean(variances) ** 0.5, rel=1e-5)
    assert method.start_task(server, 1).knowledge["radius"] == server.knowledge["radius"]
    one = moments(torch.ones(3, 2), torch.zeros(3, dtype=torch.int64), 2)
    assert measure_radius(one) == 0


def test_lga_judges_no_model_of_a_tasks_first_rounds_and_then_noisy_features(
    method_of: Callable, federate: Callable
) -> None:
    method = method_of(Lga, first_rounds=2, copies=3, **FEW)
    server = federate(method, 1)
    proxy, best = server.knowledge["proxy"], server.knowledge["best"]
    assert method.judge(replace(server, knowledge={"proxy": proxy, "best": {**best, "rounds": 1}})) == 0
    still = replace(server, knowledge={"proxy": proxy, "best": {**best, "rounds": 2}, "radius": 0.0})
    assert method.judge(still) == Glfc.judge(method, still)
    shaken = replace(still, knowledge={**still.knowledge, "radius": 1e6})
    assert method.judge(shaken) != method.judge(still)


def test_more_iterates_than_steps_are_refused(method_of: Callable) -> None:
    with pytest.raises(UserError, match=r"methods.glfc.iterates: 20 of inversion_steps: 5"):
        method_of(Glfc, inversion_steps=5)


@pytest.mark.parametrize("head", ["growing", "per-task"])
def test_fots_loss_against_numpy(
    head: str, method_of: Callable, client_of: Callable, splits_of: Callable, federate: Callable, mlp: Any
) -> None:
    """Compensated cross entropies, each in its own head where these are many."""
    method = method_of(GlfcFot, "federation.batch_size=8", splits=splits_of(head=head), memory=6)
    ended = federate(method, 1)
    server = method.start_task(ended, 1)
    memory = method.store_samples(client_of(method, 1, 0), {}).memory
    client = client_of(method, 1, 1, memory=memory)
    training, again = (method.prepare_training(client, method.make_payload(server)) for _ in range(2))
    batch = next(next(method.yield_epochs(training)))
    replayed = again.find_added(Replay).draw()
    loss = float(method.compute_loss(training, batch).detach())
    p = []
    for part in (batch, replayed):
        z = mlp.compute_logits(server.weights, part.inputs)
        for row, label, task in zip(z, part.labels.tolist(), part.tasks.tolist(), strict=True):
            own = slice(2 * task, 2 * task + 2) if head == "per-task" else slice(0, 4)
            p.append(softmax(row[own])[label - own.start])
    p, tasks = np.array(p), np.concatenate([batch.tasks.numpy(), replayed.tasks.numpy()])
    g = 1 - p
    w = g / np.array([g[tasks == task].mean() for task in tasks])
    assert loss == pytest.approx((w * -np.log(p)).mean(), rel=1e-5)


def test_fots_adaptation_is_fedavg_in_the_first_task_and_not_in_the_second(
    method_of: Callable, federate: Callable
) -> None:
    for tasks in (1, 2):
        mine, fedavg = (federate(method_of(kind), tasks) for kind in (GlfcFot, FedAvg))
        assert (trees.digest(mine.weights) == trees.digest(fedavg.weights)) == (tasks == 1)
