"""FedOMG: the server's step against eq. 2 with SciPy's minimiser, and the cases in which it is FedAvg's."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pytest
import torch
from numpy.testing import assert_allclose
from scipy.optimize import minimize
from torch import Tensor

from fclmodels.data.splits.split_reader import Splits
from fclmodels.errors import UserError
from fclmodels.federation.engine import faults
from fclmodels.federation.engine.replies import Replies
from fclmodels.federation.messages import Part, Reply
from fclmodels.federation.server import Server
from fclmodels.methods.fedavg import FedAvg
from fclmodels.methods.fedomg import FedOMG

Named = dict[str, Tensor]
SIZES = {(task, client): 3 + 2 * client for task in (0, 1) for client in range(4)}
PLAIN = {"kappa": 0, "normalise": False}
LAYERS = ("backbone.fc1", "backbone.fc2", "backbone.fc3", "heads.0")


@pytest.fixture
def uneven(splits_of: Callable[..., Splits]) -> Splits:
    return splits_of(train=SIZES)


@pytest.fixture
def stepped(tmp_path: Path) -> Callable[..., Named]:
    """How far the server goes on these displacements of clients, which count as many samples and are so late."""
    count = iter(range(100))

    def step(
        method: FedAvg,
        moved: Mapping[int, Named],
        samples: Mapping[int, int] | None = None,
        late: Mapping[int, float] | None = None,
    ) -> Named:
        replies = Replies(list(moved), tmp_path / f"spool-{next(count)}")
        for client, displacement in moved.items():
            n = float((samples or {}).get(client, 1))
            update = Part("update", {name: n * d for name, d in displacement.items()}, least="each")
            weight = Part("count", {"weight": torch.tensor(n, dtype=torch.float64)})
            replies.add(client, Reply({"update": update, "weight": weight}), (late or {}).get(client, 1.0))
        server = first_task(method)
        after = method.aggregate(server, replies).weights
        return {name: after[name] - weight for name, weight in server.weights.items()}

    return step


def first_task(method: FedAvg) -> Server:
    return method.start_task(method.create_server(), 0)


def displacements(method: FedAvg, n: int, common: float = 0.5) -> dict[int, Named]:
    """Of n clients, of different lengths, that have some direction in common."""
    random = torch.Generator().manual_seed(n)

    def drawn() -> Named:
        return {name: torch.randn(w.shape, generator=random) for name, w in first_task(method).weights.items()}

    shared, own = drawn(), [drawn() for _ in range(n)]
    return {
        client: {name: 0.01 * (1 + client) * (mine[name] + common * shared[name]) for name in mine}
        for client, mine in enumerate(own)
    }


def flat(tensors: Named, names: Any = None) -> np.ndarray:
    return torch.cat([tensors[name].flatten() for name in names or tensors]).double().numpy()


def ga(V: np.ndarray, kappa: float) -> np.ndarray:
    """Eq. 2 of the rows of V, its minimiser by SciPy."""
    scale = np.linalg.norm(V, axis=1).mean()
    U, n = V / scale, len(V)
    mean = U.mean(axis=0)
    length = np.linalg.norm(mean)
    simplex = {"type": "eq", "fun": lambda p: p.sum() - 1}
    p = minimize(
        lambda p: p @ U @ mean + kappa * length * np.linalg.norm(p @ U),
        np.full(n, 1 / n),
        bounds=[(0, 1)] * n,
        constraints=simplex,
        options={"ftol": 1e-15, "maxiter": 500},
    ).x
    return scale * (mean + kappa * length / np.linalg.norm(p @ U) * (p @ U))


def close(found: Named, expected: Named, atol: float = 1e-5) -> None:
    assert found.keys() == expected.keys()
    for name in expected:
        assert_allclose(found[name], expected[name], atol=atol)


def same_norms(V: np.ndarray) -> np.ndarray:
    norms = np.linalg.norm(V, axis=1, keepdims=True)
    return V * norms.mean() / norms


@pytest.mark.parametrize("normalise", [False, True])
@pytest.mark.parametrize("layerwise", [False, True])
def test_the_server_goes_along_the_aligned_direction(
    normalise: bool, layerwise: bool, method_of: Callable, stepped: Callable
) -> None:
    """Of the weighted updates, of all of the model or of each layer, in the units of their mean; eta_g = 0.5."""
    method = method_of(
        FedOMG, "federation.server_lr=0.5", kappa=0.7, rescale="none", normalise=normalise, layerwise=layerwise
    )
    moved, samples = displacements(method, 4), {0: 2, 1: 5, 2: 1, 3: 4}
    step = stepped(method, moved, samples)
    layers = [[f"{layer}.weight", f"{layer}.bias"] for layer in LAYERS]
    assert {name for names in layers for name in names} == step.keys()
    for names in layers if layerwise else [list(step)]:
        V = np.stack([samples[client] * flat(d, names) for client, d in moved.items()])
        expected = 0.5 * 4 / 12 * ga(same_norms(V) if normalise else V, 0.7)
        # SciPy's minimiser stands within 1e-4 of a model's length from the exact one, for f is flat there.
        assert_allclose(flat(step, names), expected, atol=1e-3 * np.abs(expected).max())


@pytest.mark.parametrize("weighting", ["samples", "uniform"])
@pytest.mark.parametrize("rescale", ["none", "1/(1+kappa)"])
def test_without_a_search_it_is_fedavg(
    weighting: str, rescale: str, method_of: Callable, federate: Callable, uneven: Splits
) -> None:
    """kappa = 0 and lengths as they are: to rounding, over both tasks, with clients of 3 to 9 samples."""
    own = (f"federation.weighting={weighting}", "federation.server_lr=0.8", "federation.clients_per_round=3")
    mean = federate(method_of(FedAvg, *own, splits=uneven)).weights
    close(federate(method_of(FedOMG, *own, splits=uneven, rescale=rescale, **PLAIN)).weights, mean)


@pytest.mark.parametrize("normalise", [False, True])
@pytest.mark.parametrize("layerwise", [False, True])
@pytest.mark.parametrize("solver", ["exact", "descent"])
def test_equal_displacements_are_taken_as_they_are(
    normalise: bool, layerwise: bool, solver: str, method_of: Callable, stepped: Callable
) -> None:
    """Whatever the clients' samples; (1 + kappa) times as far where nothing is scaled back."""
    for rescale, length in (("1/(1+kappa)", 1.0), ("none", 1.5), ("1/(1+kappa^2)", 1.2)):
        method = method_of(FedOMG, rescale=rescale, normalise=normalise, layerwise=layerwise, solver=solver)
        moved = displacements(method, 1)[0]
        step = stepped(method, dict.fromkeys(range(3), moved), {0: 2, 1: 7, 2: 1})
        close(step, {name: length * displacement for name, displacement in moved.items()}, 1e-6)


def test_one_client_is_taken_as_it_is(method_of: Callable, stepped: Callable) -> None:
    method = method_of(FedOMG)
    moved = displacements(method, 1)
    close(stepped(method, moved, {0: 6}), moved[0], 1e-6)


@pytest.mark.parametrize("layerwise", [False, True])
def test_the_names_of_clients_do_not_matter(layerwise: bool, method_of: Callable, stepped: Callable) -> None:
    method = method_of(FedOMG, layerwise=layerwise)
    moved, samples = displacements(method, 5), {0: 2, 1: 5, 2: 1, 3: 4, 4: 4}
    order = [3, 0, 4, 2, 1]
    step = flat(stepped(method, moved, samples))
    renamed = {new: moved[old] for new, old in enumerate(order)}
    other = flat(stepped(method, renamed, {new: samples[old] for new, old in enumerate(order)}))
    arrived = flat(stepped(method, {client: moved[client] for client in order}, samples))
    assert_allclose(other, step, atol=1e-4 * np.abs(step).max())
    assert_allclose(arrived, step, atol=1e-6 * np.abs(step).max())


def test_from_kappa_1_on_no_client_is_opposed(method_of: Callable, stepped: Callable) -> None:
    """A large update points against two small ones, which FedAvg's sum overrules."""
    moved = displacements(method_of(FedOMG), 3, common=0)
    moved[2] = {name: 5 * d - 1.5 * moved[0][name] - 1.5 * moved[1][name] for name, d in moved[2].items()}
    products = {}
    for kind, settings in ((FedAvg, {}), (FedOMG, {"kappa": 1.0, "normalise": False})):
        step = flat(stepped(method_of(kind, **settings), moved))
        products[kind] = [step @ flat(d) / np.linalg.norm(step) / np.linalg.norm(flat(d)) for d in moved.values()]
    assert min(products[FedAvg]) < -0.05
    assert min(products[FedOMG]) > -1e-3


@pytest.mark.parametrize("normalise", [False, True])
def test_clients_that_did_not_move_do_no_harm(normalise: bool, method_of: Callable, stepped: Callable) -> None:
    method = method_of(FedOMG, normalise=normalise)
    moved = displacements(method, 3)
    still = {name: torch.zeros_like(d) for name, d in moved[0].items()}
    assert all(np.isfinite(flat(stepped(method, moved | {1: still}))))
    assert not flat(stepped(method, dict.fromkeys(range(3), still))).any()


# Late replies


def test_a_late_reply_counts_as_in_fedavg_where_nothing_is_searched(method_of: Callable, stepped: Callable) -> None:
    moved, samples, late = displacements(method_of(FedAvg), 3), {0: 2, 1: 5, 2: 3}, {1: 0.5}
    mean = stepped(method_of(FedAvg), moved, samples, late)
    close(stepped(method_of(FedOMG, **PLAIN), moved, samples, late), mean, 1e-7)


@pytest.mark.parametrize("normalise", [False, True])
def test_a_late_reply_counts_less(normalise: bool, method_of: Callable, stepped: Callable) -> None:
    """Of three ways of one length that have next to nothing in common, the late one is followed less than in time."""
    method = method_of(FedOMG, normalise=normalise)
    moved = displacements(method, 3, common=0)
    moved = {client: {name: d / (1 + client) for name, d in way.items()} for client, way in moved.items()}
    along = []
    for late in ({}, {1: 0.5}):
        step = flat(stepped(method, moved, late=late))
        along.append(step @ flat(moved[1]) / np.linalg.norm(step))
    assert along[1] < 0.9 * along[0]


def test_late_replies_of_a_schedule_are_heard_when_they_are_due(
    monkeypatch: pytest.MonkeyPatch, method_of: Callable, federate: Callable, uneven: Splits
) -> None:
    """Client 1's of the first round comes in the third; where nothing is searched it counts as FedAvg has it."""
    monkeypatch.setattr(faults, "draw_delay", lambda run, task, round, client, draw: 2 * ((round, client) == (0, 1)))
    own = ("federation.faults.late=0.5", "federation.rounds=3")
    mean = federate(method_of(FedAvg, *own, splits=uneven), 1).weights
    found, dropped = (
        federate(method_of(FedOMG, *own, f"federation.faults.late_weight={kind}", splits=uneven, **PLAIN), 1).weights
        for kind in ("age", "drop")
    )
    close(found, mean)
    assert np.abs(flat(dropped) - flat(found)).max() > 1e-3


# The engine


def test_the_server_asks_for_each_update(experiment_of: Callable, uneven: Splits, tmp_path: Path) -> None:
    """It says so in the ledger; what else is sent is summed, and nothing is kept."""
    overrides = ("model.backbone=resnet18", "federation.clients_per_round=2")
    experiment_of(*overrides, method="fedomg", splits=uneven).run(tmp_path / "run")
    ledger = pl.read_parquet(tmp_path / "run" / "ledger.parquet")
    up = ledger.filter(pl.col("direction") == "up")
    assert set(up.select("part", "least").rows()) == {("update", "each"), ("statistics", "sum"), ("weight", "sum")}
    assert set(ledger["direction"]) == {"up", "down"}
    assert set(up.group_by("task", "round").agg(pl.col("client").n_unique())["client"]) == {2}


def test_running_statistics_are_averaged_as_they_are(method_of: Callable, federate: Callable, uneven: Splits) -> None:
    overrides = ("model.backbone=resnet18", "federation.rounds=1")
    mean, found = (federate(method_of(kind, *overrides, splits=uneven), 1).weights for kind in (FedAvg, FedOMG))
    for name in mean:
        assert torch.equal(mean[name], found[name]) == ("running" in name or "num_batches" in name)


def test_a_client_a_round_is_fedavg(method_of: Callable, federate: Callable, uneven: Splits) -> None:
    own = ("federation.clients_per_round=1", "federation.rounds=4")
    mean, found = (federate(method_of(kind, *own, splits=uneven)).weights for kind in (FedAvg, FedOMG))
    close(found, mean)


@pytest.mark.parametrize("setting", ["solver_rounds=20", "solver_lr=3", "solver_momentum=0.1", "solver_step_size=7"])
def test_steps_of_the_search_need_the_search_by_steps(setting: str, params_of: Callable) -> None:
    name = setting.partition("=")[0]
    with pytest.raises(UserError, match=rf"methods\.fedomg: {name} needs solver: descent\."):
        params_of(f"methods.fedomg.{setting}")
    params_of(f"methods.fedomg.{setting}", "methods.fedomg.solver=descent")


def test_settings_of_the_search_by_steps_reach_it(method_of: Callable, stepped: Callable) -> None:
    moved = displacements(method_of(FedOMG), 4)
    few, many, exact = (
        stepped(method_of(FedOMG, **settings), moved)
        for settings in (
            {"solver": "descent", "solver_rounds": 1, "solver_lr": 0.1},
            {"solver": "descent", "solver_rounds": 2000, "solver_lr": 1.0, "solver_step_size": 2000},
            {},
        )
    )
    gaps = [np.abs(flat(step) - flat(exact)).max() / np.abs(flat(exact)).max() for step in (few, many)]
    assert gaps[1] < 0.01 < gaps[0]
