"""TARGET: its losses in NumPy, the release's numbers, its pool, and FedAvg as the limit without images."""

from collections.abc import Callable
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
from fclmodels.errors import UserError
from fclmodels.federation.server import Server
from fclmodels.methods.fedavg import FedAvg
from fclmodels.methods.parts.data_free_synthesis import draw_endlessly, enlarge
from fclmodels.methods.parts.synthetic_replay import SyntheticImages, select_sheet
from fclmodels.methods.target import Target, TargetSynthesis
from fclmodels.storage import trees

TINY = {"pool": 12, "batch": 8, "g_steps": 2, "warmup": 1, "student_steps": 2, "noise": 4, "width": 2}
STREAMS: dict[str, dict[str, Any]] = {
    "growing": {},
    "shared": {"same_classes": True},
    "per-task": {"head": "per-task"},
}


@pytest.mark.parametrize("backbone", ["mlp", "resnet18"])
@pytest.mark.parametrize("kd", [0.0, 25.0])
def test_without_images_it_is_fedavg_to_the_bit(
    kd: float, backbone: str, method_of: Callable, federate: Callable, splits_of: Callable
) -> None:
    """In a head that grows, under momentum and weight decay; with images the first task still is."""
    hard = ("model.loss_over=task", f"model.backbone={backbone}", "optimizer.momentum=0.9")
    tasks = 1 if kd else 3
    splits = splits_of(tasks=3, shape=(3, 8, 8))
    fedavg, target = (
        federate(method_of(kind, *hard, "optimizer.weight_decay=0.1", splits=splits, **own), tasks)
        for kind, own in ((FedAvg, {}), (Target, {**TINY, "kd": kd}))
    )
    assert trees.digest(target.weights) == trees.digest(fedavg.weights)


@pytest.mark.parametrize("stream", STREAMS)
def test_a_clients_loss_against_numpy(
    stream: str,
    method_of: Callable,
    client_of: Callable,
    splits_of: Callable,
    federate: Callable,
    mlp: Any,
) -> None:
    """Cross entropy in the task's classes, and 25 KL at temperature 2 on images, head by head."""
    method = method_of(Target, splits=splits_of(**STREAMS[stream]), **TINY)
    last = federate(method, 1)
    server = method.start_task(last, 1)
    images = torch.randint(256, (5, 1, 6, 6), generator=torch.Generator().manual_seed(0), dtype=torch.uint8)
    pool = {"images": images, "labels": torch.zeros(5).int()}
    server = Server(server.spec, server.weights, 1, {**server.knowledge, "synthetic": pool})
    student = {name: w + 0.1 * torch.randn_like(w) for name, w in server.weights.items()}
    client = client_of(method, 1, 1)
    payload = method.make_payload(Server(server.spec, student, 1, server.knowledge))
    training, batch = method.prepare_training(client, payload), next(next(client.yield_epochs()))
    inputs = next(SyntheticImages(client, images, 4))
    new, old = mlp.compute_logits(student, batch.inputs), mlp.compute_logits(student, inputs)
    columns = {"growing": [2, 3], "shared": [0, 1], "per-task": [2, 3]}[stream]
    labels = np.array([method.run.make_spec(2).tasks[1].index(label) for label in batch.labels.tolist()])
    right = -log_softmax(new[:, columns], axis=1)[np.arange(len(labels)), labels].mean()
    t = mlp.compute_logits(last.weights, inputs) / 2
    log_s = log_softmax(old[:, : t.shape[1]] / 2, axis=1)
    right += 25 * (softmax(t, axis=1) * (log_softmax(t, axis=1) - log_s)).sum(1).mean()
    assert_allclose(method.compute_loss(training, batch).item(), right, rtol=1e-5)


# The server's synthesis.


@pytest.fixture
def synthesis_of(method_of: Callable, splits_of: Callable) -> Callable[..., TargetSynthesis]:
    """The server's work on a small ResNet-18 with drawn running statistics."""

    def make(backbone: str = "resnet18", **settings: Any) -> TargetSynthesis:
        model = (f"model.backbone={backbone}", *(["model.width=4"] if backbone == "resnet18" else []))
        method = method_of(Target, *model, splits=splits_of(shape=(3, 8, 8)), **{**TINY, **settings})
        spec = method.run.make_spec(2)
        random = torch.manual_seed(1)
        teacher, student = (build_network(spec, torch.Generator().manual_seed(seed)) for seed in (1, 2))
        for layer in teacher.modules():
            if isinstance(layer, nn.BatchNorm2d):
                layer.running_mean.normal_(generator=random)
                layer.running_var.uniform_(0.5, 2, generator=random)
        return TargetSynthesis(method.run, method.settings, teacher, student)

    return make


@pytest.mark.parametrize(
    ("meta", "losses", "first"),
    [
        ("fomaml", [2150.2205, 2148.2908, 2145.9617], [-0.373618, -0.454498, 0.204845]),
        ("reptile", [2150.2205, 2148.3804, 2145.6082], [-0.372027, -0.457810, 0.210859]),
    ],
)
def test_three_rounds_are_the_releases(
    meta: str, losses: list[float], first: list[float], synthesis_of: Callable[..., TargetSynthesis]
) -> None:
    """Its GlobalSynthesizer (zj-jayzhang, methods/target.py) ran on this teacher without shifts and mirrors.

    There its lowest losses, and its generator's first weights after them: ours were within 2e-7, with equal images.
    """
    of = {"batch": 8, "pool": 8, "g_steps": 3, "warmup": 1, "student_steps": 0, "noise": 5, "width": 3, "rounds": 3}
    work = synthesis_of(**of, pool_from="start", meta=meta)
    ours = []
    for number in range(3):
        torch.manual_seed(10 + number)
        ours.append(work.step(number))
    assert_allclose(ours, losses, rtol=1e-5)
    assert_allclose(next(work.generator.parameters()).detach().flatten()[:3], first, atol=2e-5)


def test_it_goes_on_from_its_state(synthesis_of: Callable[..., TargetSynthesis]) -> None:
    def take(work: TargetSynthesis, numbers: range) -> None:
        for number in numbers:
            torch.manual_seed(number)
            work.step(number)

    straight, first, second = synthesis_of(), synthesis_of(), synthesis_of()
    assert straight.rounds == 3
    take(straight, range(3))
    take(first, range(2))
    second.restore(first.collect_state())
    take(second, range(2, 3))
    assert trees.digest(second.collect_state()) == trees.digest(straight.collect_state())
    assert straight.count == 12


def test_the_pool_begins_after_the_warmup_or_at_once(synthesis_of: Callable[..., TargetSynthesis]) -> None:
    for pool_from, counts in (("warmup", [0, 8, 12]), ("start", [8, 12, 12])):
        work, sizes = synthesis_of(rounds=3, pool_from=pool_from), []
        for number in range(3):
            torch.manual_seed(number)
            work.step(number)
            sizes.append(work.count)
        assert sizes == counts


def test_without_batch_normalisation_the_student_learns_slowly(synthesis_of: Callable[..., TargetSynthesis]) -> None:
    fast, slow = (synthesis_of(backbone).student_sgd for backbone in ("resnet18", "mlp"))
    assert (fast.lr, fast.clip) == (0.2, None)
    assert (slow.lr, slow.clip) == (0.002, 1.0)


def test_the_student_comes_nearer_to_the_teacher(synthesis_of: Callable[..., TargetSynthesis]) -> None:
    work = synthesis_of("mlp", student_steps=100)
    work.store(torch.rand(12, 3, 8, 8, generator=torch.manual_seed(0)), torch.zeros(12))
    inputs = work.run.batches.normalise_pixels(work.images)

    def distance() -> float:
        return work.compare(work.student.eval().backbone(inputs), work.teacher.backbone(inputs)).item()

    before = distance()
    work.teach_student(0)
    assert distance() < 0.2 * before


def test_more_steps_of_the_generator_lower_the_loss_of_its_best_images(
    synthesis_of: Callable[..., TargetSynthesis],
) -> None:
    losses = []
    for steps in (1, 5, 40):
        torch.manual_seed(0)
        losses.append(synthesis_of("mlp", g_steps=steps, width=8, noise=16, lr_g=0.02).make_images(2)[2])
    assert losses == sorted(losses, reverse=True)
    assert losses[-1] < losses[0] - 0.1


# The pool in a run.


def test_the_pool_travels_once_a_task_and_a_sheet_of_it_stays(
    experiment_of: Callable, splits_of: Callable, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    experiment_of("federation.clients_per_round=3", method="target", splits=splits_of(tasks=3)).run(run)
    ledger = pl.read_parquet(run / "ledger.parquet").filter(direction="down")
    pool = ledger.filter(part="synthetic")
    assert set(pool["task"]) == {1, 2}
    assert set(pool["bytes"]) == {12 * 36}
    assert set(pool["kind"]) == {"samples"}
    assert not pool.select("task", "client").is_duplicated().any()
    assert pl.read_parquet(run / "costs.parquet").select("task", "stage", "work", "steps").rows() == [
        (task, "learn", "synthesis", 3) for task in (1, 2)
    ]
    for task in (1, 2):
        sheet = trees.load(run / "knowledge" / f"task-{task:02d}.safetensors")["synthetic"]
        assert sheet["images"].dtype == torch.uint8
        assert len(sheet["images"]) == len(sheet["labels"]) <= 12
        assert set(sheet["labels"].tolist()) <= set(range(2 * task))


def test_a_sheet_has_as_many_of_each_class() -> None:
    labels = torch.arange(3).repeat(50)
    sheet = select_sheet({"images": torch.arange(150)[:, None], "labels": labels})
    assert sheet["labels"].bincount().tolist() == [33, 33, 33]
    many = select_sheet({"images": torch.zeros(400, 1), "labels": torch.arange(400) % 200})
    assert many["labels"].tolist() == list(range(100))


def test_draws_go_through_all_before_any_again() -> None:
    draws = draw_endlessly(5, 3, torch.Generator().manual_seed(0))
    order = torch.cat([next(draws) for _ in range(5)])
    assert all(sorted(order[i : i + 5].tolist()) == list(range(5)) for i in (0, 5, 10))
    assert len(next(draw_endlessly(2, 5))) == 5


def test_what_it_advises_and_refuses(method_of: Callable, splits_of: Callable) -> None:
    with pytest.raises(UserError, match="rounds: 2 of warmup: 2 leave no image"):
        method_of(Target, **{**TINY, "warmup": 2, "rounds": 2})
    assert "10 synthetic images" in method_of(Target, **{**TINY, "batch": 5, "warmup": 2, "rounds": 4}).list_advice()[0]
    large = method_of(Target, **{**TINY, "pool": 2**28 // 36 + 1})
    assert "set methods.target.side" in large.list_advice()[1]
    lines = method_of(Target, **TINY).list_advice()
    assert "12 synthetic images a task (432 bytes)" in lines[0]
    assert "no running statistics" in lines[1]
    with_norms = method_of(Target, "model.backbone=resnet18", splits=splits_of(shape=(3, 8, 8)), **TINY)
    assert len(with_norms.list_advice()) == 1
    assert method_of(Target, **TINY, kd=0.0).list_advice() == []


def test_images_may_be_smaller_than_samples(experiment_of: Callable, splits_of: Callable, tmp_path: Path) -> None:
    """They are generated, stored and sent so; the networks see them enlarged."""
    splits = splits_of(shape=(3, 8, 8))
    experiment_of("methods.target.side=4", method="target", splits=splits).run(tmp_path / "run")
    pool = pl.read_parquet(tmp_path / "run" / "ledger.parquet").filter(part="synthetic")
    assert set(pool["bytes"]) == {12 * 3 * 4 * 4}
    pixels = torch.arange(3 * 16, dtype=torch.uint8).view(1, 3, 4, 4)
    assert enlarge(pixels, (3, 4, 4)) is pixels
    assert_allclose(enlarge(pixels, (3, 8, 8)).mean().item(), pixels.float().mean().item() / 255, rtol=1e-5)
