"""pFedDIL in our reading: worked migration and mixture, places, a client's models and heads, FedAvg as a limit."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from numpy.testing import assert_allclose

from fclmodels.methods.fedavg import FedAvg
from fclmodels.methods.pfeddil import PFedDil, choose_model, detect, measure_migration, mix_answers, mix_pixels


def test_the_worked_migration() -> None:
    models = [{"w": torch.tensor([0.0, 0.0])}, {"w": torch.tensor([1.0, 2.0])}]
    assert_allclose(measure_migration({"w": torch.tensor([1.0, 0.0])}, models, [0.2, 0.7]), 3.0, rtol=1e-6)
    grown = measure_migration({"w": torch.tensor([1.0, 0.0, 9.0])}, models, [0.2, 0.7])
    assert_allclose(grown, 3.0, rtol=1e-6)


def test_the_worked_mixture() -> None:
    answers = torch.tensor([[[0.9, 0.1]], [[0.3, 0.7]]])
    assert_allclose(mix_answers(torch.tensor([[0.2], [0.6]]), answers), [[0.45, 0.55]], rtol=1e-6)


@pytest.mark.parametrize(
    ("rho", "places", "threshold", "place"),
    [
        ([], 2, 0.5, (0, False)),
        ([0.2], 2, 0.5, (1, False)),
        ([0.2, 0.6], 3, 0.5, (1, True)),
        ([0.4, 0.2], 2, 0.5, (1, False)),
        ([0.9], 1, 0.5, (0, False)),
        ([1.0, 0.9], 3, 1.0, (2, False)),
    ],
)
def test_a_task_goes_on_with_the_model_that_knows_it_best(
    rho: list[float], places: int, threshold: float, place: tuple[int, bool]
) -> None:
    assert choose_model(rho, places, threshold) == place


def test_pixels_change_their_places_alike_in_all_channels() -> None:
    x = torch.arange(24.0).view(1, 2, 3, 4).expand(2, 2, 3, 4)
    mixed = mix_pixels(x, torch.Generator().manual_seed(0))
    assert torch.equal(mixed.flatten(2).sort(2).values, x.flatten(2))
    assert torch.equal(mixed[:, 1] - mixed[:, 0], torch.full((2, 3, 4), 12.0))
    assert not torch.equal(mixed[0], mixed[1])


def test_an_auxiliary_head_learns_which_features_are_its_models_own(method_of: Callable, client_of: Callable) -> None:
    method, mine = method_of(PFedDil, aux_epochs=50), torch.tensor([1.0] * 5 + [0.0] * 5)
    features = torch.stack([2 * mine - 1, torch.ones(10)], 1)
    aux = method.train_detector(client_of(method, 1), None, features, mine)
    assert (detect(aux, features[:5]) > 0.9).all()
    assert (detect(aux, features[5:]) < 0.1).all()
    less = method.train_detector(client_of(method, 1), aux, features[:5], torch.zeros(5))
    assert (detect(less, features[:5]) < detect(aux, features[:5])).all()


def test_a_task_starts_at_the_model_that_knows_it(method_of: Callable, client_of: Callable) -> None:
    method = method_of(PFedDil, migration=0)
    server = method.start_task(method.create_server(), 0)
    memory = method.train(client_of(method, 1), method.make_payload(server)).memory
    trained = memory["present"]["weights"]
    memory = method.store_model(client_of(method, 1, memory=memory), {}).memory
    (one,) = memory["models"].values()
    sure = {**one, "aux": {**one["aux"], "bias": torch.tensor(50.0)}}
    later = method.start_task(server, 1)
    client = client_of(method, 1, 1, memory={"models": {"0": sure}})
    started = method.prepare_training(client, method.make_payload(later)).network.state_dict()
    assert torch.equal(started["backbone.fc1.weight"], trained["backbone.fc1.weight"])
    assert torch.equal(started["heads.0.weight"][:2], trained["heads.0.weight"])
    assert torch.equal(started["heads.0.weight"][2:], later.weights["heads.0.weight"][2:])
    answer = method.train(client, method.make_payload(later))
    moved = answer.tensors["update"]["backbone.fc1.weight"] / client.weight + later.weights["backbone.fc1.weight"]
    assert_allclose(moved, answer.memory["present"]["weights"]["backbone.fc1.weight"], atol=1e-6)
    follow = client_of(method, 1, 1, 1, memory=answer.memory)
    again = method.prepare_training(follow, method.make_payload(later)).network.state_dict()
    assert torch.equal(again["backbone.fc1.weight"], later.weights["backbone.fc1.weight"])
    last = method.store_model(client_of(method, 1, 1, memory=answer.memory), {}).memory["models"]
    assert last.keys() == {"0"}
    assert last["0"]["aux"]["bias"] > 40


def test_a_clients_models_answer_together(method_of: Callable, client_of: Callable, federate: Callable) -> None:
    method = method_of(PFedDil)
    server, zero = federate(method), torch.zeros(())
    features = method.networks.build(server.spec).backbone.features
    aux = {"weight": torch.zeros(features), "bias": zero}
    first = {name: w[:2] if name.startswith("heads") else w for name, w in server.weights.items()}
    models = {"0": {"weights": first, "aux": aux, "task": 0}, "1": {"weights": server.weights, "aux": aux, "task": 1}}
    inputs = torch.randn(3, 1, 6, 6)
    predict = method.make_client_predictor(
        client_of(method, 1, 1, memory={"models": models}), method.make_payload(server)
    )
    with torch.inference_mode():
        logits = method.networks.load(server.spec, server.weights).eval()(inputs)
        expected = logits.softmax(1) / 2
        expected[:, :2] += logits[:, :2].softmax(1) / 2
        assert_allclose(predict(inputs).logits, expected, atol=1e-6)


@pytest.mark.parametrize(
    ("settings", "tasks"), [({"models": 1, "migration": 0}, None), ({"threshold": 1, "migration": 0}, None), ({}, 1)]
)
def test_without_choice_and_migration_it_is_fedavg_to_the_bit(
    settings: dict[str, Any], tasks: int | None, method_of: Callable, federate: Callable
) -> None:
    ours, plain = federate(method_of(PFedDil, **settings), tasks).weights, federate(method_of(FedAvg), tasks).weights
    assert all(torch.equal(ours[name], plain[name]) for name in plain)
