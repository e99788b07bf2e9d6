"""FedWeIT: the worked decomposition and server's mean, what travels and is borrowed, the drift, a task's own theta."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import polars as pl
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.testing import assert_allclose

from fclmodels.errors import UserError
from fclmodels.federation.protection.reply_checks import PartError, check_places
from fclmodels.methods.fedweit import FedWeit, unpack_added
from fclmodels.methods.parts.decomposed_weights import Decomposition, Others, choose_channels
from fclmodels.methods.parts.sparse_weights import Sparse, add_entries, average_channels, pick_entries

HEADS = "model.head=per-task"
W = "backbone.fc1.weight"


def sparse(weight: Any) -> Sparse:
    return pick_entries({W: torch.tensor(weight)}, 0.0)


def test_the_worked_weights() -> None:
    """The notes have output channels as columns."""
    B, A = torch.tensor([[1.0, -2.0], [0.5, 3.0]]).T, torch.tensor([[0.1, 0.0], [0.0, -0.2]]).T
    present = {"mask": {W: torch.tensor([0.0, 1.0])}, "own": {W: A}, "alpha": {W: torch.tensor([0.5])}, "start": {W: B}}
    of = Decomposition({W: B}, present, Others([sparse([[1.0, 0.0], [0.0, 0.0]])]), {})
    assert_allclose(of.compose()[W].T.detach(), [[1.1, -1.462117], [0.25, 1.993176]], atol=1e-6)


def test_the_worked_mean_by_channel() -> None:
    B1, B2 = torch.tensor([[1.0, 2.0], [3.0, 4.0]]).T, torch.tensor([[5.0, 6.0], [7.0, 8.0]]).T
    places = [torch.tensor([0], dtype=torch.int32), torch.tensor([0, 1], dtype=torch.int32)]
    mean = average_channels(torch.zeros(2, 2), places, [B1[:1], B2])
    assert mean.T.tolist() == [[3, 6], [5, 8]]
    assert average_channels(torch.full((2, 2), 9.0), places[:1], [B1[:1]])[1].tolist() == [9, 9]


@settings(max_examples=20)
@given(st.lists(st.floats(-2, 2, width=32), min_size=1, max_size=12), st.floats(0, 1))
def test_entries_above_a_threshold_are_the_weight_without_the_others(entries: list[float], threshold: float) -> None:
    weight = torch.tensor(entries).view(-1, 1)
    part = pick_entries({W: weight}, threshold)
    spread = add_entries(torch.zeros_like(weight), part.places[W], part.values[W])
    assert torch.equal(spread, torch.where(weight.abs() > threshold, weight, torch.zeros(())))
    assert Sparse.of_tensors(part.to_tensors()) == part


def test_channels_are_those_above_the_quantile() -> None:
    assert choose_channels(torch.tensor([0.1, -5.0, 0.2, 3.0]), 0.3).tolist() == [1, 2, 3]
    assert choose_channels(torch.tensor([0.1, -5.0, 0.2, 3.0]), 0.5).tolist() == [1, 3]
    assert choose_channels(torch.tensor([0.1, -5.0, 0.2, 3.0]), 0.0).tolist() == [0, 1, 2, 3]
    assert choose_channels(torch.tensor([0.1]), 0.3).tolist() == [0]


@pytest.mark.parametrize(
    ("places", "values", "fits"),
    [([0, 3], [1.0, 2.0], True), ([3, 0], [1.0, 2.0], False), ([0, 4], [1.0, 2.0], False), ([0], [1.0, 2.0], False)],
)
def test_places_that_no_weight_has_are_refused(places: list[int], values: list[float], fits: bool) -> None:
    tensors = {"places.w": torch.tensor(places, dtype=torch.int32), "values.w": torch.tensor(values)}
    if fits:
        check_places(tensors, {"w": torch.zeros(2, 2)})
        return
    with pytest.raises(PartError):
        check_places(tensors, {"w": torch.zeros(2, 2)})


@pytest.fixture
def method(method_of: Callable) -> Any:
    return method_of(FedWeit, HEADS, "optimizer.lr=0.05", l1=0.01)


def test_a_client_sends_channels_and_gets_what_others_added(
    method: Any, client_of: Callable, federate: Callable
) -> None:
    server = federate(method, 1)
    entries = server.knowledge["added"]
    assert [(one["client"], one["task"]) for one in entries] == [(k, 0) for k in method.list_participants(0)]
    later = method.start_task(server, 1)
    own = method.make_own_payload(later, 1)
    K = unpack_added(own)
    assert len(K) == len(entries) - 1
    assert own["added"].once
    others = [one["tensors"] for one in entries if one["client"] != 1]
    for part, tensors in zip(K, others, strict=True):
        assert all(torch.equal(tensor, tensors[name]) for name, tensor in part.to_tensors().items())
        assert all((values.abs() > 0.01).all() for values in part.values.values())
    payload = {**method.make_payload(later), **own}
    assert all(not name.startswith("heads") and "bias" not in name for name in payload["weights"].tensors)
    answer = method.train(client_of(method, 1, 1), payload)
    sent = Sparse.of_tensors(answer.tensors["base"])
    for name, rows in sent.places.items():
        mask = answer.memory["present"]["mask"][name]
        assert len(rows) == len(sent.values[name]) == int((mask.abs() > mask.abs().quantile(0.3)).sum())


def test_the_server_keeps_the_newest(method_of: Callable, federate: Callable) -> None:
    method = method_of(FedWeit, HEADS, borrow=3, l1=0.01)
    assert [one["task"] for one in federate(method).knowledge["added"]] == [1, 1, 1]
    assert method.make_own_payload(method.create_server(), 1) == {}


def test_a_tasks_theta_answers_for_its_head(method: Any, client_of: Callable, federate: Callable) -> None:
    server = federate(method, 1)
    memory = method.train(
        client_of(method, 1), method.make_payload(method.start_task(method.create_server(), 0))
    ).memory
    present = memory["present"]
    client = client_of(method, 1, 0, memory=method.end_task(client_of(method, 1, memory=memory), {}).memory)
    payload, inputs = method.make_payload(server), torch.randn(3, 1, 6, 6)
    with torch.inference_mode():
        logits = method.make_client_predictor(client, payload)(inputs).logits
    B, own = server.weights, present["own"]
    theta = {
        name: B[name] * torch.sigmoid(mask).view(-1, *[1] * (B[name].ndim - 1))
        + torch.where(own[name].abs() > 0.01, own[name], torch.zeros(()))
        for name, mask in present["mask"].items()
    }
    network = method.networks.load(server.spec, {**B, **present["local"], **theta}).eval()
    with torch.no_grad():
        assert_allclose(logits, network.heads[0](network.backbone(inputs)), atol=1e-5)


def test_the_base_is_held_under_earlier_masks(method: Any, client_of: Callable, federate: Callable) -> None:
    """(B - B_start) / (1 + lr drift sum_i sigmoid(m_i)^2), which for no drift is B."""
    server = method.start_task(federate(method, 1), 1)
    base = method.make_payload(server)["weights"].tensors
    masks = [{name: torch.randn(len(B)) for name, B in base.items()} for _ in range(2)]
    memory = {"tasks": {str(i): {"mask": mask} for i, mask in enumerate(masks)}}
    training = method.prepare_training(client_of(method, 1, 1, memory=memory), method.make_payload(server))
    of = training.find_added(Decomposition)
    assert isinstance(of, Decomposition)
    with torch.no_grad():
        of.base[W] += 1
    method.finish_step(training)
    s = sum(torch.sigmoid(mask[W]) ** 2 for mask in masks)
    assert_allclose(of.base[W].detach() - base[W], (1 / (1 + 0.05 * 100 * s))[:, None].expand_as(base[W]), rtol=1e-4)


def test_penalties_are_the_papers(method: Any) -> None:
    of = Decomposition(
        {W: torch.tensor([[2.0]])},
        {"mask": {W: torch.tensor([3.0])}, "own": {W: torch.tensor([[-0.5]])}, "alpha": {}, "start": {}},
        Others([]),
        {},
    )
    first, later = (method.measure_size(of, task).item() for task in (0, 1))
    assert_allclose([first, later], [0.01 * 0.5 + 1e-4 / 2 * x for x in (0.25 + 9 + 4, 0.25 + 9)], rtol=1e-5)


def test_its_bytes_are_those_of_what_is_sparse(experiment_of: Callable, tmp_path: Path) -> None:
    experiment_of("methods.fedweit.l1=0.05", "optimizer.lr=0.05", method="fedweit").run(tmp_path / "run")
    ledger = pl.read_parquet(tmp_path / "run" / "ledger.parquet")
    dense = ledger.filter(direction="down", part="weights")["bytes"].max()
    base = ledger.filter(direction="up", part="base")["bytes"]
    assert (base < 0.85 * dense).all()
    up = ledger.filter(direction="up", part="added", task=0)
    down = ledger.filter(direction="down", part="added", task=1).sort("client")
    assert down["bytes"].sum() == sum(up["bytes"].sum() - up.filter(client=k)["bytes"].sum() for k in down["client"])


def test_what_it_is_not_made_for_is_refused(method_of: Callable) -> None:
    with pytest.raises(UserError, match=r"head of its own.* per-task"):
        method_of(FedWeit, "model.head=growing")


@pytest.mark.slow
def test_it_learns_where_a_network_has_norms(experiment_of: Callable, tmp_path: Path) -> None:
    experiment_of("model.backbone=resnet18", "federation.rounds=1", method="fedweit").run(tmp_path / "run")
