"""What the page draws of knowledge, and marks on a plane: known answers, and independent computations."""

import itertools
import math
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import polars as pl
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from sklearn.decomposition import PCA

from fclmodels import state
from fclmodels.errors import UserError
from fclmodels.report import read_run
from fclmodels.report.charts import BOTTOM, LEFT, RIGHT, TOP
from fclmodels.report.knowledge import principal_plane, prototypes, prototypes_of, used_shares
from fclmodels.report.planes import MOST_TICKS, Spot, against_cost, like_a_map, log_ticks
from fclmodels.report.runs import TABLES, Group
from fclmodels.sealed import digest_of_file, read_sealed

# knowledge of real runs


def test_bases_tell_what_the_monitor_of_used_space_saw(experiment_of: Callable, tmp_path: Path) -> None:
    experiment_of("monitors.used_share=true", method="fot").run(tmp_path / "fot")
    seen = used_shares(read_run(tmp_path / "fot"))
    experiment_of(method="fot").run(tmp_path / "not monitored")
    found = used_shares(read_run(tmp_path / "not monitored"))
    assert seen["task"].unique().to_list() == [0, 1]
    assert seen["value"].min() > 0
    columns = ["task", "layer", "value"]
    assert found.select(columns).sort("task", "layer").rows() == [
        (task, layer, pytest.approx(value)) for task, layer, value in seen.select(columns).sort("task", "layer").rows()
    ]


def test_knowledge_that_was_changed_is_refused(experiment_of: Callable, tmp_path: Path) -> None:
    experiment_of(method="fot").run(tmp_path / "fot")
    file = tmp_path / "fot" / "knowledge" / "task-01.safetensors"
    whole = file.read_bytes()
    file.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
    run = read_run(tmp_path / "fot")
    for look in (used_shares, prototypes_of):
        with pytest.raises(UserError, match=r"task-01\.safetensors does not match its digest"):
            look(run)


def test_a_run_whose_server_knows_nothing_has_neither(experiment_of: Callable, tmp_path: Path) -> None:
    experiment_of().run(tmp_path / "fedavg")
    run = read_run(tmp_path / "fedavg")
    assert used_shares(run).is_empty()
    assert prototypes([Group("fedavg", (run,))]) == []


@pytest.mark.parametrize("head", ["growing", "per-task"])
def test_the_nearest_prototypes_of_a_run_are_the_weights_of_its_head(
    head: str, experiment_of: Callable, tmp_path: Path
) -> None:
    experiment_of(f"model.head={head}", method="nearest-prototype").run(tmp_path / "run")
    run = read_run(tmp_path / "run")
    weights = state.load(tmp_path / "run" / "model" / "weights.safetensors")
    heads = [weights[name] for name in sorted(weights) if name.startswith("heads.") and name.endswith("weight")]
    found = prototypes_of(run)
    assert [(of.task, of.label) for of in found] == [(0, 0), (0, 1), (1, 2), (1, 3)]
    np.testing.assert_allclose(np.stack([of.mu for of in found]), torch.cat(heads), rtol=1e-5, atol=1e-6)
    (plane,) = prototypes([Group("mine", (run,))])
    assert [(spot.label, spot.text) for spot in plane.spots[2:]] == [
        ("2", "task 2, class 2"),
        ("3", "task 2, class 3"),
    ]
    assert (plane.title, plane.runs) == ("mine, seed 0", (run.folder,))


def test_prototypes_of_each_task_are_those_that_its_clients_were_sent(experiment_of: Callable, tmp_path: Path) -> None:
    experiment_of(method="pip-dualp").run(tmp_path / "run")
    found = prototypes_of(read_run(tmp_path / "run"))
    assert [(of.task, of.label) for of in found] == [(0, 0), (0, 1), (1, 2), (1, 3)]
    last = state.load(tmp_path / "run" / "knowledge" / "task-01.safetensors")["prototypes"]
    np.testing.assert_array_equal(np.stack([of.mu for of in found[2:]]), last["mu"])
    np.testing.assert_array_equal(np.stack([of.sigma2 for of in found[2:]]), last["sigma2"])
    file = tmp_path / "run" / "knowledge" / "task-00.safetensors"
    known = state.load(file)
    known["prototypes"]["known"][1] = False  # nobody has told of it
    state.save(known, file)
    result = read_sealed(tmp_path / "run" / "result.json")
    result["files"]["knowledge/task-00.safetensors"] = digest_of_file(file)
    state.write_sealed(tmp_path / "run" / "result.json", result)
    assert [(of.task, of.label) for of in prototypes_of(read_run(tmp_path / "run"))] == [(0, 0), (1, 2), (1, 3)]


def test_knowledge_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    file = tmp_path / "knowledge" / "task-00.safetensors"
    state.save({"bases": {"fc": torch.eye(4)[:, :1]}, "ranks": {"fc": [1]}}, file)
    run: Any = SimpleNamespace(folder=tmp_path, monitors=pl.DataFrame(schema=TABLES["monitors"]))
    assert used_shares(run)["value"].to_list() == [0.25, 0.25]  # of the layer, and in the mean
    file.write_bytes(file.read_bytes()[:50])
    with pytest.raises(UserError, match=r"task-00\.safetensors cannot be read"):
        used_shares(run)


@pytest.mark.parametrize(
    ("knowledge", "read"),
    [
        ({"ranks": {"fc": [1]}}, used_shares),
        ({"ranks": {"fc": [1]}, "bases": {"fc": 3}}, used_shares),
        ({"prototypes": {"mu": torch.ones(2, 3)}}, prototypes_of),
        ({"prototypes": 7}, prototypes_of),
        ({"told": {"heads.0": {"sum": torch.ones(2)}}}, prototypes_of),
    ],
)
def test_knowledge_that_does_not_fit_is_named(knowledge: dict, read: Callable, tmp_path: Path) -> None:
    state.save(knowledge, tmp_path / "knowledge" / "task-00.safetensors")
    run: Any = SimpleNamespace(folder=tmp_path, monitors=pl.DataFrame(schema=TABLES["monitors"]))
    with pytest.raises(UserError, match=r"task-00\.safetensors holds no knowledge of a run \(.*\)\. Make it again"):
        read(run)


@pytest.mark.parametrize(
    ("mu", "planes"),
    [
        ([[0, 0], [1, 0], [0, 1]], 1),
        ([[0, 0], [1, 1], [2, 2]], 0),
        ([[0, 0], [0, 1]], 0),
        ([[0, 0], [1, 0], [0, np.nan]], 0),
    ],
    ids=["plane", "line", "two", "diverged"],
)
def test_what_lies_on_no_plane_is_not_drawn(mu: list[list[float]], planes: int, tmp_path: Path) -> None:
    of: dict[str, Any] = {"mu": torch.tensor(mu, dtype=torch.float64), "labels": torch.arange(len(mu))}
    of |= {"sigma2": of["mu"] * 0, "known": of["labels"] >= 0}
    state.save({"prototypes": of}, tmp_path / "knowledge" / "task-00.safetensors")
    run: Any = SimpleNamespace(folder=tmp_path, result=SimpleNamespace(seed=0))
    assert len(prototypes([Group("pip", (run,))])) == planes


# the plane of prototypes


def test_the_plane_is_that_of_principal_component_analysis() -> None:
    mu = np.random.default_rng(3).normal(size=(9, 6)) * [5, 1, 3, 1, 1, 1]
    places, directions, shares = principal_plane(mu)
    theirs = PCA(2).fit(mu)
    np.testing.assert_allclose(np.abs(places), np.abs(theirs.transform(mu)), rtol=1e-9)
    np.testing.assert_allclose(shares, theirs.explained_variance_ratio_)
    assert (directions[np.abs(directions).argmax(0), [0, 1]] > 0).all()
    again, *_ = principal_plane(mu[::-1])
    np.testing.assert_allclose(again[::-1], places, rtol=1e-9)


def test_an_ellipse_is_a_standard_deviation_of_the_features_on_the_plane() -> None:
    random = np.random.default_rng(0)
    mu, sigma = random.normal(size=(5, 4)), np.array([2.0, 0.1, 1.0, 0.5])
    _, directions, _ = principal_plane(mu)
    drawn = random.normal(mu[0], sigma, (200_000, 4)) @ directions
    np.testing.assert_allclose(np.sqrt(sigma**2 @ directions**2), drawn.std(0), rtol=0.01)


def test_a_map_keeps_angles_and_holds_all_ellipses() -> None:
    spots = [Spot(0, "", 0.0, 0.0, around=(1.0, 2.0)), Spot(1, "", 10.0, 1.0, around=(0.5, 0.5)), Spot(2, "", 0.0, 5.0)]
    plane = like_a_map("t", spots, "x", "y", [])
    first, second, third = plane.spots
    unit = (second.x - first.x) / 10
    assert (third.y - first.y) / 5 == pytest.approx(-unit, abs=0.05)
    assert first.around == pytest.approx((unit, 2 * unit), abs=0.1)
    for spot in plane.spots:
        rx, ry = spot.around or (0, 0)
        assert LEFT - 0.2 <= spot.x - rx < spot.x + rx <= RIGHT + 0.2 or not rx
        assert TOP - 0.2 <= spot.y - ry <= spot.y + ry <= BOTTOM + 0.2


# against cost


@given(st.floats(1e-3, 1e12), st.floats(1, 1e9))
def test_logarithmic_ticks_are_few_and_hold_what_is_drawn(low: float, ratio: float) -> None:
    found = log_ticks(low, low * ratio)
    assert 2 <= len(found) <= MOST_TICKS + 1
    assert found[0] > 0
    assert found[0] <= low
    assert found[-1] >= low * ratio
    assert all(a < b for a, b in itertools.pairwise(found))


def test_known_logarithmic_ticks() -> None:
    assert log_ticks(1.5, 40) == [1, 2, 5, 10, 20, 50]
    assert log_ticks(2, 900) == [1, 10, 100, 1000]
    assert log_ticks(20e6, 22e6) == pytest.approx([19e6, 20e6, 21e6, 22e6, 23e6, 24e6])


def test_ten_times_the_cost_is_as_far_wherever_it_starts() -> None:
    spots = [Spot(0, "", 10.0, 50.0, near=((10.0, 40.0), (100.0, 60.0))), Spot(1, "", 1000.0, 50.0)]
    plane = against_cost("t", spots, "x", "{:g}".format, [])
    first, last = plane.spots
    (_, low), (middle, high) = first.near
    assert middle - first.x == pytest.approx(last.x - middle, abs=0.2)
    assert low > first.y > high
    ticks = {text: x for x, text in plane.x_ticks}
    assert first.x == pytest.approx(ticks["10"], abs=0.1)
    width = math.log10(1000 / 10) / math.log10(float(plane.x_ticks[-1][1]) / float(plane.x_ticks[0][1]))
    assert last.x - first.x == pytest.approx(width * (RIGHT - LEFT), abs=0.2)
