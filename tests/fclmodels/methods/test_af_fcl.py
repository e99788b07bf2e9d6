"""AF-FCL: its losses by hand, its limit case, who moves in which step, and streams of every kind."""

import math
from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
from torch import Tensor

from fclmodels.data.batches import Batch
from fclmodels.data.splits.split_reader import Splits
from fclmodels.federation.server import Server
from fclmodels.federation.training.auxiliary_networks import Auxiliary
from fclmodels.federation.training.local_training import LocalTraining
from fclmodels.methods.af_fcl import AfFcl
from fclmodels.methods.fedavg import FedAvg
from fclmodels.methods.parts.feature_replay import FeatureReplay, draw_near, weigh_replay
from fclmodels.methods.parts.hidden_layer import build_layer
from fclmodels.numerics.distillation import distillation_loss

ADAM = ("optimizer.kind=adam", "optimizer.lr=0.01")
NOTHING = {"replay": 0, "features": 0, "outputs": 0}
UNEVEN = {(0, 0): 6, (0, 1): 8, (0, 2): 7, (1, 1): 5, (1, 2): 1}


class Layered(FedAvg):
    """FedAvg with a layer between backbone and head, and its cross entropy alone."""

    name = "layered"
    paper = "none"

    def list_auxiliary_networks(self) -> list[Auxiliary]:
        width = self.networks.build(self.run.make_spec(1)).backbone.features
        return [Auxiliary("layer", {"features": width}, build_layer, "averaged", self.run.params.optimizer)]

    def compute_loss(self, training: LocalTraining, batch: Batch) -> Tensor:
        hidden = training.networks["layer"][0](training.network.backbone(batch.inputs))
        return self.compute_cross_entropy(training.network, hidden, batch.labels, training.client.task)


def assert_equal(one: Mapping[str, Tensor], other: Mapping[str, Tensor]) -> None:
    assert one.keys() == other.keys()
    assert all(torch.equal(tensor, other[name]) for name, tensor in one.items())


def test_the_generated_term_by_hand() -> None:
    weights, density = torch.tensor([0.385349, 0.167288]), torch.tensor(0.350582)
    assert weigh_replay(torch.tensor([1.2, 0.7]), weights, density, 0.1).item() == pytest.approx(0.120402, abs=1e-6)


def test_distillation_is_the_releases_up_to_its_constant() -> None:
    """The cross entropy of square roots of probabilities, made probabilities again."""
    p, q = torch.tensor([[0.7, 0.2, 0.1]]), torch.tensor([[0.5, 0.25, 0.25]])
    target = q.sqrt() / q.sqrt().sum()
    constant = -(target * target.log()).sum()
    assert (distillation_loss(p.log(), q.log(), 2.0) + constant).item() == pytest.approx(1.116839, abs=1e-6)


@pytest.mark.parametrize("head", ["growing", "per-task"])
def test_without_replay_and_distillation_it_is_fedavg(
    head: str, method_of: Callable, federate: Callable, splits_of: Callable
) -> None:
    """Adam starts anew in each round; no flow and no last model travel, and nobody is asked for its classes."""
    settings = (*ADAM, f"model.head={head}", "model.backbone=resnet18")
    splits = splits_of(clients=3, train=UNEVEN)
    plain = federate(method_of(Layered, *settings, splits=splits))
    method = method_of(AfFcl, *settings, splits=splits, **NOTHING)
    server = federate(method)
    assert_equal(server.weights, plain.weights)
    assert_equal(server.networks["layer"], plain.networks["layer"])
    assert method.make_payload(server).keys() == {"weights", "layer"}
    assert server.networks.keys() == {"layer"}
    assert server.knowledge == {}
    assert "labels" not in method.exchanges


def test_without_replay_alone_the_last_model_has_no_flow(method_of: Callable, federate: Callable) -> None:
    method = method_of(AfFcl, replay=0)
    server = federate(method)
    assert method.make_payload(server).keys() == {"weights", "layer", "anchor", "past-layer"}
    assert method.obstacle_to_noise is None


@pytest.fixture
def training(method_of: Callable, federate: Callable, client_of: Callable) -> Callable[..., tuple[Any, ...]]:
    """A client's training in the second task, and a batch of it."""

    def make(*overrides: str, **settings: Any) -> tuple[LocalTraining, Server, Batch]:
        method = method_of(AfFcl, *overrides, **settings)
        server = method.start_task(federate(method, 1), 1)
        made = method.prepare_training(client_of(method, 1, 1), method.make_payload(server))
        return made, server, next(method.run.batches.iterate_ordered(made.client.rows, 64))

    return make


def copy_of(training: LocalTraining) -> dict[str, dict[str, Tensor]]:
    modules = {"network": training.network, **{name: module for name, (module, _) in training.networks.items()}}
    return {n: {k: t.detach().clone() for k, t in m.state_dict().items()} for n, m in modules.items()}


def test_each_step_moves_its_own_network_alone(training: Callable) -> None:
    made, _, batch = training()
    replay, before = made.find_added(FeatureReplay), copy_of(made)
    features = made.network.backbone(batch.inputs).detach()
    replay.step_flow(features, batch.labels)
    flowed = copy_of(made)
    assert_equal(flowed["layer"], before["layer"])
    assert_equal(flowed["network"], before["network"])
    assert not torch.equal(flowed["flow"]["couplings.0.enter.weight"], before["flow"]["couplings.0.enter.weight"])
    replay.step_layer(made.network, features, batch.labels, 0.1)
    after = copy_of(made)
    assert_equal(after["flow"], flowed["flow"])
    assert_equal(after["network"], before["network"])
    assert not torch.equal(after["layer"]["weight"], before["layer"]["weight"])


def test_the_loss_is_the_sum_of_its_terms(training: Callable) -> None:
    """Against the same terms from the server's two models, one after the other."""
    made, server, batch = training(features=0.3, outputs=0.7)
    last = server.knowledge["past"]["layer"]
    with torch.no_grad():
        made.network.backbone.fc3.bias += 0.1
        features = made.network.backbone(batch.inputs)
        earlier = made.method.networks  # the teacher has a cache of its own
        loss = made.method.compute_loss(made, batch)
        logits = made.network.compute_logits(made.networks["layer"][0](features))
        cross = torch.nn.functional.cross_entropy(logits, batch.labels)
        before = earlier.load(server.spec, server.weights).backbone(batch.inputs)
        hidden = torch.nn.functional.leaky_relu(before @ last["weight"].T + last["bias"])
        anchor = server.knowledge["anchor"]
        answer = hidden @ anchor["heads.0.weight"].T + anchor["heads.0.bias"]
    p, q = (z.double().div(2).softmax(1) for z in (logits[:, :2], answer))
    terms = [cross, 0.3 * (features - before).square().mean(), 0.7 * (q * (q / p).log()).sum(1).mean()]
    assert loss.item() == pytest.approx(float(sum(terms)), rel=1e-4)


def test_the_flows_loss_has_draws_of_earlier_classes(training: Callable, monkeypatch: pytest.MonkeyPatch) -> None:
    made, _, batch = training(memory=0.5)
    replay, losses, calls = made.find_added(FeatureReplay), [], []
    monkeypatch.setattr("fclmodels.methods.parts.feature_replay.descend", lambda _, loss: losses.append(loss.item()))
    draw = replay.last.flow.draw
    monkeypatch.setattr(
        replay.last.flow, "draw", lambda columns: calls.append((columns, *draw(columns))) or calls[-1][1:]
    )
    features = 20 * made.network.backbone(batch.inputs).detach()  # so that all draws are near
    replay.step_flow(features, batch.labels)
    ((columns, drawn, _),) = calls
    assert set(columns.tolist()) <= {0, 1}
    of_batch, of_draws = (replay.flow(h, y)[1].mean().item() for h, y in ((features, batch.labels), (drawn, columns)))
    assert losses == [pytest.approx(-of_batch - 0.5 * of_draws, rel=1e-5)]


def test_draws_that_are_too_far_move_nothing(training: Callable, monkeypatch: pytest.MonkeyPatch) -> None:
    """A draw of ten times the longest features' length, or one that is no number, is left out."""
    made, _, batch = training()
    replay, features = made.find_added(FeatureReplay), made.network.backbone(batch.inputs).detach()
    longest = features.norm(dim=1).max()
    lengths = torch.tensor([9.9, 10.1, math.nan, math.inf]).repeat(2) * longest
    far = torch.nn.functional.normalize(torch.ones(8, features.shape[1])) * lengths[:, None]
    monkeypatch.setattr(replay.flow, "draw", lambda columns: (far[: len(columns)], far[: len(columns)]))
    drawn, latents, columns = draw_near(replay.flow, torch.tensor([1, 3]), features)
    assert drawn.shape == latents.shape == (len(columns), features.shape[1])
    assert len(columns) == (len(features) + 3) // 4
    far[0] = math.nan
    before = replay.layer.weight.clone()
    replay.step_layer(made.network, features[:4], batch.labels[:4], 0.1)
    assert torch.equal(replay.layer.weight, before)


def test_statistics_move_once_a_batch(training: Callable) -> None:
    """Features for flow and replay are those of evaluation; frozen statistics stay frozen."""
    made, _, _ = training("model.backbone=resnet18")
    first, epoch = made.network.backbone.bn1, made.client.run.batches.iterate_ordered(made.client.rows, 4)
    before = first.running_mean.clone()
    next(made.method.replay_before(made, epoch))
    assert torch.equal(first.running_mean, before)
    assert made.network.training


def test_labels_are_those_that_some_client_has(
    method_of: Callable, after_each_task: Callable, splits_of: Callable
) -> None:
    """Nobody has samples of class 3; classes that come again count once."""
    splits = splits_of(clients=2, train={(0, 0): 4, (0, 1): 4, (1, 0): 1})
    servers = after_each_task(method_of(AfFcl, splits=splits))
    sets = [{n: c.tolist() for n, c in server.knowledge["columns"].items()} for server in servers]
    assert sets == [{"past": [], "now": [0, 1]}, {"past": [0, 1], "now": [0, 1, 2]}]
    again = after_each_task(method_of(AfFcl, splits=splits_of(same_classes=True)))[-1]
    assert {n: c.tolist() for n, c in again.knowledge["columns"].items()} == {"past": [0, 1], "now": [0, 1]}


def test_heads_of_their_own_have_columns_of_their_own(
    method_of: Callable, after_each_task: Callable, splits_of: Callable
) -> None:
    splits: Splits = splits_of(same_classes=True, head="per-task")
    server = after_each_task(method_of(AfFcl, splits=splits))[-1]
    assert server.knowledge["columns"]["now"].tolist() == [0, 1, 2, 3]
    assert len(server.networks["flow"]["couplings.0.of_class.weight"]) == 4


def test_a_stream_that_goes_on_adds_rows_to_the_flow(
    method_of: Callable, federate: Callable, client_of: Callable, splits_of: Callable
) -> None:
    """The state of a stream of two tasks goes on in one of three; earlier rows and permutations stay."""
    short, longer = (method_of(AfFcl, splits=splits_of(tasks=tasks)) for tasks in (2, 3))
    before = federate(short)
    server = longer.start_task(before, 2)
    rows, old = (s.networks["flow"]["couplings.1.of_class.weight"] for s in (server, before))
    assert (len(old), len(rows)) == (4, 6)
    assert torch.equal(rows[:4], old)
    assert torch.equal(server.networks["flow"]["couplings.2.order"], before.networks["flow"]["couplings.2.order"])
    answer = longer.train(client_of(longer, 0, 2), longer.make_payload(server))
    assert math.isfinite(answer.loss)


@pytest.mark.parametrize("settings", [(), ("model.head=per-task",), ("model.backbone=resnet18",)])
def test_served_models_answer_as_the_layer_says(
    settings: tuple[str, ...], method_of: Callable, federate: Callable
) -> None:
    policy = {"batch_norm": "batch"} if settings == ("model.backbone=resnet18",) else {}
    method = method_of(AfFcl, *settings, **policy)
    server = federate(method)
    inputs = next(method.run.batches.iterate_ordered(method.select_rows(1, 1), 5)).inputs
    with torch.no_grad():
        logits = method.make_predictor(server)(inputs).logits
        network = method.networks.load(server.spec, server.weights).eval()
        layer = server.networks["layer"]
        hidden = torch.nn.functional.leaky_relu(network.backbone(inputs) @ layer["weight"].T + layer["bias"])
        torch.testing.assert_close(logits, torch.cat([head(hidden) for head in network.heads], 1))
