"""GPM+FL: each client's memory against GPM written out in NumPy, and nothing of it on the way."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pytest
import torch
from numpy.testing import assert_allclose

from fclmodels.data.splits.split_reader import Splits
from fclmodels.federation.client import Client
from fclmodels.federation.exchange import Answer
from fclmodels.federation.messages import Payload
from fclmodels.federation.server import Server
from fclmodels.methods.gpm import Gpm

MLP = ("model.backbone=mlp", "model.hidden=24")
HARD = ("optimizer.momentum=0.9", "optimizer.weight_decay=0.05", "federation.local_epochs=2")
LAYERS = ("fc1", "fc2", "fc3")
# Client 1 misses the second task, client 2 the first; client 3 has a single sample of each.
MISSING = {(0, 0): 8, (0, 1): 5, (1, 0): 6, (1, 2): 9, (2, 1): 7, (2, 2): 8, (0, 3): 1, (1, 3): 1, (2, 3): 1}


class Recording(Gpm):
    """Keeps what each client remembers after each task."""

    def extend_bases(self, client: Client, payload: Payload) -> Answer:
        answer = super().extend_bases(client, payload)
        assert not answer.tensors
        self.memories = {**getattr(self, "memories", {}), (client.task, client.index): answer.memory}
        return answer


def inputs_of(splits: Splits, server: Server, task: int, client: int) -> dict[str, np.ndarray]:
    """What the layers see of a client's images on the server's model: columns [d, n]."""
    rows = splits.select_rows(task, "train", client)
    x = (splits.images[torch.from_numpy(rows.samples)].double().numpy() / 255 - 0.5) / 0.25
    seen, x = {}, x.reshape(len(x), -1).T
    for layer in LAYERS:
        seen[f"backbone.{layer}"] = x
        weight, bias = (server.weights[f"backbone.{layer}.{part}"].double().numpy() for part in ("weight", "bias"))
        x = np.maximum(weight @ x + bias[:, None], 0)
    return seen


def gpm(M: np.ndarray, R: np.ndarray, threshold: float) -> np.ndarray:
    """GPM's Algorithm 1 for one layer: the fewest left singular vectors of the residual that lift what is covered
    of ||R||^2 to the threshold, after those that are there."""
    hat = R - M @ (M.T @ R)
    U, sigma, _ = np.linalg.svd(hat, full_matrices=False)
    covered, taken = (R**2).sum() - (hat**2).sum(), 0
    while covered < threshold * (R**2).sum() * (1 - 1e-9):
        covered, taken = covered + sigma[taken] ** 2, taken + 1
    return np.concatenate([M, U[:, :taken]], axis=1)


def test_memories_are_those_of_gpm(method_of: Callable, after_each_task: Callable, splits_of: Callable) -> None:
    splits = splits_of(tasks=3, train=MISSING)
    method = method_of(Recording, *MLP, *HARD, splits=splits, threshold=0.5, threshold_step=0.2)
    servers = after_each_task(method)
    memories: dict[tuple[int, str], np.ndarray] = {}
    for task, client in sorted(MISSING):
        bases = method.memories[task, client]["bases"]
        for name, R in inputs_of(splits, servers[task], task, client).items():
            M = memories.get((client, name), np.zeros((len(R), 0)))
            memories[client, name] = expected = gpm(M, R, 0.5 + 0.2 * task)
            assert bases[name].shape == expected.shape
            assert_allclose(bases[name].double() @ bases[name].double().T, expected @ expected.T, atol=2e-4)
    assert 0 < memories[0, "backbone.fc1"].shape[1] < 36
    assert all(not server.knowledge for server in servers)


def test_a_clients_steps_stay_clear_of_its_own_memory_only(
    method_of: Callable, client_of: Callable, after_each_task: Callable
) -> None:
    method = method_of(Recording, *MLP, *HARD, threshold=0.9)
    server = method.start_task(after_each_task(method)[0], 1)
    memories = [method.memories[0, index]["bases"] for index in (0, 1)]
    updates = []
    for memory in ({"bases": memories[0]}, {}):  # one that was there in the first task, and one that was not
        answer = method.train(client_of(method, 0, 1, memory=memory), method.make_payload(server))
        assert answer.memory == memory
        updates.append(answer.tensors["update"])
    for layer in LAYERS:
        name, weight = f"backbone.{layer}", server.weights[f"backbone.{layer}.weight"]
        own, others = ((updates[0][f"{name}.weight"] @ memory[name]).norm() for memory in memories)
        assert float(own) < 1e-5 * float(weight.norm())
        assert float(others) > 1e-3 * float(weight.norm())
        assert float((updates[1][f"{name}.weight"] @ memories[0][name]).norm()) > 1e-3 * float(weight.norm())


def test_only_the_model_travels(experiment_of: Callable, splits_of: Callable, tmp_path: Path) -> None:
    experiment_of(*MLP, method="gpm", splits=splits_of(tasks=3, train=MISSING)).run(tmp_path / "run")
    ledger = pl.read_parquet(tmp_path / "run" / "ledger.parquet")
    moved = ledger.filter(pl.col("direction") != "kept")
    assert set(moved["part"]) == {"weights", "update", "weight"}
    assert set(moved.filter(pl.col("round") < 0)["part"]) == {"weights"}
    kept = ledger.filter((pl.col("direction") == "kept") & (pl.col("client") == 0))["bytes"].to_list()
    assert kept == sorted(kept)
    assert kept[-1] > 0


def test_at_most_so_many_images_are_looked_at(method_of: Callable, federate: Callable) -> None:
    """All of their patches: as many directions at most as images where a layer sees one column each."""
    method = method_of(Recording, *MLP, threshold=1.0, samples=3)
    federate(method, 1)
    assert all(basis.shape[1] <= 3 for m in method.memories.values() for basis in m["bases"].values())
    assert any(basis.shape[1] == 3 for m in method.memories.values() for basis in m["bases"].values())


@pytest.mark.parametrize("backbone", ["cnn", "resnet18"])
def test_convolutions_too(backbone: str, method_of: Callable, client_of: Callable, federate: Callable) -> None:
    overrides: tuple[Any, ...] = (f"model.backbone={backbone}", *HARD, "federation.rounds=1")
    method = method_of(Recording, *overrides, threshold=0.9)
    server = method.start_task(federate(method, 1), 1)
    memory = method.memories[0, 0]
    update = method.train(client_of(method, 0, 1, memory=memory), method.make_payload(server)).tensors["update"]
    layers = method.subspace.list_layers(method.networks.load(server.spec, server.weights))
    assert memory["bases"].keys() == layers.keys()
    for name, layer in layers.items():
        inside = layer.to_matrix(update[layer.weight]) @ memory["bases"][name]
        assert float(inside.norm()) < 2e-5 * float(server.weights[layer.weight].norm())


def test_advice_tells_that_no_used_share_can_be_shown(method_of: Callable) -> None:
    assert method_of(Gpm).list_advice() == []
    (line,) = method_of(Gpm, "monitors.used_share=true").list_advice()
    assert line.startswith("monitors.used_share: gpm's bases stay with its clients")
