"""What the methods with bases have to say of them, and that all of them live with few clients and few samples."""

from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

import pytest
import torch

from fclmodels.methods.fedprotip import FedProTIP
from fclmodels.methods.fot import Fot
from fclmodels.methods.gpm import Gpm
from fclmodels.storage import trees

# Client 0 has a single sample a task, client 1 misses a task, client 2 joins at the third; the last task is one sample.
UNEVEN = {(0, 0): 1, (1, 0): 6, (2, 0): 5, (0, 1): 9, (2, 1): 5, (2, 2): 7, (3, 2): 1}
VARIANTS = {
    "gpm": ("gpm", ()),
    "fot": ("fot", ()),
    "fot-paper": ("fot", ("profile=paper",)),
    "fot-release": ("fot", ("profile=release",)),
    "fedprotip": ("fedprotip", ()),
    "fedprotip-paper": ("fedprotip", ("profile=paper",)),
    "fedprotip-release": ("fedprotip", ("profile=release",)),
    "fedprotip-sketch": ("fedprotip", ("exchange=sketch", "sketch_width=5", "tip_reference=mean", "tip_later=zero")),
    "fedprotip-global": ("fedprotip", ("projection=global", "tip_voters=1")),
    "fedprotip-t": ("fedprotip", ("tip=false",)),
}


def knowledge(**ranks: list[int]) -> dict[str, dict]:
    """Of layers with 200 inputs each, that hold so many directions after each task."""
    return {"bases": {name: torch.eye(200)[:, : of[-1]] for name, of in ranks.items()}, "ranks": ranks}


@pytest.mark.parametrize(
    ("ranks", "found"),
    [
        ({"a": [10, 20], "b": [10, 20], "c": [10, 20]}, None),
        ({"a": [200, 200], "b": [10, 197], "c": [10, 20]}, None),
        ({"a": [10, 200], "b": [10, 198], "c": [10, 20]}, "after task 2 the bases fill 2 of 3 protected layers"),
        ({"a": [200, 200], "b": [199, 199], "c": [10, 200]}, "after task 1 the bases fill 2 of 3 protected layers"),
    ],
)
def test_bases_that_fill_most_layers_are_told_of(
    ranks: dict[str, list[int]], found: str | None, method_of: Callable
) -> None:
    """With the first task that it is true after, and the setting that would help."""
    remarks = method_of(Fot, threshold=0.9).list_remarks(knowledge(**ranks))
    assert (remarks == []) == (found is None)
    assert all(line.startswith(f"{found}: ") and "methods.fot.threshold (0.9)" in line for line in remarks)


def test_a_run_that_keeps_every_direction_says_so(method_of: Callable, federate: Callable) -> None:
    method = method_of(FedProTIP, threshold=1.0, samples=None, patches=100_000, threshold_by="fixed", budget=1.0)
    (line,) = method.list_remarks(federate(method, 2).knowledge)
    assert "nothing more is learned" in line


@pytest.mark.parametrize("kind", [Fot, FedProTIP, Gpm])
def test_a_task_fills_no_more_than_its_budget_of_what_is_free(
    kind: type, method_of: Callable, after_each_task: Callable, splits_of: Callable
) -> None:
    """Though a threshold of 1 asks for every direction. The default leaves room in the smallest layers."""
    assert kind is Gpm or kind.Settings().budget == 0.25
    settings = {} if kind is Gpm else {"threshold_by": "fixed"}
    splits = splits_of(tasks=3, train=40, shape=(1, 8, 8))
    method = method_of(
        kind, "model.backbone=cnn", splits=splits, threshold=1.0, threshold_step=0.0, budget=0.25, **settings
    )
    taken: list[tuple[int, int, torch.Tensor]] = []
    limit = method.subspace.limit_rank
    method.subspace.limit_rank = lambda rank, basis: taken.append((rank, limit(rank, basis), basis)) or taken[-1][1]
    servers = after_each_task(method)
    assert any(asked > given for asked, given, _ in taken)
    assert all(given <= -(-(basis.shape[0] - basis.shape[1]) // 4) for _, given, basis in taken)
    for server in servers if kind is not Gpm else ():
        for name, ranks in server.knowledge["ranks"].items():
            d = server.knowledge["bases"][name].shape[0]
            assert all(after - before <= -(-(d - before) // 4) for before, after in pairwise([0, *ranks]))
            assert ranks[-1] < d


def test_bases_that_stay_with_clients_are_not_spoken_of(method_of: Callable, federate: Callable) -> None:
    method = method_of(Gpm, threshold=1.0)
    assert method.list_remarks(federate(method, 2).knowledge) == []


@pytest.mark.parametrize("variant", VARIANTS)
def test_few_clients_a_round_missed_tasks_and_single_samples(
    variant: str, experiment_of: Callable, splits_of: Callable, tmp_path: Path
) -> None:
    method, settings = VARIANTS[variant]
    experiment = experiment_of(
        *("model.backbone=cnn", "federation.clients_per_round=2", "optimizer.momentum=0.9"),
        *(f"methods.{method}.{one}" for one in settings),
        method=method,
        splits=splits_of(tasks=4, train=UNEVEN),
    )
    assert all(0 <= reading["acc"] <= 1 for reading in experiment.run(tmp_path / "run")["metrics"].values())
    for file in sorted((tmp_path / "run" / "knowledge").glob("*")):
        for basis in trees.load(file)["bases"].values():
            torch.testing.assert_close(basis.T @ basis, torch.eye(basis.shape[1]), atol=1e-5, rtol=0)
