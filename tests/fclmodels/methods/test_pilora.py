"""PILoRA against worked numbers; what moves, what the server weighs, and that the nearest centre answers."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn.functional import cross_entropy

from fclmodels.backbones.adapters.low_rank import name_factor
from fclmodels.errors import UserError
from fclmodels.federation.exchange import TRAIN
from fclmodels.methods.pilora import PiLora, measure_distances, weigh_centres
from fclmodels.testing.tiny_splits import VIT


@pytest.fixture
def method(method_of: Callable) -> Any:
    return method_of(PiLora, *VIT, rank=2)


def test_the_loss_of_worked_numbers() -> None:
    f, c, y = torch.tensor([[1.0, 0], [0, 2]]), torch.tensor([[1.0, 1], [0, 0], [2, 2]]), torch.tensor([0, 1])
    d = measure_distances(f, c)
    ce, pull = cross_entropy(-d, y), d.gather(1, y[:, None]).mean()
    np.testing.assert_allclose([ce, pull, ce + 0.001 * pull], [1.069579, 1.060660, 1.070640], atol=1e-6)


def test_centres_of_worked_numbers() -> None:
    """Three clients' centres of one class, two clients' means; uniform where nobody has it, or all are alike."""
    centre = torch.tensor([[[0.0, 0]], [[1, 0]], [[3, 0]]]).double()
    sums = torch.tensor([[[2.0, 2]], [[0, 2]], [[0, 0]]]).double()
    weight = torch.tensor([[2.0], [1], [0]]).double()
    np.testing.assert_allclose(weigh_centres(weight, sums, centre), [[0.652355, 0]], atol=1e-6)
    uniform = [[4 / 3, 0]]
    np.testing.assert_allclose(weigh_centres(0 * weight, 0 * sums, centre), uniform, atol=1e-9)
    same = centre[:1].expand(3, -1, -1)
    np.testing.assert_allclose(weigh_centres(weight, sums, same), [[0, 0]])
    np.testing.assert_allclose(weigh_centres(weight[:1], sums[:1], centre[1:2]), [[1, 0]])


def test_the_loss_gains_length_and_overlap_of_factors(method: Any) -> None:
    A, B = torch.tensor([[1.0, 0, 2], [0, 1, -1]]), torch.tensor([[1.0, -1, 0], [2, 0, 1]])
    server = method.start_task(method.start_task(method.create_server(), 0), 1)
    for index in range(2):
        for task, of in ((0, A), (1, B)):
            server.weights[name_factor(task, index, "A")] = torch.cat([of, torch.zeros(2, 5)], 1)
    network = method.networks.load(server.spec, server.weights)
    assert float(method.measure_factors(network, 1).detach()) == pytest.approx(2 * (0.01 * 5 + 0.5 * 7))


@pytest.mark.parametrize("head", ["growing", "per-task"])
def test_only_the_tasks_centres_and_factors_move(
    head: str, method_of: Callable, federate: Callable, client_of: Callable, splits_of: Callable
) -> None:
    method = method_of(PiLora, *VIT, rank=2, splits=splits_of(head=head))
    one, two = federate(method, 1).weights, federate(method, 2).weights
    assert torch.equal(one["heads.0.weight"], two["heads.0.weight"][:2])
    assert all(torch.equal(tensor, two[name]) for name, tensor in one.items() if name.startswith("backbone.prompts.0"))
    server = method.start_task(federate(method, 1), 1)
    reply = method.exchanges[TRAIN].reply(client_of(method, 0, task=1), method.make_payload(server))[0]
    assert {name.split(".")[2] for name in reply.parts["update"].tensors} == {"1"}
    assert reply.parts["centres"].least == "each"
    assert reply.parts["centres"].tensors["centre"].shape == (2, 8)


def test_the_nearest_centre_answers(method: Any, federate: Callable) -> None:
    server = federate(method)
    (batch,) = method.run.batches.iterate_ordered(method.run.splits.select_test_rows(0), 100)
    with torch.no_grad():
        features = method.networks.load(server.spec, server.weights).eval().backbone(batch.inputs)
        answers = method.make_predictor(server)(batch.inputs).logits.argmax(1)
    assert torch.equal(answers, torch.cdist(features, server.weights["heads.0.weight"]).argmin(1))


def test_centres_have_a_rate_of_their_own(method_of: Callable, client_of: Callable) -> None:
    moved = []
    for rate in (None, 1e-9):
        method = method_of(PiLora, *VIT, rank=2, centre_lr=rate)
        server = method.start_task(method.create_server(), 0)
        training = method.prepare_training(client_of(method, 0), method.make_payload(server))
        training.run()
        moved.append(float((training.parameters["heads.0.weight"] - server.weights["heads.0.weight"]).abs().max()))
    assert moved[0] > 1e-4
    assert moved[1] < 1e-7


@pytest.mark.parametrize(
    ("setting", "why"),
    [
        ("federation.server_lr=0.5", r"federation\.server_lr: pilora sets centres .* Use 1"),
        ("federation.server_lr_schedule=1/t", r"federation\.server_lr: pilora .* server_lr_schedule: constant"),
        ("federation.faults.late=0.5", r"federation\.faults\.late: pilora weighs the centres of a round"),
    ],
)
def test_centres_of_other_rounds_and_shares_of_them_are_refused(
    setting: str, why: str, experiment_of: Callable
) -> None:
    with pytest.raises(UserError, match=why):
        experiment_of(setting, method="pilora")


def test_single_replies_are_needed(experiment_of: Callable) -> None:
    with pytest.raises(UserError, match=r"pilora weighs single clients' centres"):
        experiment_of("federation.secagg.on=true", method="pilora")
