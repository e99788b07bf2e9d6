"""The moving average over tasks: FedAvg within a task, the closed form over several."""

from collections.abc import Callable

import pytest
import torch

from fclmodels.methods.ema import Ema
from fclmodels.methods.fedavg import FedAvg
from fclmodels.storage import trees


def test_a_share_of_0_is_fedavg_to_the_bit(method_of: Callable, federate: Callable) -> None:
    ours, fedavg = federate(method_of(Ema, share=0.0)), federate(method_of(FedAvg))
    assert trees.digest(ours.weights) == trees.digest(fedavg.weights)


@pytest.mark.parametrize("share", [0.25, 1.0])
def test_the_average_is_taken_once_at_the_end_of_a_task(share: float, method_of: Callable, federate: Callable) -> None:
    """Three rounds of it, with its head grown: the new rows are those of FedAvg."""
    rounds = "federation.rounds=3"
    anchor, trained = (federate(method_of(FedAvg, rounds), tasks).weights for tasks in (1, 2))
    found = federate(method_of(Ema, rounds, share=share)).weights
    for name, old in anchor.items():
        k = len(old)
        expected = (1 - share) * trained[name][:k].double() + share * old.double()
        torch.testing.assert_close(found[name][:k].double(), expected, rtol=0, atol=1e-7)
        assert torch.equal(found[name][k:], trained[name][k:])


def test_training_starts_from_the_average_and_is_fedavgs(
    method_of: Callable, splits_of: Callable, after_each_task: Callable
) -> None:
    """Third task: its last round's model is put together from what that task ended with and the average before it."""
    method = method_of(Ema, "federation.rounds=1", share=0.5, splits=splits_of(tasks=3, same_classes=True))
    _, second, third = after_each_task(method)
    ends = {name: 2 * w - second.weights[name] for name, w in third.weights.items()}
    moved = sum((ends[name] - second.weights[name]).square().sum().item() for name in ends) ** 0.5
    assert trees.digest(third.knowledge["anchor"]) == trees.digest(second.weights)
    assert moved == pytest.approx(
        2 * sum((third.weights[n] - second.weights[n]).square().sum().item() for n in ends) ** 0.5, rel=1e-5
    )
