"""A class-balanced memory: how many of each class, which ones, what it weighs, and epochs that it joins."""

from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pytest
import torch
from torch import Tensor

from fclmodels.backbones.model.network import build_network
from fclmodels.data.splits.split_reader import Splits
from fclmodels.federation.client import Client
from fclmodels.methods.fedavg import FedAvg
from fclmodels.methods.parts.exemplar_memory import ExemplarMemory, ExemplarSettings, herd, iterate_joined_epochs
from fclmodels.methods.parts.replay_memory import unpack_samples

SIZES = {(task, client): 12 for task in range(3) for client in range(2)}


@pytest.fixture
def splits(splits_of: Callable[..., Splits]) -> Splits:
    return splits_of(tasks=3, clients=2, train=SIZES)


@pytest.fixture
def client(method_of: Callable[..., FedAvg], client_of: Callable[..., Client], splits: Splits) -> Client:
    return client_of(method_of(splits=splits), 0)


def after_tasks(client: Client, tasks: list[int], **settings: Any) -> dict[str, Any]:
    """What the client remembers after these tasks."""
    memory: dict[str, Any] = {"other": 1}
    for task in tasks:
        rows = client.run.splits.select_rows(task, "train", client.index)
        network = build_network(client.run.make_spec(task + 1), client.run.make_generator("init")).eval()
        now = replace(client, task=task, rows=rows, memory=memory)
        memory = ExemplarMemory(ExemplarSettings(**settings)).add_task(now, network)
    return memory


def counts(memory: dict[str, Any]) -> dict[tuple[int, int], int]:
    samples = unpack_samples(memory)
    assert samples is not None
    return dict(Counter(zip(samples.tasks.tolist(), samples.labels.tolist(), strict=True)))


@pytest.mark.parametrize("selection", ["herding", "random"])
def test_a_total_budget_is_shared_by_all_classes_so_far(selection: str, client: Client) -> None:
    settings = {"exemplars": 7, "selection": selection}
    assert counts(after_tasks(client, [0], **settings)) == {(0, 0): 4, (0, 1): 3}
    memory = after_tasks(client, [0, 1, 2], **settings)
    assert counts(memory) == {(0, 0): 2, (0, 1): 1, (1, 2): 1, (1, 3): 1, (2, 4): 1, (2, 5): 1}
    assert memory["other"] == 1


def test_a_budget_of_each_class_grows_with_them(client: Client) -> None:
    memory = after_tasks(client, [0, 2], exemplars=3, budget="class")
    assert counts(memory) == {(0, 0): 3, (0, 1): 3, (2, 4): 3, (2, 5): 3}


def test_fewer_exemplars_than_classes_are_of_the_first_ones(client: Client) -> None:
    assert counts(after_tasks(client, [0, 1], exemplars=3)) == {(0, 0): 1, (0, 1): 1, (1, 2): 1}


def test_a_class_of_fewer_samples_than_its_share_is_kept_whole(client: Client) -> None:
    assert counts(after_tasks(client, [0], exemplars=100)) == {(0, 0): 6, (0, 1): 6}


def test_a_class_that_comes_again_in_another_task_has_a_share_of_its_own(
    splits_of: Callable[..., Splits], method_of: Callable[..., FedAvg], client_of: Callable[..., Client]
) -> None:
    again = client_of(method_of(splits=splits_of(tasks=2, clients=2, train=12, same_classes=True)), 0)
    assert counts(after_tasks(again, [0, 1], exemplars=8)) == {(0, 0): 2, (0, 1): 2, (1, 0): 2, (1, 1): 2}


@pytest.mark.parametrize("selection", ["herding", "random"])
def test_what_stays_of_a_class_is_what_was_selected_first(selection: str, client: Client) -> None:
    settings = {"exemplars": 8, "selection": selection}
    first, later = (unpack_samples(after_tasks(client, tasks, **settings)) for tasks in ([0], [0, 1]))
    assert first is not None
    assert later is not None
    for label in (0, 1):
        before, after = (samples.inputs[samples.labels == label] for samples in (first, later))
        assert len(after) < len(before)
        assert torch.equal(after, before[: len(after)])


def by_hand(features: np.ndarray, count: int) -> list[int]:
    """Algorithm 4 of iCaRL as it is printed."""
    phi = features / np.linalg.norm(features, axis=1, keepdims=True)
    mu, places = phi.mean(0), []
    for k in range(1, count + 1):
        distances = [
            np.inf if i in places else np.linalg.norm(mu - (phi[i] + phi[places].sum(0)) / k) for i in range(len(phi))
        ]
        places.append(int(np.argmin(distances)))
    return places


@pytest.mark.parametrize("seed", range(5))
def test_herding_is_icarls(seed: int) -> None:
    features = torch.randn(20, 4, generator=torch.Generator().manual_seed(seed)) + 1
    assert herd(features, 8).tolist() == by_hand(features.double().numpy(), 8)


def test_herded_samples_of_a_class_are_those_that_its_features_say(client: Client) -> None:
    network = build_network(client.run.make_spec(1), client.run.make_generator("init")).eval()
    raw = client.run.batches.read_raw(client.rows)
    with torch.no_grad():
        features = network.backbone(client.run.batches.prepare_inputs(raw).inputs)
    of_class = (raw.labels == 1).nonzero().flatten()
    places = of_class[by_hand(features[of_class].double().numpy(), 3)]
    samples = unpack_samples(after_tasks(client, [0], exemplars=6))
    assert samples is not None
    assert torch.equal(samples.inputs[samples.labels == 1], raw.inputs[places])


def test_random_ones_depend_on_the_client_and_the_task_alone(client: Client) -> None:
    settings = {"exemplars": 6, "selection": "random"}
    mine, again = (unpack_samples(after_tasks(client, [0], **settings)) for _ in range(2))
    herded = unpack_samples(after_tasks(client, [0], exemplars=6))
    assert mine is not None
    assert again is not None
    assert herded is not None
    assert torch.equal(mine.inputs, again.inputs)
    assert not torch.equal(mine.inputs, herded.inputs)


def test_the_ledger_counts_their_bytes(
    toys: Path, experiment_of: Callable[..., Any], splits: Splits, tmp_path: Path
) -> None:
    """Of 36 pixels, a label of four bytes and a task of two each, and what the file says of them."""
    sizes = {}
    for exemplars in (6, 12):
        folder = tmp_path / str(exemplars)
        experiment_of(f"methods.exemplars.exemplars={exemplars}", method="exemplars", splits=splits).run(folder)
        ledger = pl.read_parquet(folder / "ledger.parquet").filter(direction="kept", client=0, task=2)
        sizes[exemplars] = ledger["bytes"][-1]
    assert sizes[12] - sizes[6] == pytest.approx(6 * (36 + 4 + 2), abs=16)


def list_samples(epochs: Any) -> list[list[tuple[float, ...]]]:
    """The samples of each epoch, in an order of their own."""
    return [sorted(tuple(x.flatten().tolist()) for batch in epoch for x in batch.inputs) for epoch in epochs]


def test_joined_epochs_have_each_row_and_each_stored_sample_once(
    method_of: Callable[..., FedAvg], client_of: Callable[..., Client], splits: Splits
) -> None:
    method = method_of(FedAvg, "federation.local_epochs=2", splits=splits)
    memory = after_tasks(client_of(method, 0), [0], exemplars=5)
    client, stored = client_of(method, 0, 1, memory=memory), unpack_samples(memory)
    assert stored is not None
    everything = [*rows_of(client), *(tuple(x.flatten().tolist()) for x in prepare(client, stored))]
    assert list_samples(iterate_joined_epochs(client, stored)) == [sorted(everything)] * 2
    sizes = [[len(batch.labels) for batch in epoch] for epoch in iterate_joined_epochs(client, stored)]
    assert sizes == [[4, 4, 4, 4, 1]] * 2
    orders = [torch.cat([batch.labels for batch in epoch]).tolist() for epoch in iterate_joined_epochs(client, stored)]
    assert orders[0] != orders[1]
    assert any(len({*batch.tasks.tolist()}) == 2 for batch in next(iterate_joined_epochs(client, stored)))


def rows_of(client: Client) -> list[tuple[float, ...]]:
    batches = client.run.batches.iterate_ordered(client.rows, 100)
    return [tuple(x.flatten().tolist()) for batch in batches for x in batch.inputs]


def prepare(client: Client, stored: Any) -> Tensor:
    return client.run.batches.prepare_inputs(stored).inputs


def test_without_stored_samples_they_are_the_clients_own_to_the_bit(client: Client) -> None:
    mine, own = (
        [batch.inputs for batch in next(epochs)]
        for epochs in (iterate_joined_epochs(client, None), client.yield_epochs())
    )
    assert all(torch.equal(x, y) for x, y in zip(mine, own, strict=True))


def test_stored_samples_of_a_permuted_task_keep_their_order_of_pixels(
    splits_of: Callable[..., Splits], method_of: Callable[..., FedAvg], client_of: Callable[..., Client]
) -> None:
    method = method_of(splits=splits_of(tasks=2, clients=2, train=8, permuted=True))
    memory = after_tasks(client_of(method, 0, 1), [1], exemplars=4)
    first, stored = client_of(method, 0, 0, memory=memory), unpack_samples(memory)
    assert stored is not None
    of_second = {tuple(x.flatten().tolist()) for x in prepare(first, stored)}
    (epoch,) = iterate_joined_epochs(first, stored)
    assert of_second <= {tuple(x.flatten().tolist()) for batch in epoch for x in batch.inputs}
