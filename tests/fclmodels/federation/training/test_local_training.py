"""The hooks of the local loop: a step left as it is changes nothing, a protected coordinate stays to the bit."""

from collections.abc import Callable
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor

from fclmodels.federation.training.local_training import LocalTraining
from fclmodels.methods.fedavg import FedAvg
from fclmodels.storage import trees

Steps = dict[str, Tensor]
OPTIMISERS = {
    "sgd": ("optimizer.lr=0.1",),
    "momentum": ("optimizer.momentum=0.9", "optimizer.weight_decay=0.05"),
    "adam": ("optimizer.kind=adam", "optimizer.lr=0.01", "optimizer.weight_decay=0.05"),
    "adamw": ("optimizer.kind=adamw", "optimizer.lr=0.01", "optimizer.weight_decay=0.5"),
}
EVERY_OPTIMISER = pytest.mark.parametrize("optimiser", OPTIMISERS.values(), ids=OPTIMISERS)
MORE = ("federation.local_epochs=3", "model.dropout=[0.2, 0.5]")


class AsProposed(FedAvg):
    def step(self, training: LocalTraining, steps: Steps) -> Steps:
        return steps


class Protected(FedAvg):
    """Keeps the even input columns of the first layer and all biases of the second."""

    def step(self, training: LocalTraining, steps: Steps) -> Steps:
        kept = steps["backbone.fc1.weight"].clone()
        kept[:, ::2] = 0
        return steps | {"backbone.fc1.weight": kept, "backbone.fc2.bias": torch.zeros_like(steps["backbone.fc2.bias"])}


class Recorder(FedAvg):
    proposed: list[Steps]
    weights: list[Steps]

    def step(self, training: LocalTraining, steps: Steps) -> Steps:
        self.proposed.append(steps)
        self.weights.append({name: parameter.detach().clone() for name, parameter in training.parameters.items()})
        return steps


class HalfGradient(FedAvg):
    @torch.no_grad()
    def change_gradients(self, training: LocalTraining) -> None:
        for parameter in training.parameters.values():
            parameter.grad.mul_(0.5)


@EVERY_OPTIMISER
def test_the_step_as_proposed_is_fedavg(optimiser: tuple[str, ...], method_of: Callable, federate: Callable) -> None:
    bare, hooked = (federate(method_of(kind, *MORE, *optimiser)).weights for kind in (FedAvg, AsProposed))
    for name in bare:
        torch.testing.assert_close(hooked[name], bare[name], rtol=0, atol=1e-5)


@EVERY_OPTIMISER
def test_what_a_step_protects_stays_to_the_bit(
    optimiser: tuple[str, ...], method_of: Callable, federate: Callable
) -> None:
    method = method_of(Protected, *MORE, *optimiser)
    start, end = federate(method, 0).weights, federate(method).weights
    moved = {name: start[name] != end[name] for name in start if not name.startswith("heads")}
    assert not moved["backbone.fc1.weight"][:, ::2].any()
    assert not moved["backbone.fc2.bias"].any()
    assert moved["backbone.fc1.weight"][:, 1::2].any()
    assert moved["backbone.fc2.weight"].any()


@EVERY_OPTIMISER
def test_a_step_sees_all_that_the_optimiser_would_do(
    optimiser: tuple[str, ...], method_of: Callable, client_of: Callable
) -> None:
    """Weight decay moves even what has no gradient, momentum goes on: the steps add up to the whole way."""
    method = method_of(Recorder, *optimiser, "model.dropout=[0, 0]")
    server = method.start_task(method.create_server(), 0)
    method.proposed, method.weights = [], []
    answer = method.train(client_of(method, 0), method.make_payload(server))
    assert len(method.proposed) == 2
    for name, update in answer.tensors["update"].items():
        steps = sum(step[name] for step in method.proposed)
        torch.testing.assert_close(8 * steps, update, rtol=0, atol=1e-5)  # 8 samples: its weight


def test_when_it_is_asked_a_step_sees_where_the_optimiser_wants_to_be(method_of: Callable, client_of: Callable) -> None:
    method = method_of(Recorder)
    server = method.start_task(method.create_server(), 0)
    method.proposed, method.weights = [], []
    method.train(client_of(method, 0), method.make_payload(server))
    at = [server.weights, *method.weights]
    for step, (before, after) in zip(method.proposed, pairwise(at), strict=True):
        for name in step:
            torch.testing.assert_close(before[name] + step[name], after[name])


def test_a_changed_gradient_is_what_the_optimiser_gets(method_of: Callable, federate: Callable) -> None:
    """Halving it is halving the learning rate of plain SGD."""
    halved = federate(method_of(HalfGradient, "optimizer.lr=0.1")).weights
    expected = federate(method_of(FedAvg, "optimizer.lr=0.05")).weights
    for name in expected:
        torch.testing.assert_close(halved[name], expected[name])


@pytest.mark.parametrize("share", [0.5, 2.0])
def test_a_steps_gradient_is_at_most_as_long_as_the_clip(
    share: float, method_of: Callable, client_of: Callable
) -> None:
    """A step of SGD is lr times the gradient, shortened to the clip where it is longer."""

    def step(*clip: str) -> Steps:
        method = method_of(FedAvg, "optimizer.lr=0.1", "federation.batch_size=64", *clip)
        training = method.prepare_training(
            client_of(method, 0), method.make_payload(method.start_task(method.create_server(), 0))
        )
        training.run()
        return {name: moved / 0.1 for name, moved in training.update().items()}

    free = step()
    length = sum(gradient.square().sum() for gradient in free.values()).sqrt()
    clipped = step(f"optimizer.clip={float(share * length)}")
    for name in free:
        torch.testing.assert_close(clipped[name], min(share, 1.0) * free[name], atol=1e-5, rtol=1e-4)


def test_products_of_lower_precision_move_weights_nearly_as_far(method_of: Callable, client_of: Callable) -> None:
    updates = []
    for precision in ("float32", "bfloat16"):
        method = method_of(FedAvg, f"optimizer.precision={precision}", "model.dropout=[0, 0]")
        answer = method.train(client_of(method, 0), method.make_payload(method.start_task(method.create_server(), 0)))
        updates.append(torch.cat([update.flatten() for update in answer.tensors["update"].values()]))
    exact, rounded = updates
    assert rounded.dtype == torch.float32
    # bfloat16 has 8 bits: a product is off by up to 2**-8, and not by nothing.
    assert 1e-4 < (rounded - exact).norm() / exact.norm() < 0.02


def test_dropout_does_not_depend_on_the_ambient_generator_and_leaves_it_alone(
    method_of: Callable, client_of: Callable
) -> None:
    method = method_of(FedAvg, "model.dropout=[0.2, 0.5]", "augment.crop_padding=1", "augment.flip=true")
    payload = method.make_payload(method.start_task(method.create_server(), 0))
    updates = []
    for seed in (1, 2):
        torch.manual_seed(seed)
        before = torch.random.get_rng_state()
        updates.append(trees.digest(method.train(client_of(method, 0), payload).tensors["update"]))
        assert torch.equal(torch.random.get_rng_state(), before)
    assert updates[0] == updates[1]


def test_dropout_differs_between_clients_rounds_and_tasks(method_of: Callable, client_of: Callable) -> None:
    """Seen through the gradients' zeros on one and the same batch of data."""
    drawn = []

    class Masks(FedAvg):
        def compute_loss(self, training: Any, batch: Any) -> Tensor:
            drawn.append(torch.nn.functional.dropout(torch.ones(64), 0.5).tolist())
            return super().compute_loss(training, batch)

    method = method_of(Masks, "federation.batch_size=64")
    server = method.start_task(method.create_server(), 0)
    for index, number in ((0, 0), (1, 0), (0, 1), (0, 0)):
        method.train(client_of(method, index, 0, number), method.make_payload(server))
    assert drawn[0] == drawn[3]
    assert len({tuple(mask) for mask in drawn}) == 3


@pytest.mark.parametrize("kind", ["sgd", "adam", "adamw"])
def test_the_learning_rate_falls_from_round_to_round_and_begins_anew_in_each_task(
    kind: str, method_of: Callable, client_of: Callable, federate: Callable
) -> None:
    """A quarter in the third round: the training of a client there is that of a first round with a quarter of it."""
    settings = (f"optimizer.kind={kind}", "optimizer.weight_decay=0.1")
    falling = method_of(FedAvg, *settings, "optimizer.lr=0.02", "optimizer.lr_decay=0.5")
    for task, lrs in {0: (0.02, 0.01, 0.005), 1: (0.02,)}.items():
        server = falling.start_task(federate(falling, task), task)
        for number, lr in enumerate(lrs):
            plain = method_of(FedAvg, *settings, f"optimizer.lr={lr}")
            ours, theirs = (
                method.train(client_of(method, 1, task, number), method.make_payload(server)).tensors["update"]
                for method in (falling, plain)
            )
            assert trees.digest(ours) == trees.digest(theirs)


class Clipped(FedAvg):
    @torch.no_grad()
    def finish_step(self, training: LocalTraining) -> None:
        for parameter in training.parameters.values():
            parameter.clamp_(-0.01, 0.01)


@EVERY_OPTIMISER
def test_after_a_step_parameters_may_be_changed(
    optimiser: tuple[str, ...], method_of: Callable, client_of: Callable
) -> None:
    method = method_of(Clipped, *optimiser)
    server = method.start_task(method.create_server(), 0)
    answer = method.train(client_of(method, 0), method.make_payload(server))
    for name, update in answer.tensors["update"].items():
        assert (server.weights[name] + update / 8).abs().max() <= 0.01 + 1e-6
