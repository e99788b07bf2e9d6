"""MFCL: its losses by hand and against plain passes, its limit case, what the server makes and who learns from it."""

from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, mse_loss

from fclmodels.errors import UserError
from fclmodels.federation.server import Server
from fclmodels.methods.fedavg import FedAvg
from fclmodels.methods.mfcl import DrawnImages, Mfcl, measure_distance
from fclmodels.methods.parts.distillation import Teacher
from fclmodels.numerics import image_priors

SMALL = {"steps": 3, "batch": 8, "noise": 4, "width": 2, "synthetic_batch": 5}
TASKS = {(0, 0): 6, (0, 1): 8, (1, 1): 5, (1, 2): 5, (2, 0): 4, (2, 2): 1}


def assert_equal(one: Mapping[str, Tensor], other: Mapping[str, Tensor]) -> None:
    assert one.keys() == other.keys()
    assert all(torch.equal(tensor, other[name]) for name, tensor in one.items())


def test_the_distance_by_hand() -> None:
    """W of rows (1, 0), (0, 1), (1, 1); its bias cancels."""
    network = nn.Module()
    network.backbone, network.heads = nn.Identity(), [None]
    weights = {"heads.0.weight": torch.tensor([[1.0, 0], [0, 1], [1, 1]]), "heads.0.bias": torch.tensor([5.0, -1, 2])}
    teacher = Teacher(network, weights, 0.1)
    features, earlier = torch.tensor([[1.0, 2], [0, 1]]), torch.tensor([[1.0, 1], [0, 0]])
    assert 0.1 * measure_distance(teacher, features, earlier).item() == pytest.approx(0.066667, abs=1e-6)


@pytest.mark.parametrize("head", ["growing", "per-task"])
def test_without_images_it_is_fedavg_over_the_tasks_classes(
    head: str, method_of: Callable, federate: Callable, splits_of: Callable
) -> None:
    settings = (f"model.head={head}", "model.backbone=resnet18", "model.loss_over=task", "optimizer.weight_decay=0.01")
    splits = splits_of(tasks=3, clients=3, train=TASKS)
    plain = federate(method_of(FedAvg, *settings, splits=splits))
    method = method_of(Mfcl, *settings[:2], settings[3], splits=splits, w_ft=0, w_kd=0, **SMALL)
    server = federate(method)
    assert_equal(server.weights, plain.weights)
    assert server.knowledge == {}
    assert method.make_payload(server).keys() == {"weights"}


def test_the_first_task_is_fedavgs(method_of: Callable, federate: Callable) -> None:
    assert_equal(federate(method_of(Mfcl, **SMALL), 1).weights, federate(method_of(FedAvg), 1).weights)


@pytest.fixture
def second_task(method_of: Callable, after_begin: Callable, client_of: Callable) -> Callable[..., tuple[Any, ...]]:
    def make(*overrides: str, **settings: Any) -> tuple[Any, ...]:
        method = method_of(Mfcl, *overrides, **SMALL, **settings)
        server = after_begin(method)
        training = method.prepare_training(client_of(method, 1, 1), method.make_payload(server))
        return method, server, training, next(method.run.batches.iterate_ordered(training.client.rows, 64))

    return make


@pytest.fixture
def after_begin(federate: Callable) -> Callable[[Mfcl], Server]:
    """The server as it is in the rounds of the second task: what the engine's first round sees."""

    def servers(method: Mfcl) -> Server:
        started, begin = [], method.begin_task

        def note(server: Server, cohort: Any) -> Server:
            started.append(begin(server, cohort))
            return started[-1]

        method.begin_task = note
        federate(method, 2)
        method.begin_task = begin
        return started[-1]

    return servers


@pytest.mark.parametrize("head", ["growing", "per-task"])
def test_the_loss_is_the_sum_of_its_three_terms(head: str, second_task: Callable) -> None:
    method, server, training, batch = second_task(f"model.head={head}", w_ft=0.7, w_kd=0.3)
    with torch.no_grad():
        training.network.backbone.fc3.bias += 0.1
    torch.manual_seed(3)
    loss = method.compute_loss(training, batch).item()
    torch.manual_seed(3)
    drawn, columns = training.find_added(DrawnImages).draw(method.run.device)
    assert drawn.shape == (5, 1, 6, 6)
    assert set(columns.tolist()) <= {0, 1}

    anchor, heads = server.knowledge["anchor"], training.network.heads
    with torch.no_grad():
        h, u = training.network.backbone(batch.inputs), training.network.backbone(drawn)
        last = method.teachers.load(method.run.make_spec(1), anchor).backbone
        W, b = anchor["heads.0.weight"], anchor["heads.0.bias"]
        assert torch.equal((last(drawn) @ W.T + b).argmax(1), columns)
        if head == "growing":
            new = cross_entropy(heads[0](h)[:, 2:], batch.labels - 2)
            everything = cross_entropy(heads[0](torch.cat([h, u])), torch.cat([batch.labels, columns]))
        else:
            new = cross_entropy(heads[1](h), batch.labels - 2)
            of_images = cross_entropy(heads[0](u), columns, reduction="sum")
            everything = (len(h) * new + of_images) / (len(h) + len(u))
        distance = mse_loss(torch.cat([h, u]) @ W.T, torch.cat([last(batch.inputs), last(drawn)]) @ W.T)
    assert loss == pytest.approx(float(new + 0.7 * everything + 0.3 * distance), rel=1e-4)


def test_images_reach_the_backbone_through_the_distance_alone(second_task: Callable) -> None:
    """The head's gradient of all classes' term is there; the backbone's is that of new classes."""
    gradients = []
    for w_ft in (0.0, 5.0):
        method, _, training, batch = second_task(w_ft=w_ft, w_kd=1e-30)
        training.network.requires_grad_(True)
        torch.manual_seed(0)
        training.network.zero_grad()
        method.compute_loss(training, batch).backward()
        gradients.append({name: p.grad.clone() for name, p in training.network.named_parameters()})
    plain, tuned = gradients
    for name, gradient in plain.items():
        if name.startswith("backbone."):
            torch.testing.assert_close(tuned[name], gradient, rtol=1e-4, atol=1e-7)
    assert not torch.allclose(tuned["heads.0.weight"], plain["heads.0.weight"])


def test_the_generators_loss_is_the_sum_of_its_terms(second_task: Callable) -> None:
    method, server, _, _ = second_task("model.backbone=resnet18", w_ie=2, w_bn=3, w_noise=4)
    teacher = method.teachers.load(method.run.make_spec(1), server.knowledge["anchor"]).eval()
    images = torch.randn(4, 1, 6, 6, generator=torch.Generator().manual_seed(0))
    seen = []
    norms = [m for m in teacher.modules() if isinstance(m, nn.BatchNorm2d)]
    hooks = [m.register_forward_pre_hook(lambda m, args: seen.append((m, args[0].detach()))) for m in norms]
    logits = teacher(images).detach()
    for hook in hooks:
        hook.remove()
    batch = [(x.mean((0, 2, 3)), x.var((0, 2, 3), correction=0)) for _, x in seen]
    running = [(m.running_mean, m.running_var) for m, _ in seen]
    expected = (
        image_priors.measure_certainty(logits)
        + 2 * image_priors.measure_imbalance(logits)
        + 3 * image_priors.measure_divergence(batch, running)
        + 4 * image_priors.measure_roughness(images)
    )
    assert len(batch) > 5
    assert method.measure_images(teacher, images).item() == pytest.approx(expected.item(), rel=1e-5)


def test_the_generator_goes_on_and_travels_once_a_task(
    method_of: Callable, federate: Callable, splits_of: Callable
) -> None:
    """Nothing is made before the first task; the third's generator has the second's behind it."""
    method = method_of(Mfcl, splits=splits_of(tasks=3), **SMALL)
    initial, states, begin = method.generators.create_initial()["generator"], [], method.begin_task

    def note(server: Server, cohort: Any) -> Server:
        after = begin(server, cohort)
        states.append((server.knowledge.get("generator"), after.knowledge.get("generator")))
        return after

    method.begin_task = note
    server = federate(method)
    assert states[0] == (None, None)
    assert states[1][0] is None
    assert not torch.equal(states[1][1]["linear.weight"], initial["linear.weight"])
    assert_equal(states[2][0], states[1][1])
    assert not torch.equal(states[2][1]["linear.weight"], states[1][1]["linear.weight"])
    parts = method.make_payload(server)
    assert {name for name, part in parts.items() if part.once} == {"anchor", "generator"}
    sheet = server.knowledge["synthetic"]
    assert sheet["images"].dtype == torch.uint8
    assert sheet["images"].shape[1:] == (1, 6, 6)
    assert set(sheet["labels"].tolist()) <= {0, 1, 2, 3}


def test_a_generator_that_diverges_is_refused(method_of: Callable, federate: Callable) -> None:
    method = method_of(Mfcl, **SMALL)
    method.measure_images = lambda teacher, images: images.sum() * torch.nan
    with pytest.raises(UserError, match=r"the server's generator diverged.* Lower methods.mfcl.generator_lr"):
        federate(method)


def test_domains_share_all_columns(method_of: Callable, federate: Callable, splits_of: Callable) -> None:
    """Ours: all classes are new, and all are learned."""
    server = federate(method_of(Mfcl, splits=splits_of(same_classes=True, tasks=3), **SMALL))
    assert len(server.knowledge["anchor"]["heads.0.weight"]) == 2
    assert all(weight.isfinite().all() for weight in server.weights.values())


def test_a_network_without_statistics_is_named(method_of: Callable) -> None:
    assert "w_bn counts for nothing" in method_of(Mfcl, **SMALL).list_advice()[0]
    assert method_of(Mfcl, "model.backbone=resnet18", **SMALL).list_advice() == []
    assert method_of(Mfcl, w_ft=0, w_kd=0).list_advice() == []
