"""What anchored methods share: the blend is the minimiser, and only what the last task had is held."""

from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

import numpy as np
import polars as pl
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scipy.optimize import minimize
from torch import Tensor

from fclmodels.backbones.layers.norms import STATISTICS, list_counters
from fclmodels.methods.ema import Ema
from fclmodels.methods.fedavg import FedAvg
from fclmodels.methods.parts.anchor import blend
from fclmodels.methods.prox_anchor import ProxAnchor
from fclmodels.methods.special import Special
from fclmodels.methods.special_c import SpecialC
from fclmodels.storage import trees

STRONG = [(Special, {"lambda": 1e6}), (SpecialC, {"c": 1e6}), (ProxAnchor, {"mu": 9.0}), (Ema, {"share": 1.0})]
ANCHORED = pytest.mark.parametrize(("kind", "settings"), STRONG, ids=["special", "special-c", "prox-anchor", "ema"])
RESNET = ("model.backbone=resnet18", "federation.rounds=1")


def drawn(seed: int, *shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


@given(lam=st.floats(0, 100), seed=st.integers(0, 99))
def test_a_blend_minimises_the_anchored_problem(lam: float, seed: int) -> None:
    """Eq. 5, solved numerically with double precision; lambda / (1 + lambda) is the anchor's share of eq. 6."""
    w, a = drawn(seed, 7), drawn(seed + 100, 7)

    def objective(x: np.ndarray) -> float:
        return ((x - w.double().numpy()) ** 2).sum() / 2 + lam * ((x - a.double().numpy()) ** 2).sum() / 2

    best = minimize(objective, w.double().numpy(), tol=1e-8).x
    found = blend({"w": w}, {"w": a}, lam / (1 + lam))["w"]
    np.testing.assert_allclose(found, best, rtol=0, atol=1e-5)


def test_a_blend_by_hand() -> None:
    weights = {
        "head": torch.tensor([[4.0], [8.0], [5.0]]),
        "free": torch.tensor([3.0]),
        "scale": torch.tensor(2.0),
        "count": torch.tensor(7),
    }
    anchor = {"head": torch.tensor([[0.0], [4.0]]), "scale": torch.tensor(4.0), "count": torch.tensor(3)}
    before = trees.digest(weights)
    blended = blend(weights, anchor, 0.25)
    assert blended["head"].tolist() == [[3.0], [7.0], [5.0]]  # of a head that has grown, the old rows
    assert blended["scale"].item() == 2.5
    assert blended["free"].item() == 3.0
    assert (blended["count"].item(), blended["count"].dtype) == (7, torch.int64)
    assert trees.digest(weights) == before


def test_a_share_of_1_is_the_anchor_to_the_bit() -> None:
    weights, anchor = {"w": drawn(0, 50) * 1e6}, {"w": drawn(1, 50)}
    assert torch.equal(blend(weights, anchor, 1.0)["w"], anchor["w"])


@ANCHORED
def test_nothing_is_anchored_in_the_first_task(
    kind: type[FedAvg], settings: dict[str, float], method_of: Callable, federate: Callable
) -> None:
    first = federate(method_of(kind, **settings), 1)
    assert "anchor" not in first.knowledge
    assert trees.digest(first.to_tree()) == trees.digest(federate(method_of(FedAvg), 1).to_tree())


@ANCHORED
def test_the_anchor_is_the_model_with_which_the_task_before_ended(
    kind: type[FedAvg], settings: dict[str, float], method_of: Callable, splits_of: Callable, after_each_task: Callable
) -> None:
    """In a third task not that of the first, and not the last round's; with the rows that the head had then."""
    servers = after_each_task(method_of(kind, splits=splits_of(tasks=3), **settings))
    for before, after in pairwise(servers):
        assert trees.digest(after.knowledge["anchor"]) == trees.digest(before.weights)


@ANCHORED
def test_old_rows_of_a_growing_head_are_held_and_new_ones_are_free(
    kind: type[FedAvg], settings: dict[str, float], method_of: Callable, federate: Callable
) -> None:
    """Measured by how far FedAvg moves both, from the same model."""
    method = method_of(kind, **settings)
    start = method.start_task(federate(method, 1), 1).weights
    held, free = (federate(other, 2).weights for other in (method, method_of(FedAvg)))
    for name in ("heads.0.weight", "heads.0.bias"):
        old, new = ((held[name] - start[name])[rows].norm() for rows in (slice(2), slice(2, 4)))
        old_by_fedavg, new_by_fedavg = ((free[name] - start[name])[rows].norm() for rows in (slice(2), slice(2, 4)))
        assert old < 0.3 * old_by_fedavg
        assert new > 0.5 * new_by_fedavg


@ANCHORED
def test_a_new_tasks_own_head_is_free_and_old_heads_do_not_move(
    kind: type[FedAvg], settings: dict[str, float], method_of: Callable, splits_of: Callable, federate: Callable
) -> None:
    method = method_of(kind, splits=splits_of(head="per-task"), **settings)
    first, second = federate(method, 1), federate(method, 2)
    start, free = method.start_task(first, 1).weights, federate(method_of(FedAvg, splits=method.run.splits)).weights
    assert torch.equal(second.weights["heads.0.weight"], first.weights["heads.0.weight"])
    new, by_fedavg = (
        (weights["heads.1.weight"] - start["heads.1.weight"]).norm() for weights in (second.weights, free)
    )
    assert new > 0.5 * by_fedavg


@ANCHORED
def test_what_is_frozen_stays_to_the_bit(
    kind: type[FedAvg], settings: dict[str, float], method_of: Callable, federate: Callable
) -> None:
    method = method_of(kind, "model.freeze=[fc1]", **settings)
    first, second = federate(method, 1).weights, federate(method, 2).weights
    assert torch.equal(first["backbone.fc1.weight"], second["backbone.fc1.weight"])


@pytest.mark.parametrize(("kind", "setting"), [(Special, {"lambda": 1 / 3}), (Ema, {"share": 0.25})])
def test_running_statistics_are_blended_or_averaged_and_never_their_counts(
    kind: type[FedAvg], setting: dict[str, float], method_of: Callable, federate: Callable
) -> None:
    """One round: what FedAvg makes of it, and a quarter of the way back from there to the anchor."""
    anchor, averaged = (federate(method_of(FedAvg, *RESNET), tasks).weights for tasks in (1, 2))
    for policy, share in {"blend": 0.25, "average": 0.0}.items():
        method = method_of(kind, *RESNET, batch_norm=policy, **setting)
        server = federate(method)
        moved = [name for name in averaged if name.endswith(STATISTICS)]
        assert len(moved) == 40
        for name in moved:
            expected = (1 - share) * averaged[name].double() + share * anchor[name].double()
            torch.testing.assert_close(server.weights[name].double(), expected, rtol=1e-5, atol=1e-6)
            assert not torch.equal(averaged[name], anchor[name])
        affine = (1 - 0.25) * averaged["backbone.bn1.weight"] + 0.25 * anchor["backbone.bn1.weight"]
        torch.testing.assert_close(server.weights["backbone.bn1.weight"], affine)
        counters = list_counters(method.networks.load(server.spec, server.weights))
        assert counters
        assert all(server.weights[name].item() == 0 for name in counters)
        assert all(server.weights[name].dtype == torch.int64 for name in counters)


@pytest.mark.parametrize(("kind", "settings"), STRONG[1:3], ids=["special-c", "prox-anchor"])
def test_a_client_downloads_the_anchor_once_a_task(
    kind: type[FedAvg], settings: dict[str, float], experiment_of: Callable, tmp_path: Path
) -> None:
    method, setting = kind.name, next(iter(settings))
    experiment = experiment_of("federation.rounds=3", f"methods.{method}.{setting}=0.1", method=method)
    experiment.run(tmp_path / "run")
    ledger = pl.read_parquet(tmp_path / "run" / "ledger.parquet").filter(pl.col("part") == "anchor")
    assert ledger.select("task", "client").sort("client").rows() == [(1, client) for client in range(4)]


@pytest.mark.parametrize("kind", [Special, Ema, SpecialC, ProxAnchor])
def test_new_rows_are_free_or_anchored_where_they_start(
    kind: type, method_of: Callable, federate: Callable, splits_of: Callable
) -> None:
    """Of a growing head and of a task's own head; a strong anchor holds them as it holds the old ones."""
    strength = dict(STRONG)[kind]
    for head in ("growing", "per-task"):
        for new_rows in ("free", "anchored"):
            method = method_of(kind, splits=splits_of(head=head), new_rows=new_rows, **strength)
            ended = federate(method, 1)
            started = method.start_task(ended, 1)
            of = started.weights if new_rows == "anchored" else ended.weights
            assert started.knowledge["anchor"].keys() == of.keys()
            assert all(torch.equal(started.knowledge["anchor"][name], of[name]) for name in of)
            after = federate(method).weights
            name, first = ("heads.0.weight", 2) if head == "growing" else ("heads.1.weight", 0)
            moved = (after[name] - started.weights[name])[first:].norm()
            assert (moved < 0.05) == (new_rows == "anchored"), (kind, head, moved)


@pytest.mark.parametrize(("kind", "share"), [(SpecialC, 0.25 / 1.25), (ProxAnchor, 0.1 * 2.5)])
def test_running_statistics_on_a_client_blend_as_weights_do(
    kind: type, share: float, method_of: Callable, client_of: Callable, federate: Callable
) -> None:
    """In a step with eta 0.1 by the share of the way to W* that the anchor alone moves a weight; or not at all."""
    strength = {SpecialC: {"c": 0.25}, ProxAnchor: {"mu": 2.5}}[kind]
    changes = {}
    for policy in ("average", "blend"):
        overrides = ("model.backbone=resnet18", "federation.batch_size=64", "optimizer.lr=0.1")
        method = method_of(kind, *overrides, batch_norm=policy, **strength)
        server = method.start_task(federate(method_of(FedAvg, *overrides), 1), 1)
        anchor = server.knowledge["anchor"]
        payload = method.make_payload(server)
        names = [name for name in anchor if name.endswith(STATISTICS)]
        payload["weights"].tensors.update({name: anchor[name] + 1 for name in names})
        client = client_of(method, 1, 1)
        statistics = method.train(client, payload).tensors["statistics"]
        changes[policy] = {name: 1 + statistics[name] / client.weight for name in names}
    for name, plain in changes["average"].items():
        torch.testing.assert_close(changes["blend"][name], (1 - share) * plain, rtol=1e-4, atol=1e-5)
