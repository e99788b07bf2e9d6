"""Networks beside the model: who has them, who trains them, what travels of them, and what becomes of their states."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import polars as pl
import pytest
import torch
from torch import nn

from fclmodels.data.splits.split_reader import Splits
from fclmodels.errors import UserError
from fclmodels.experiment.experiment import Experiment
from fclmodels.federation.client import Client
from fclmodels.federation.engine.replies import Replies
from fclmodels.federation.engine.rounds import refuse_divergence
from fclmodels.federation.messages import Reply
from fclmodels.federation.server import Server
from fclmodels.federation.training.auxiliary_networks import Auxiliary, AuxiliaryNetworks, copy_state
from fclmodels.plugins import find
from fclmodels.settings.schema import OptimizerSettings

CPU = torch.device("cpu")


@pytest.fixture
def method(toys: Path, method_of: Callable[..., Any]) -> Any:
    return method_of(find("method", "beside-network"))


def linear(spec: Any) -> nn.Module:
    return nn.Linear(spec["features"], 2)


def test_they_begin_as_the_seed_and_their_names_say() -> None:
    names = ("one", "other")
    auxiliaries = [Auxiliary(name, {"features": 3}, linear, "averaged") for name in names]
    first, again, seeded = (AuxiliaryNetworks(auxiliaries, seed, CPU).create_initial() for seed in (0, 0, 1))
    assert first.keys() == {*names}
    assert torch.equal(first["one"]["weight"], again["one"]["weight"])
    assert not torch.equal(first["one"]["weight"], first["other"]["weight"])
    assert not torch.equal(first["one"]["weight"], seeded["one"]["weight"])


def test_building_them_leaves_torchs_own_generator_alone() -> None:
    torch.manual_seed(4)
    before = torch.get_rng_state()
    AuxiliaryNetworks([Auxiliary("one", {"features": 3}, linear, "server")], 0, CPU).create_initial()
    assert torch.equal(torch.get_rng_state(), before)


def test_a_network_that_clients_train_in_vain_is_refused() -> None:
    with pytest.raises(ValueError, match="one: clients train it, and nobody gets what they learn"):
        Auxiliary("one", {}, linear, "server", OptimizerSettings())


def test_the_server_has_all_but_the_clients_own(method: Any) -> None:
    server = method.start_task(method.create_server(), 0)
    assert server.networks.keys() == {"decoder", "generator"}
    assert {name: part.kind for name, part in method.make_payload(server).items()} == {
        "weights": "weights",
        "decoder": "generator",
        "generator": "generator",
    }
    again = Server.from_tree(server.to_tree())
    assert torch.equal(again.networks["decoder"]["0.weight"], server.networks["decoder"]["0.weight"])


def test_a_client_trains_two_of_them_sends_one_and_remembers_one(method: Any, client_of: Callable[..., Client]) -> None:
    server = method.start_task(method.create_server(), 0)
    answer = method.train(client_of(method, 1), method.make_payload(server))
    assert {"decoder-update", "update", "weight"} == answer.tensors.keys()
    assert any(change.abs().max() > 1e-4 for change in answer.tensors["decoder-update"].values())
    assert "1.num_batches_tracked" not in answer.tensors["decoder-update"]  # a count, which has no mean
    assert answer.memory.keys() == {"networks"}
    scale = answer.memory["networks"]["scale"]["weight"]
    assert not torch.equal(scale, torch.ones(12))
    again = method.train(client_of(method, 1, round=1, memory=answer.memory), method.make_payload(server))
    assert not torch.equal(again.memory["networks"]["scale"]["weight"], scale)


def test_each_is_trained_by_its_own_optimiser(method: Any, client_of: Callable[..., Client]) -> None:
    """The first step of Adam is as long as its learning rate, whatever the gradient; that of SGD is not."""
    server = method.start_task(method.create_server(), 0)
    payload = method.make_payload(server)
    training = method.prepare_training(client_of(method, 1), payload)
    optimisers = training.make_optimisers()
    assert [type(optimiser).__name__ for optimiser in optimisers] == ["Sgd", "Adam", "Sgd"]
    before = {name: copy_state(module) for name, (module, _) in training.networks.items()}
    training.take_step(next(next(method.yield_epochs(training))), optimisers)
    after = {name: copy_state(module) for name, (module, _) in training.networks.items()}
    moved = (after["decoder"]["3.bias"] - before["decoder"]["3.bias"]).abs()
    torch.testing.assert_close(moved, torch.full_like(moved, 0.01), rtol=1e-2, atol=0)
    assert not torch.equal(after["scale"]["weight"], before["scale"]["weight"])
    assert all(torch.equal(t, before["generator"][name]) for name, t in after["generator"].items())


def test_the_server_averages_updates_by_the_clients_weights(
    method: Any, client_of: Callable[..., Client], tmp_path: Path
) -> None:
    server = method.start_task(method.create_server(), 0)
    payload, replies, states = method.make_payload(server), Replies([0, 1], tmp_path), {}
    for index in (0, 1):
        client = client_of(method, index)
        training = method.prepare_training(client, payload)
        training.run()
        states[index] = copy_state(training.networks["decoder"][0]), client.weight
        reply, _ = method.exchanges["train"].reply(client, payload)
        replies.add(index, Reply(reply.parts))
    networks = method.aggregate(server, replies).networks
    total = sum(weight for _, weight in states.values())
    for name in ("0.weight", "1.running_mean"):
        mean = sum(state[name] * weight for state, weight in states.values()) / total
        torch.testing.assert_close(networks["decoder"][name], mean)
    assert networks["decoder"]["1.num_batches_tracked"] == 0
    assert networks["generator"] is server.networks["generator"]


@pytest.fixture(scope="module")
def run(
    toys: Path,
    new_experiment: Callable[..., Experiment],
    splits_of: Callable[..., Splits],
    tmp_path_factory: pytest.TempPathFactory,
) -> Path:
    home = tmp_path_factory.mktemp("beside")
    with new_experiment(method="beside-network", splits=splits_of(), home=home) as experiment:
        experiment.run(home / "run")
    return home / "run"


def test_the_ledger_says_what_travels_and_that_the_scale_does_not(run: Path) -> None:
    parts = pl.read_parquet(run / "ledger.parquet").group_by("direction").agg(pl.col("part").unique().sort())
    assert dict(parts.iter_rows()) == {
        "down": ["decoder", "generator", "weights"],
        "kept": ["memory"],
        "up": ["decoder-update", "update", "weight"],
    }


def test_the_generator_is_trained_on_the_server_alone(run: Path) -> None:
    assert pl.read_parquet(run / "costs.parquet").select("work", "steps").rows() == [("generator", 5)] * 2


def test_a_network_that_is_not_finite_ends_the_run(method: Any) -> None:
    server = method.create_server()
    refuse_divergence(server, 0.5, 0, 0)
    server.networks["decoder"]["3.bias"][0] = torch.nan
    with pytest.raises(UserError, match="training diverged"):
        refuse_divergence(server, 0.5, 0, 0)
