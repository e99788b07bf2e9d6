"""PEC, federated: errors and answers by hand, single clients' steps, means by class, and what is never touched."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from numpy.testing import assert_allclose
from torch import Tensor, nn

from fclmodels.federation.server import Server
from fclmodels.methods.parts import least_error
from fclmodels.methods.parts.least_error import LeastError, LinearlyFalling, answer_in_parts, build_predictor
from fclmodels.methods.pec import Pec
from fclmodels.storage import trees

SMALL = {"width": 3, "outputs": 5, "pool": 2, "teacher": 4}
ADAM = ("optimizer.kind=adam", "optimizer.lr=0.01", "federation.rounds=4", "federation.local_epochs=2")


class Says(nn.Module):
    """Answers the same for every input."""

    def __init__(self, *numbers: float) -> None:
        super().__init__()
        self.numbers = torch.tensor(numbers)

    def forward(self, inputs: Tensor) -> Tensor:
        return self.numbers.expand(len(inputs), -1)


def test_the_least_error_answers() -> None:
    """Students (1, 2, 0) and (0, 1, 1) of the teacher (0.5, 1, 1): errors 0.75 and 0.0833; a third is not trained."""
    spec = {"shape": (1, 4, 4), **SMALL, "seed": 0, "labels": [1, 0, 2], "trained": [True, True, False]}
    model = LeastError(spec)
    model.students = nn.ModuleList([Says(1, 2, 0), Says(0, 1, 1), Says(0.5, 1, 1)])
    model.teacher = (nn.Sequential(nn.Conv2d(1, 1, 1), nn.Flatten(), Says(0.5, 1, 1)),)
    logits = model(torch.zeros(2, 1, 4, 4))
    assert_allclose(logits[1], [-1 / 12, -0.75, -1e9], rtol=1e-6)
    assert logits.argmax(1).tolist() == [0, 0]


def forward(weights: dict[str, np.ndarray], x: np.ndarray, pool: int) -> np.ndarray:
    """A student or the teacher, written out: 3x3 convolution, instance normalisation, ReLU, means, linear layer."""
    B, _, H, W = x.shape
    padded = np.pad(x, ((0, 0), (0, 0), (1, 1), (1, 1)))
    h = np.zeros((B, len(weights["0.weight"]), H, W))
    for i in range(3):
        for j in range(3):
            h += np.einsum("oc,bchw->bohw", weights["0.weight"][:, :, i, j], padded[:, :, i : i + H, j : j + W])
    h += weights["0.bias"][:, None, None]
    h = (h - h.mean((2, 3), keepdims=True)) / np.sqrt(h.var((2, 3), keepdims=True) + 1e-5)
    h = np.maximum(h * weights["1.weight"][:, None, None] + weights["1.bias"][:, None, None], 0)
    h = h.reshape(B, h.shape[1], pool, H // pool, pool, W // pool).mean((3, 5)).reshape(B, -1)
    return h @ weights["5.weight"].T + weights["5.bias"]


def numbers_of(tensors: dict[str, Tensor], prefix: str = "") -> dict[str, np.ndarray]:
    return {n.removeprefix(prefix): t.double().numpy() for n, t in tensors.items() if n.startswith(prefix)}


@pytest.fixture
def pec_of(method_of: Callable) -> Callable[..., Any]:
    return lambda *overrides, **further: method_of(Pec, *overrides, **{**SMALL, **further})


def test_a_clients_loss_against_numpy(pec_of: Callable, client_of: Callable) -> None:
    method = pec_of("federation.batch_size=64")
    server = method.start_task(method.create_server(), 0)
    client = client_of(method, 1)
    (batch,) = method.run.batches.iterate_ordered(client.rows, 64)
    answer = method.train(client, method.make_payload(server))
    x, students = batch.inputs.double().numpy(), server.knowledge["students"]
    targets = forward(numbers_of(dict(method.teacher.state_dict())), x, 2)
    assert targets.std() > 0.1
    errors = []
    for label in (0, 1):
        mine = batch.labels.numpy() == label
        errors.append(((forward(numbers_of(students, f"{label}."), x[mine], 2) - targets[mine]) ** 2).mean())
    assert answer.loss == pytest.approx(sum(errors), rel=1e-4)


def test_one_optimiser_is_one_for_each_class(pec_of: Callable, client_of: Callable, splits_of: Callable) -> None:
    """A client with single samples a batch, against an Adam for each student, with the release's falling rate."""
    method = pec_of(*ADAM, "federation.batch_size=1", splits=splits_of(train=6))
    server = method.start_task(method.create_server(), 0)
    client = client_of(method, 0, round=1)
    update = method.train(client, method.make_payload(server)).tensors["update"]
    students = {label: method.draw_student() for label in (0, 1)}
    optimisers = {label: torch.optim.Adam(student.parameters(), lr=0.01) for label, student in students.items()}
    for done, epoch in enumerate(client.yield_epochs()):
        for optimiser in optimisers.values():
            optimiser.param_groups[0]["lr"] = 0.01 * (1 - (2 + done) / 8)  # the second of four rounds of two epochs
        for batch in epoch:
            (label,) = batch.labels.tolist()
            optimisers[label].zero_grad()
            (students[label](batch.inputs) - method.teacher(batch.inputs)).square().mean().backward()
            optimisers[label].step()
    for label, student in students.items():
        for name, tensor in student.state_dict().items():
            if name == "0.bias":
                continue  # normalisation takes it out again: its gradients are rounding, which Adam scales up
            start = server.knowledge["students"][f"{label}.{name}"]
            torch.testing.assert_close(update[f"{label}.{name}"], 3 * (tensor - start), rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize(("weighting", "weights"), [("samples", (2, 6)), ("uniform", (1, 1))])
def test_a_student_is_the_mean_over_those_who_have_its_class(
    weighting: str, weights: tuple[int, int], pec_of: Callable, client_of: Callable, splits_of: Callable, federate: Any
) -> None:
    """Clients 0 and 1 have 2 and 6 samples of class 0; class 1 is the second one's alone in the first round."""
    splits = splits_of(clients=2, tasks=1, train={(0, 0): 1, (0, 1): 7})
    method = pec_of("federation.rounds=1", f"federation.weighting={weighting}", splits=splits)
    server = method.start_task(method.create_server(), 0)
    answers = [method.train(client_of(method, k), method.make_payload(server)) for k in range(2)]
    shares = torch.stack([answer.tensors["shares"]["weight"] for answer in answers])
    after = federate(method).knowledge["students"]
    for name, before in server.knowledge["students"].items():
        label = int(name[0])
        total = sum(answer.tensors["update"][name] for answer in answers)
        torch.testing.assert_close(after[name], before + total / shares[:, label].sum(), rtol=1e-5, atol=1e-7)
    have = [(client.rows.labels == 0).sum() for client in (client_of(method, k) for k in range(2))]
    assert shares[:, 0].tolist() == (
        [float(n) for n in have] if weighting == "samples" else [float(n > 0) for n in have]
    )


def test_other_tasks_students_keep_their_bits(
    pec_of: Callable, after_each_task: Callable[[Any], list[Server]], splits_of: Callable
) -> None:
    """So with the task known nothing is forgotten, and the answers of the first task stay the same bits."""
    method = pec_of(*ADAM, splits=splits_of(tasks=3))
    first, _, last = after_each_task(method)
    old = {name for name in first.knowledge["students"] if name[0] in "01"}
    assert old
    for name in old:
        assert torch.equal(first.knowledge["students"][name], last.knowledge["students"][name])
    inputs = next(method.run.batches.iterate_ordered(method.run.splits.select_test_rows(0), 64)).inputs
    with torch.no_grad():
        logits = [method.make_predictor(server)(inputs).logits[:, :2] for server in (first, last)]
    assert torch.equal(*logits)


def test_classes_that_nobody_has_never_answer(pec_of: Callable, federate: Callable, splits_of: Callable) -> None:
    method = pec_of(*ADAM, splits=splits_of(clients=1, train={(0, 0): 1, (1, 0): 1}))
    server = federate(method)
    inputs = next(method.run.batches.iterate_ordered(method.run.splits.select_test_rows(1), 64)).inputs
    with torch.no_grad():
        logits = method.make_predictor(server)(inputs).logits
    assert server.knowledge["trained"].tolist() == [1, 0, 1, 0]
    assert (logits[:, [1, 3]] == -1e9).all()
    assert (logits[:, [0, 2]] > -100).all()


def test_it_learns_all_tasks_without_replay(pec_of: Callable, federate: Callable) -> None:
    right = []
    for seed in range(2):
        method = pec_of(*ADAM, width=8, outputs=20, seed=seed)
        server = federate(method)
        for task in range(2):
            (batch,) = method.run.batches.iterate_ordered(method.run.splits.select_test_rows(task), 64)
            with torch.no_grad():
                answer = method.make_predictor(server)(batch.inputs).logits.argmax(1)
            right.append((answer == batch.labels).double().mean().item())
    assert np.mean(right) > 0.75


def test_the_teacher_answers_the_same_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    teacher = build_predictor((1, 8, 8), SMALL, 4)
    inputs = torch.rand(5, 1, 8, 8)
    expected = teacher(inputs).detach()
    monkeypatch.setattr(least_error, "AT_ONCE", 2 * 12 * 64)
    torch.testing.assert_close(answer_in_parts(teacher, inputs), expected)


def test_the_rate_falls_to_nearly_zero() -> None:
    falling = LinearlyFalling(lr=0.1, epochs=4)
    assert_allclose([falling.compute_lr(epoch // 2, epoch) for epoch in range(4)], [0.1, 0.075, 0.05, 0.025])


def test_everyone_draws_the_same_teacher_and_students(pec_of: Callable) -> None:
    one, other = pec_of(), pec_of()
    assert trees.digest(dict(one.teacher.state_dict())) == trees.digest(dict(other.teacher.state_dict()))
    first, second = (numbers_of(one.create_server().knowledge["students"], f"{label}.") for label in (0, 1))
    assert all(np.array_equal(first[name], second[name]) for name in first)
