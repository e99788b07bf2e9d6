"""Local projected descent: what earlier tasks' layers saw is answered as before, whatever the optimiser."""

from collections.abc import Callable
from itertools import pairwise

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F

from fclmodels.backbones.model.network import Network, build_skeleton
from fclmodels.backbones.model.spec import ModelSpec
from fclmodels.data.batches import Batch
from fclmodels.errors import UserError
from fclmodels.federation.messages import Payload
from fclmodels.federation.run_context import Run
from fclmodels.federation.server import Server
from fclmodels.federation.training.local_training import LocalTraining
from fclmodels.methods.fedavg import FedAvg
from fclmodels.methods.fedprotip import FedProTIP
from fclmodels.methods.parts.local_projection import project_optimiser_step
from fclmodels.methods.parts.trained_network import TrainedNetwork

SGD = ("optimizer.momentum=0.9", "optimizer.weight_decay=0.05", "optimizer.lr=0.05", "federation.local_epochs=2")
ADAM = ("optimizer.kind=adam", "optimizer.weight_decay=0.05", "optimizer.lr=0.01")
ADAMW = ("optimizer.kind=adamw", "optimizer.weight_decay=0.5", "optimizer.lr=0.01")
MLP = ("model.backbone=mlp", "model.hidden=24")
CNN = ("model.backbone=cnn", "model.width=4", "model.features=24")
PART_OF_IT = {"rank_rule": "total-energy", "threshold": 0.8, "tip": False, "threshold_by": "fixed", "budget": 1.0}
PARTIAL = ("federation.clients_per_round=2", "federation.server_lr=0.6")


class DoubleNetwork(TrainedNetwork):
    def prepare(self, network: nn.Module) -> None:
        super().prepare(network)
        network.double()
        assert isinstance(network, Network)
        network.backbone.register_forward_pre_hook(lambda module, inputs: (inputs[0].double(),))


class Double(FedProTIP):
    """In double precision, so that what is zero in exact arithmetic can be told from rounding."""

    def __init__(self, settings: FedProTIP.Settings, run: Run) -> None:
        super().__init__(settings, run)
        self.network = DoubleNetwork(self.run, settings.batch_norm)


class Stepwise(Double):
    """Projects the optimiser's whole step, whatever the optimiser."""

    def __init__(self, settings: FedProTIP.Settings, run: Run) -> None:
        super().__init__(settings, run)
        self.step = project_optimiser_step


class Free(Double):
    """No projection at all."""

    def start_training(self, training: LocalTraining, payload: Payload) -> None:
        self.projection.start(training, {"bases": {}, "complements": {}})


def drifts(before: Server, after: Server) -> dict[str, tuple[float, float]]:
    """Of each protected layer: how far its weight moved on the span known before, and at all, as shares of its norm."""
    found = {}
    for name, basis in before.knowledge["bases"].items():
        old, new = (server.weights[f"{name}.weight"].flatten(1) for server in (before, after))
        moved = new[: len(old)] - old
        found[name] = (float((moved @ basis).norm() / old.norm()), float(moved.norm() / old.norm()))
    return found


@pytest.mark.parametrize("network", [MLP, CNN], ids=["mlp", "cnn"])
@pytest.mark.parametrize("optimiser", [SGD, ADAM, ADAMW], ids=["sgd", "adam", "adamw"])
def test_nothing_moves_on_the_span_of_earlier_tasks(
    network: tuple[str, ...],
    optimiser: tuple[str, ...],
    method_of: Callable,
    after_each_task: Callable,
    splits_of: Callable,
) -> None:
    overrides, splits = (*network, *optimiser, *PARTIAL), splits_of(tasks=3)
    for kind, most in ((Double, 1e-10), (FedProTIP, 1e-5)):
        servers = after_each_task(method_of(kind, *overrides, splits=splits, **PART_OF_IT))
        for before, after in pairwise(servers):
            moved = drifts(before, after)
            assert max(inside for inside, _ in moved.values()) < most
            ranks = {name: basis.shape for name, basis in before.knowledge["bases"].items()}
            assert any(0 < r < d for d, r in ranks.values())
            assert all(outside > 1e-4 for name, (_, outside) in moved.items() if ranks[name][1] < ranks[name][0])


def test_without_projection_the_same_weights_drift(method_of: Callable, after_each_task: Callable) -> None:
    first, second = after_each_task(method_of(Free, *MLP, *SGD, threshold=0.5, threshold_by="fixed"))
    assert min(inside for inside, _ in drifts(first, second).values()) > 1e-3


def test_a_layer_answers_inputs_of_the_span_as_before(method_of: Callable, after_each_task: Callable) -> None:
    """W x before bias and normalisation, for random x in the span: in float32 to rounding."""
    first, second = after_each_task(method_of(FedProTIP, *CNN, *SGD, threshold=0.5))
    random = torch.Generator().manual_seed(0)
    for name, basis in first.knowledge["bases"].items():
        x = basis @ torch.randn(basis.shape[1], 5, generator=random)
        old, new = (server.weights[f"{name}.weight"].flatten(1) @ x for server in (first, second))
        torch.testing.assert_close(new, old, rtol=0, atol=2e-6 * float(old.abs().max()))


@pytest.mark.parametrize("network", [MLP, CNN], ids=["mlp", "cnn"])
@pytest.mark.parametrize("decay", [0.0, 0.05])
def test_projected_gradients_equal_projected_steps(
    network: tuple[str, ...], decay: float, method_of: Callable, federate: Callable
) -> None:
    """With momentum, and with decay of W - C only: torch's own step with its decay of W, projected as a whole."""
    overrides = (*network, *SGD, f"optimizer.weight_decay={decay}")
    one, other = (federate(method_of(kind, *overrides, threshold=0.5)) for kind in (Double, Stepwise))
    assert one.weights.keys() == other.weights.keys()
    for name, weight in one.weights.items():
        torch.testing.assert_close(weight, other.weights[name], rtol=0, atol=1e-12, msg=name)


def test_the_first_task_is_fedavgs_to_the_bit(method_of: Callable, federate: Callable) -> None:
    """There is no span yet, no frozen row, and the task's classes are all there are."""
    one, other = (
        federate(method_of(kind, *SGD, "model.backbone=resnet18", "federation.rounds=1"), 1).weights
        for kind in (FedProTIP, FedAvg)
    )
    assert all(torch.equal(weight, other[name]) for name, weight in one.items())


@pytest.mark.parametrize("optimiser", [SGD, ADAM, ADAMW], ids=["sgd", "adam", "adamw"])
def test_rows_of_other_tasks_stay_to_the_bit(
    optimiser: tuple[str, ...], method_of: Callable, after_each_task: Callable
) -> None:
    first, second = (server.weights for server in after_each_task(method_of(FedProTIP, *optimiser)))
    for name in ("heads.0.weight", "heads.0.bias"):
        assert torch.equal(second[name][:2], first[name])
        spec = method_of(FedProTIP).run.make_spec(2)
        drawn = method_of(FedProTIP, *optimiser).network.make_initial_weights(spec)[name]
        assert not torch.isclose(second[name][2:], drawn[2:], atol=1e-4).any()


def test_other_heads_stay_where_each_task_has_its_own(method_of: Callable, after_each_task: Callable) -> None:
    first, second = (s.weights for s in after_each_task(method_of(FedProTIP, *SGD, "model.head=per-task")))
    assert torch.equal(second["heads.0.weight"], first["heads.0.weight"])
    assert not torch.equal(second["heads.1.weight"], second["heads.0.weight"])


@pytest.mark.parametrize("vectors", ["frozen", "trained"])
def test_vectors_and_statistics_after_the_first_task(
    vectors: str, method_of: Callable, after_each_task: Callable
) -> None:
    policy = {"frozen": "frozen", "trained": "average"}[vectors]
    method = method_of(
        FedProTIP, *SGD, "model.backbone=resnet18", "federation.rounds=1", vectors=vectors, batch_norm=policy
    )
    start, (first, second) = method.create_server().weights, (server.weights for server in after_each_task(method))
    vector_names = [n for n, w in first.items() if w.is_floating_point() and w.ndim == 1 and n.startswith("backbone.")]
    assert {n.rpartition(".")[2] for n in vector_names} == {"weight", "bias", "running_mean", "running_var"}
    assert all(not torch.equal(first[name], start[name]) for name in vector_names)
    stayed = {name for name in vector_names if torch.equal(second[name], first[name])}
    assert stayed == (set(vector_names) if vectors == "frozen" else set())


def test_in_the_releases_reading_protected_weights_and_vectors_decay(
    method_of: Callable, after_each_task: Callable
) -> None:
    """Every step multiplies them by 1 - lr * weight_decay; each client takes as many."""
    decaying = ("optimizer.weight_decay=0.05", "optimizer.momentum=0", "optimizer.lr=0.05", "federation.rounds=1")
    method = method_of(Double, *MLP, *decaying, **PART_OF_IT, decay="all")
    first, second = after_each_task(method)
    basis, old, new = first.knowledge["bases"]["backbone.fc1"], first.weights, second.weights
    steps = torch.tensor((1 - 0.05 * 0.05) ** np.arange(1, 30))
    factor = float(new["backbone.fc1.bias"][0] / old["backbone.fc1.bias"][0])
    assert (steps - factor).abs().min() < 1e-9
    for name, protected in (("backbone.fc1.weight", basis), ("backbone.fc1.bias", torch.ones(1))):
        before, after = (w[name].reshape(len(w[name]), -1) @ protected.to(w[name].dtype) for w in (old, new))
        torch.testing.assert_close(after, factor * before, rtol=0, atol=1e-9)


def test_decay_of_all_needs_sgd(method_of: Callable) -> None:
    with pytest.raises(UserError, match=r"decay: all needs optimizer\.kind: sgd"):
        method_of(FedProTIP, *ADAM, decay="all")


def test_frozen_blocks_have_no_bases_and_stay(method_of: Callable, after_each_task: Callable) -> None:
    method = method_of(FedProTIP, *SGD, "model.freeze=[fc1]")
    first, second = after_each_task(method)
    assert set(second.knowledge["bases"]) == {"backbone.fc2", "backbone.fc3"}
    assert torch.equal(second.weights["backbone.fc1.weight"], first.weights["backbone.fc1.weight"])
    assert not torch.equal(second.weights["backbone.fc2.weight"], first.weights["backbone.fc2.weight"])


def network_of(method: FedProTIP, *tasks: tuple[int, ...]) -> Network:
    spec = method.run.make_spec(1)
    return build_skeleton(ModelSpec(spec.settings, spec.shape, "growing", tasks))


@pytest.mark.parametrize(
    ("settings", "weight", "bias"),
    [({}, [0, 3], [0, 3]), ({"head": "protected"}, [0, 3], [0, 1, 2, 3]), ({"vectors": "trained"}, [0, 3], [0, 3])],
)
def test_rows_of_classes_that_come_again_are_trained(
    settings: dict[str, str], weight: list[int], bias: list[int], method_of: Callable
) -> None:
    """Task 3 of three has the new class 4 and again 1 and 2, not 0 and 3."""
    method = method_of(FedProTIP, **settings)
    rows = method.projection.find_frozen_rows(network_of(method, (0, 1), (2, 3), (1, 4, 2)), 2)
    assert {name: labels.tolist() for name, labels in rows.items()} == {"heads.0.weight": weight, "heads.0.bias": bias}
    assert not method.projection.find_frozen_rows(network_of(method, (0, 1)), 0)


def test_a_head_that_tasks_share_is_protected(
    method_of: Callable, after_each_task: Callable, splits_of: Callable
) -> None:
    growing = "model.head=growing"
    method = method_of(Double, *MLP, *SGD, growing, splits=splits_of(same_classes=True), threshold=0.5)
    first, second = after_each_task(method)
    inside, outside = drifts(first, second)["heads.0"]
    assert inside < 1e-10
    assert outside > 1e-4
    assert torch.equal(second.weights["heads.0.bias"], first.weights["heads.0.bias"])


def test_the_loss_is_over_the_tasks_classes(method_of: Callable, client_of: Callable, federate: Callable) -> None:
    method = method_of(FedProTIP, "model.loss_over=seen")
    server = method.start_task(federate(method, 1), 1)
    client = client_of(method, 0, 1)
    network = method.networks.load(server.spec, server.weights)
    batch: Batch = next(next(client.yield_epochs()))
    logits = network(batch.inputs)[:, 2:]  # classes 2 and 3 are the second task's
    loss = method.compute_loss(LocalTraining(method, client, network, server.weights), batch)
    torch.testing.assert_close(loss, F.cross_entropy(logits, batch.labels - 2))
