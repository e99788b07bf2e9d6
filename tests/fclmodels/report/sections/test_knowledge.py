"""Used shares and prototypes of runs: known answers, and independent computations."""

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import polars as pl
import pytest
import torch
from sklearn.decomposition import PCA

from fclmodels.errors import UserError
from fclmodels.report.read_runs import Group, read_run
from fclmodels.report.sections.knowledge import draw_prototypes, load_prototypes, load_used_shares, project_to_plane
from fclmodels.storage import trees
from fclmodels.storage.digests import digest_file
from fclmodels.storage.sealed_json import read_sealed, write_sealed
from fclmodels.tables import MONITORS


def test_bases_tell_what_the_monitor_of_used_space_saw(experiment_of: Callable, tmp_path: Path) -> None:
    experiment_of("monitors.used_share=true", method="fot").run(tmp_path / "fot")
    monitored = load_used_shares(read_run(tmp_path / "fot"))
    experiment_of(method="fot").run(tmp_path / "not monitored")
    from_bases = load_used_shares(read_run(tmp_path / "not monitored"))
    assert monitored["task"].unique().to_list() == [0, 1]
    assert monitored["value"].min() > 0
    columns = ["task", "layer", "value"]
    assert from_bases.select(columns).sort("task", "layer").rows() == [
        (task, layer, pytest.approx(value))
        for task, layer, value in monitored.select(columns).sort("task", "layer").rows()
    ]


def test_knowledge_that_was_changed_is_refused(experiment_of: Callable, tmp_path: Path) -> None:
    experiment_of(method="fot").run(tmp_path / "fot")
    file = tmp_path / "fot" / "knowledge" / "task-01.safetensors"
    whole = file.read_bytes()
    file.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
    run = read_run(tmp_path / "fot")
    for look in (load_used_shares, load_prototypes):
        with pytest.raises(UserError, match=r"task-01\.safetensors does not match its digest"):
            look(run)


def test_a_run_whose_server_knows_nothing_has_neither(experiment_of: Callable, tmp_path: Path) -> None:
    experiment_of().run(tmp_path / "fedavg")
    run = read_run(tmp_path / "fedavg")
    assert load_used_shares(run).is_empty()
    assert draw_prototypes([Group("fedavg", (run,))]) == []


@pytest.mark.parametrize("head", ["growing", "per-task"])
def test_the_nearest_prototypes_of_a_run_are_the_weights_of_its_head(
    head: str, experiment_of: Callable, tmp_path: Path
) -> None:
    experiment_of(f"model.head={head}", method="nearest-prototype").run(tmp_path / "run")
    run = read_run(tmp_path / "run")
    weights = trees.load(tmp_path / "run" / "model" / "weights.safetensors")
    heads = [weights[name] for name in sorted(weights) if name.startswith("heads.") and name.endswith("weight")]
    prototypes = load_prototypes(run)
    assert [(of.task, of.label) for of in prototypes] == [(0, 0), (0, 1), (1, 2), (1, 3)]
    np.testing.assert_allclose(np.stack([of.mu for of in prototypes]), torch.cat(heads), rtol=1e-5, atol=1e-6)
    (plane,) = draw_prototypes([Group("mine", (run,))])
    assert [(spot.label, spot.text) for spot in plane.spots[2:]] == [
        ("2", "task 2, class 2"),
        ("3", "task 2, class 3"),
    ]
    assert (plane.title, plane.runs) == ("mine, seed 0", (run.folder,))


def test_prototypes_of_each_task_are_those_that_its_clients_were_sent(experiment_of: Callable, tmp_path: Path) -> None:
    experiment_of(method="pip-dualp").run(tmp_path / "run")
    prototypes = load_prototypes(read_run(tmp_path / "run"))
    assert [(of.task, of.label) for of in prototypes] == [(0, 0), (0, 1), (1, 2), (1, 3)]
    last = trees.load(tmp_path / "run" / "knowledge" / "task-01.safetensors")["prototypes"]
    np.testing.assert_array_equal(np.stack([of.mu for of in prototypes[2:]]), last["mu"])
    np.testing.assert_array_equal(np.stack([of.sigma2 for of in prototypes[2:]]), last["sigma2"])
    file = tmp_path / "run" / "knowledge" / "task-00.safetensors"
    knowledge_tree = trees.load(file)
    knowledge_tree["prototypes"]["known"][1] = False  # nobody has told of it
    trees.save(knowledge_tree, file)
    result = read_sealed(tmp_path / "run" / "result.json")
    result["files"]["knowledge/task-00.safetensors"] = digest_file(file)
    write_sealed(tmp_path / "run" / "result.json", result)
    assert [(of.task, of.label) for of in load_prototypes(read_run(tmp_path / "run"))] == [(0, 0), (1, 2), (1, 3)]


def test_knowledge_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    file = tmp_path / "knowledge" / "task-00.safetensors"
    trees.save({"bases": {"fc": torch.eye(4)[:, :1]}, "ranks": {"fc": [1]}}, file)
    run: Any = SimpleNamespace(folder=tmp_path, monitors=pl.DataFrame(schema=MONITORS))
    assert load_used_shares(run)["value"].to_list() == [0.25, 0.25]  # of the layer, and in the mean
    groups = {"conv[0]": torch.eye(4)[:, :1], "conv[1]": torch.eye(4)[:, :3]}  # of one layer
    trees.save({"bases": groups, "ranks": {"conv[0]": [1], "conv[1]": [3]}}, file)
    assert load_used_shares(run).select("layer", "value").rows() == [("conv", 0.5), (None, 0.5)]
    file.write_bytes(file.read_bytes()[:50])
    with pytest.raises(UserError, match=r"task-00\.safetensors cannot be read"):
        load_used_shares(run)


@pytest.mark.parametrize(
    ("knowledge", "read"),
    [
        ({"ranks": {"fc": [1]}}, load_used_shares),
        ({"ranks": {"fc": [1]}, "bases": {"fc": 3}}, load_used_shares),
        ({"prototypes": {"mu": torch.ones(2, 3)}}, load_prototypes),
        ({"prototypes": 7}, load_prototypes),
        ({"told": {"heads.0": {"sum": torch.ones(2)}}}, load_prototypes),
    ],
)
def test_knowledge_that_does_not_fit_is_named(knowledge: dict, read: Callable, tmp_path: Path) -> None:
    trees.save(knowledge, tmp_path / "knowledge" / "task-00.safetensors")
    run: Any = SimpleNamespace(folder=tmp_path, monitors=pl.DataFrame(schema=MONITORS))
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
    trees.save({"prototypes": of}, tmp_path / "knowledge" / "task-00.safetensors")
    run: Any = SimpleNamespace(folder=tmp_path, result=SimpleNamespace(seed=0))
    assert len(draw_prototypes([Group("pip", (run,))])) == planes


def test_the_plane_is_that_of_principal_component_analysis() -> None:
    mu = np.random.default_rng(3).normal(size=(9, 6)) * [5, 1, 3, 1, 1, 1]
    places, directions, shares = project_to_plane(mu)
    theirs = PCA(2).fit(mu)
    np.testing.assert_allclose(np.abs(places), np.abs(theirs.transform(mu)), rtol=1e-9)
    np.testing.assert_allclose(shares, theirs.explained_variance_ratio_)
    assert (directions[np.abs(directions).argmax(0), [0, 1]] > 0).all()
    again, *_ = project_to_plane(mu[::-1])
    np.testing.assert_allclose(again[::-1], places, rtol=1e-9)


def test_an_ellipse_is_a_standard_deviation_of_the_features_on_the_plane() -> None:
    random = np.random.default_rng(0)
    mu, sigma = random.normal(size=(5, 4)), np.array([2.0, 0.1, 1.0, 0.5])
    _, directions, _ = project_to_plane(mu)
    features = random.normal(mu[0], sigma, (200_000, 4)) @ directions
    np.testing.assert_allclose(np.sqrt(sigma**2 @ directions**2), features.std(0), rtol=0.01)
