"""LANDER: worked numbers, its loss in NumPy, the release's synthesis, its choice of a model, FedAvg as a limit."""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pytest
import torch
from numpy.testing import assert_allclose
from scipy.special import log_softmax, softmax
from torch import nn

from fclmodels.backbones.model.network import build_network
from fclmodels.data.label_embeddings import write_embeddings
from fclmodels.errors import UserError
from fclmodels.federation.engine.replies import Replies
from fclmodels.federation.server import Server
from fclmodels.methods import lander
from fclmodels.methods.fedavg import FedAvg
from fclmodels.methods.lander import Lander, weigh
from fclmodels.methods.parts.image_generator import LabelGenerator
from fclmodels.methods.parts.label_synthesis import LabelSynthesis, bound, draw_balanced
from fclmodels.methods.parts.synthetic_replay import SyntheticImages
from fclmodels.numerics.robust_means import robust_mean
from fclmodels.storage import trees

TINY: dict[str, Any] = {"pool": 8, "batch": 8, "g_steps": 2, "warmup": 1, "student_steps": 2, "noise": 4, "width": 2}


def test_worked_numbers() -> None:
    assert weigh(10, 20, 0.2, 0.4) == pytest.approx((0.364603, 0.978475), abs=1e-6)
    assert weigh(90, 100, 0.2, 0.4) == pytest.approx((0.247984, 2.152534), abs=1e-6)
    e = torch.tensor([[0.2, 0.1], [0.1, 0.1]])
    assert bound(torch.tensor([[0.2, 0.2], [0.1, -0.1]]), e, 0.015).item() == 0
    assert bound(torch.tensor([[0.1, 0.2], [0.0, -0.3]]), e, 0.015).item() == pytest.approx(0.0325, abs=1e-6)


@pytest.mark.parametrize(
    ("side", "parameters"), [(32, 5_744_451), (64, 12_060_483), (224, 10_308_163)]
)  # in the notes of the releases 5.7, 12.1 and 10.3 M
def test_the_generator_is_of_the_releases_size(side: int, parameters: int) -> None:
    with torch.device("meta"):
        generator = LabelGenerator(512, 256, 256, 64, (3, side, side))
        assert generator(torch.empty(256, 512)).shape == (256, 3, side, side)
    assert sum(p.numel() for p in generator.parameters()) == parameters


def test_without_texts_images_and_choice_it_is_fedavg_to_the_bit(
    method_of: Callable, federate: Callable, monkeypatch: pytest.MonkeyPatch
) -> None:
    hard = ("model.loss_over=task", "optimizer.momentum=0.9", "optimizer.weight_decay=0.1")
    monkeypatch.setattr(lander, "weigh", lambda old, classes, cur, pre: (1.0, 0.0))
    ours = federate(method_of(Lander, *hard, **TINY, ltc=0.0, pre=0.0, model_choice="last"))
    assert trees.digest(ours.weights) == trees.digest(federate(method_of(FedAvg, *hard)).weights)


def test_a_clients_loss_against_numpy(method_of: Callable, client_of: Callable, federate: Callable, mlp: Any) -> None:
    """In the second task, on images of a pool of a test's own."""
    method = method_of(Lander, **TINY, radius=0.001)
    last = federate(method, 1)
    server = method.start_task(last, 1)
    images = torch.randint(256, (5, 1, 6, 6), generator=torch.Generator().manual_seed(0), dtype=torch.uint8)
    pool = {"images": images, "labels": torch.zeros(5).int()}
    maps = {"map": {name: w + 0.1 * torch.randn_like(w) for name, w in server.networks["map"].items()}}
    student = {name: w + 0.1 * torch.randn_like(w) for name, w in server.weights.items()}
    server = Server(server.spec, student, 1, {**server.knowledge, "synthetic": pool}, networks=maps)
    client = client_of(method, 1, 1)
    training, batch = method.prepare_training(client, method.make_payload(server)), next(next(client.yield_epochs()))
    inputs = next(SyntheticImages(client, images, 4))

    def map_features(weights: Any, of_map: Any, x: torch.Tensor) -> np.ndarray:
        return mlp.compute_features(weights, x) @ of_map["weight"].double().numpy().T + of_map["bias"].double().numpy()

    new, old, t = (
        mlp.compute_logits(w, x) for w, x in ((student, batch.inputs), (student, inputs), (last.weights, inputs))
    )
    e = method.embeddings[batch.labels].double().numpy()
    B = max(0, ((map_features(student, maps["map"], batch.inputs) - e) ** 2).mean() - 0.001)
    ce = -log_softmax(new[:, 2:], axis=1)[np.arange(4), batch.labels.numpy() - 2].mean()
    gap = log_softmax(t / 2, axis=1) - log_softmax(old[:, :2] / 2, axis=1)
    kl = (softmax(t / 2, axis=1) * gap).sum(1).mean()
    maps_apart = map_features(student, maps["map"], inputs) - map_features(last.weights, last.networks["map"], inputs)
    A, b = np.log2(4 / 2 + 1), np.sqrt(2 / 4)
    right = 0.2 * (1 + 1 / A) / b * (ce + 5 * B) + 0.4 * A * b * (kl + (maps_apart**2).mean())
    assert_allclose(method.compute_loss(training, batch).item(), right, rtol=1e-5)


def test_five_rounds_are_the_releases(method_of: Callable, splits_of: Callable) -> None:
    """Its NAYER with its NLGenerator (tmtuan1307, methods/) ran on this teacher without shifts and mirrors.

    There its generator's first linear weights and its mean of pixels after them: ours were within 1e-7, with equal
    images; from the fourth round on the student counts in both.
    """
    of = {"batch": 12, "pool": 12, "g_steps": 3, "student_steps": 0, "noise": 5, "width": 3, "rounds": 5}
    model = ("model.backbone=resnet18", "model.width=4")
    method = method_of(
        Lander, *model, splits=splits_of(shape=(3, 8, 8)), **{**of, "warmup": 1, "pool_from": "start", "radius": 0.01}
    )
    teacher, student = (build_network(method.run.make_spec(2), torch.Generator().manual_seed(seed)) for seed in (1, 2))
    random = torch.manual_seed(1)
    for layer in teacher.modules():
        if isinstance(layer, nn.BatchNorm2d):
            layer.running_mean.normal_(generator=random)
            layer.running_var.uniform_(0.5, 2, generator=random)
    maps = tuple(nn.Linear(32, 6) for _ in range(2))
    work = LabelSynthesis(
        method.run, method.settings, teacher, student, maps, 0.4 * torch.randn(4, 6, generator=random)
    )
    losses = []
    for number in range(5):
        torch.manual_seed(10 + number)
        losses.append(work.step(number))
    assert_allclose(losses, [243.90492, 242.94386, 241.89812, 240.85521, 239.98225], rtol=1e-5)
    first = work.generator.images.linear.weight.detach().flatten()[:3]
    assert_allclose(first, [-0.017331, 0.255297, -0.325174], atol=2e-5)
    assert work.pixels[0][0].item() == pytest.approx(0.627518, abs=2e-5)
    restored = LabelSynthesis(method.run, method.settings, teacher, student, maps, torch.randn(4, 6))
    restored.restore(work.collect_state())
    assert trees.digest(restored.collect_state()) == trees.digest(work.collect_state())


def test_a_round_after_the_warmup_leaves_images(method_of: Callable) -> None:
    """The student learns from round `warmup` on, so that as many rounds leave one round's images, and fewer none."""
    few = {**TINY, "pool": 100, "warmup": 3}
    assert "8 synthetic images" in method_of(Lander, **few, rounds=3).list_advice()[0]
    with pytest.raises(UserError, match="rounds: 2 of warmup: 3 leave no image"):
        method_of(Lander, **few, rounds=2)


def test_classes_are_balanced() -> None:
    counts = draw_balanced(3, 11).bincount(minlength=3)
    assert counts.sum() == 11
    assert counts.min() >= 3


def test_a_task_ends_with_the_model_of_its_best_round(method_of: Callable, federate: Callable) -> None:
    """Rounds at a rate that grows: the loss is least early, and the model is what that round was sent."""
    method = method_of(Lander, "federation.rounds=4", **TINY)
    seen: list[tuple[float, Server]] = []
    aggregate = method.aggregate

    def note(server: Server, replies: Any) -> Server:
        sums = replies.sum("losses")
        seen.append((float(sums["loss"] / sums["samples"]), server))
        return aggregate(server, replies)

    method.aggregate = note
    ended = federate(method, 1)
    best = min(seen, key=lambda pair: pair[0])[1]
    assert trees.digest([ended.weights, ended.networks]) == trees.digest([best.weights, best.networks])
    assert "best" not in ended.knowledge
    last = federate(method_of(Lander, "federation.rounds=4", **TINY, model_choice="last"), 1)
    assert trees.digest(last.weights) != trees.digest(ended.weights)


def test_a_clients_losses_are_those_of_its_first_epoch(method_of: Callable, client_of: Callable) -> None:
    method = method_of(Lander, "federation.local_epochs=3", "federation.rounds=5", **TINY)
    server = method.start_task(method.create_server(), 0)
    client = client_of(method, 0, 0, 2)
    reply, _ = method.exchanges["train"].reply(client, method.make_payload(server))
    losses = reply.parts["losses"].tensors
    assert losses["samples"] == reply.parts["weight"].tensors["weight"]
    one = method_of(Lander, "federation.rounds=5", **TINY)
    of_one, _ = one.exchanges["train"].reply(client_of(one, 0, 0, 2), one.make_payload(server))
    assert (losses["loss"] / losses["samples"]).item() == pytest.approx(of_one.loss, rel=1e-6)


def test_a_claim_of_many_samples_does_not_discard_a_tasks_training(method_of: Callable, federate: Callable) -> None:
    """One client says in the first round that its loss is 0, of 1e9 samples: its reply is refused."""
    method = method_of(Lander, "federation.rounds=4", **TINY)
    servers, honest, aggregate = [], method.make_further_parts, method.aggregate

    def further_parts(training: Any, payload: Any) -> Any:
        parts, zero = honest(training, payload), torch.zeros((), dtype=torch.float64)
        lies = training.client.index == training.client.round == 0
        return {"losses": {"loss": zero, "samples": zero + 1e9}} if lies else parts

    def note(server: Server, replies: Any) -> Server:
        servers.append((server, replies.clients))
        return aggregate(server, replies)

    method.make_further_parts, method.aggregate = further_parts, note
    ended = federate(method, 1)
    assert 0 not in servers[0][1]
    assert trees.digest(ended.weights) != trees.digest(servers[0][0].weights)


@pytest.fixture
def loss_after(method_of: Callable, client_of: Callable, splits_of: Callable, tmp_path: Path) -> Callable[..., Any]:
    """The loss that the server notes of a round in which the clients, of equal weight, say these."""

    def measure(losses: list[float], rule: Any = None, weight: float = 1.0) -> Any:
        settings = ("federation.rounds=2", "federation.weighting=uniform")
        method = method_of(Lander, *settings, splits=splits_of(clients=5), **TINY)
        server = method.start_task(method.create_server(), 0)
        replies = Replies(range(5), tmp_path, rule)
        for index, loss in enumerate(losses):
            reply, _ = method.exchanges["train"].reply(client_of(method, index), method.make_payload(server))
            reply.parts["losses"].tensors["loss"] = torch.tensor(loss, dtype=torch.float64)
            replies.add(index, reply, weight)
        return method.aggregate(server, replies).knowledge.get("best", {}).get("loss")

    return measure


def test_each_client_has_a_vote_of_its_updates_weight(loss_after: Callable[..., Any]) -> None:
    """A claim of no loss moves the mean by a fifth, and the median not at all; late clients do not count."""
    assert loss_after([2.0, 2.0, 2.0, 2.0, 0.0]) == pytest.approx(1.6)
    assert loss_after([2.0, 2.0, 2.0, 2.0, 60.0], partial(robust_mean, "median", 0, 1.0)) == pytest.approx(2.0)
    assert loss_after(5 * [2.0], weight=0.5) is None


def test_what_travels(experiment_of: Callable, splits_of: Callable, tmp_path: Path) -> None:
    experiment_of(method="lander", splits=splits_of(tasks=2)).run(tmp_path / "run")
    ledger = pl.read_parquet(tmp_path / "run" / "ledger.parquet")
    down, up = (set(ledger.filter(task=1, direction=way)["part"]) for way in ("down", "up"))
    assert down == {"weights", "anchor", "map", "last-map", "embeddings", "synthetic"}
    assert up == {"update", "map-update", "weight", "losses"}
    assert set(ledger.filter(task=0, direction="down")["part"]) == {"weights", "map", "embeddings"}
    assert set(ledger.filter(part="embeddings", task=1)["bytes"]) == {4 * 512 * 4}


def test_where_embeddings_come_from_is_told(method_of: Callable, tmp_path: Path) -> None:
    drawn = method_of(Lander, **TINY)
    assert "no text is behind them" in drawn.list_advice()[-1]
    assert drawn.list_remarks({}) == drawn.list_advice()[-1:]
    file, names = tmp_path / "names.safetensors", drawn.run.splits.classes
    write_embeddings(file, names, torch.eye(len(names)), "{}", "unit")
    unit = method_of(Lander, **TINY, embeddings=file, radius=0.6)
    assert "0.5 apart" in unit.list_remarks({})[0]
    assert method_of(Lander, **TINY, embeddings=file).list_remarks({}) == []
    assert unit.list_dependencies()["embeddings"] != drawn.list_dependencies()
    with pytest.raises(UserError, match="fcl embed-labels"):
        method_of(Lander, **TINY, embeddings=tmp_path / "none").create_server()
