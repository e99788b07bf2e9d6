"""Prototypical coresets: what a client keeps of each class, on which model, and of a class that returns."""

import copy
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fclmodels.data.batches import Batch
from fclmodels.data.splits.split_reader import Splits
from fclmodels.errors import UserError
from fclmodels.federation.client import Client
from fclmodels.federation.exchange import Answer, Memory
from fclmodels.federation.messages import Payload
from fclmodels.federation.server import Server
from fclmodels.methods.parts.coreset_memory import PLACES
from fclmodels.methods.parts.replay_memory import unpack_samples
from fclmodels.methods.stamp import Stamp
from fclmodels.numerics.coreset import mix_styles
from fclmodels.numerics.shares import split_evenly

RULES = tuple(PLACES)
# Client 0 has a single sample a task, client 1 misses a task, client 2 joins at the third.
UNEVEN = {(0, 0): 1, (1, 0): 1, (2, 0): 1, (0, 1): 9, (2, 1): 5, (2, 2): 7, (3, 2): 4, (1, 3): 6, (0, 3): 3, (3, 0): 1}


class Recording(Stamp):
    """Keeps what each client answered and remembers after each task, and the model that it was asked about."""

    def store_coreset(self, client: Client, payload: Payload) -> Answer:
        answer = super().store_coreset(client, payload)
        assert not answer.tensors
        self.memories = {**getattr(self, "memories", {}), (client.task, client.index): answer.memory}
        self.asked = {**getattr(self, "asked", {}), client.task: payload["weights"].tensors}
        return answer


def samples(memory: Memory) -> Batch:
    batch = unpack_samples(memory)
    assert batch is not None
    return batch


def of_class(batch: Batch, label: int) -> Batch:
    return batch.take(batch.labels.eq(label).nonzero().flatten())


def rows_of(batch: Batch) -> list[tuple[Any, ...]]:
    columns = (batch.inputs.flatten(1).tolist(), batch.labels.tolist(), batch.tasks.tolist())
    return sorted((tuple(pixels), label, task) for pixels, label, task in zip(*columns, strict=True))


def embedded(method: Any, server: Server, raw: Batch) -> np.ndarray:
    """Features of samples by a multi-layer perceptron written out here, on (pixels / 255 - 0.5) / 0.25."""
    x = (raw.inputs.double().numpy().reshape(len(raw.labels), -1) / 255 - 0.5) / 0.25
    for layer in ("fc1", "fc2", "fc3"):
        weight, bias = (server.weights[f"backbone.{layer}.{part}"].double().numpy() for part in ("weight", "bias"))
        x = np.maximum(x @ weight.T + bias, 0)
    return x


def after_task(method: Any, task: int) -> Server:
    server = method.create_server()
    for earlier in range(task + 1):
        server = method.start_task(server, earlier)
    return server


def answered(method: Any, client: Client) -> Memory:
    return method.store_coreset(client, method.make_payload(after_task(method, client.task))).memory


@pytest.mark.parametrize("selection", RULES)
@pytest.mark.parametrize("budget", [1, 2, 1000])
def test_a_memory_holds_so_many_of_each_class_that_the_client_had(
    selection: str, budget: int, method_of: Callable, federate: Callable, splits_of: Callable[..., Splits]
) -> None:
    """Its own samples, with the tasks that they were of, whoever took part in the rounds."""
    few, splits = ("federation.rounds=1", "federation.clients_per_round=1"), splits_of(tasks=4, train=UNEVEN)
    method = method_of(Recording, *few, splits=splits, budget=budget, selection=selection)
    federate(method)
    assert method.memories.keys() == UNEVEN.keys()
    for (task, client), memory in method.memories.items():
        had = [t for t in range(task + 1) if (t, client) in UNEVEN]
        own = Batch.concatenate([method.run.batches.read_raw(splits.select_rows(t, "train", client)) for t in had])
        kept = samples(memory)
        counts = {str(label): int((own.labels == label).sum()) for label in own.labels.unique().tolist()}
        assert memory["seen"] == counts
        assert {label: int((kept.labels == int(label)).sum()) for label in counts} == {
            label: min(budget, n) for label, n in counts.items()
        }
        assert len(set(rows_of(kept))) == len(kept.labels) == sum(min(budget, n) for n in counts.values())
        assert set(rows_of(kept)) <= set(rows_of(own))


@pytest.mark.parametrize("selection", ["herding", "random"])
def test_herding_keeps_samples_around_the_mean_embedding(
    selection: str, method_of: Callable, client_of: Callable
) -> None:
    """One by one by brute force, on the model after the task as it is in evaluation, of images as they are."""
    altered = ("model.dropout=[0.5, 0.5]", "augment.flip=true", "augment.brightness=0.9")
    method = method_of(Stamp, *altered, budget=3, selection=selection)
    client, server = client_of(method, 1, 1), after_task(method, 1)
    memory = answered(method, client)
    everything = method.run.batches.read_raw(client.rows)
    same = []
    for label in (2, 3):
        own = of_class(everything, label)
        X = embedded(method, server, own)
        chosen: list[int] = []
        for _ in range(3):
            free = [i for i in range(len(X)) if i not in chosen]
            chosen.append(min(free, key=lambda i: np.linalg.norm(X[[*chosen, i]].mean(0) - X.mean(0))))
        kept = of_class(samples(memory), label)
        same.append(torch.equal(kept.inputs, own.inputs[chosen]))
    assert all(same) == (selection == "herding")


def remembered(method: Any, federate: Callable) -> list[Memory]:
    """What client 0 remembers after each task."""
    federate(method)
    return [method.memories[task, 0] for task in range(len(method.run.splits.tasks))]


@pytest.mark.parametrize("selection", RULES)
def test_tasks_that_have_a_class_share_its_budget(
    selection: str, method_of: Callable, federate: Callable, splits_of: Callable[..., Splits]
) -> None:
    """Of 4 of each of two classes a task: a budget of 6 holds 4, then 3 and 3, then 2 of each; then the last two more.

    A task keeps the samples that it selected first, as they are.
    """
    splits = splits_of(tasks=4, same_classes=True)
    memories = remembered(method_of(Recording, splits=splits, budget=6, selection=selection), federate)
    for task, (memory, counts) in enumerate(zip(memories, ([4], [3, 3], [2, 2, 2], [1, 1, 2, 2]), strict=True)):
        kept = samples(memory)
        assert memory["seen"] == {"0": 4 * (task + 1), "1": 4 * (task + 1)}
        for label in (0, 1):
            of_label = of_class(kept, label)
            assert of_label.tasks.tolist() == [t for t, count in enumerate(counts) for _ in range(count)]
            for earlier in range(task):
                before, now = (
                    of_class(samples(of), label).inputs[of_class(samples(of), label).tasks == earlier]
                    for of in (memories[task - 1], memory)
                )
                assert torch.equal(now, before[: len(now)])


@given(needs=st.lists(st.integers(0, 9), min_size=1, max_size=6), budget=st.integers(0, 30))
def test_a_budget_is_split_as_evenly_as_needs_allow(needs: list[int], budget: int) -> None:
    """Nothing that is needed is left over; who gets less than another by more than one has all that it needs."""
    shares = split_evenly(budget, needs)
    assert sum(shares) == min(budget, sum(needs))
    assert all(0 <= share <= need for share, need in zip(shares, needs, strict=True))
    assert all(share >= max(shares) - 1 for share, need in zip(shares, needs, strict=True) if share < need)


def test_a_class_that_comes_again_fills_its_budget_and_then_is_restyled(
    method_of: Callable, federate: Callable, splits_of: Callable[..., Splits]
) -> None:
    """4 of each of two classes a task; a budget of 6 takes in 4, then 2, then none, and what was full is mixed."""
    splits = splits_of(tasks=4, same_classes=True)
    memories = remembered(method_of(Recording, splits=splits, budget=6, returning="restyle"), federate)
    for task, memory in enumerate(memories):
        kept = samples(memory)
        assert memory["seen"] == {"0": 4 * (task + 1), "1": 4 * (task + 1)}
        for label in (0, 1):
            tasks = of_class(kept, label).tasks.tolist()
            assert tasks == [0] * 4 + [1] * (2 if task else 0)
    second, third, fourth = (rows_of(samples(memory)) for memory in memories[1:])
    assert set(rows_of(samples(memories[0]))) < set(second)
    assert len({*second} & {*third}) < len(second)
    assert len({*third} & {*fourth}) < len(third)


@pytest.mark.parametrize("mix", [0.0, 0.3, 1.0])
def test_a_full_class_takes_on_the_style_of_what_is_chosen(
    mix: float, method_of: Callable, client_of: Callable, splits_of: Callable[..., Splits]
) -> None:
    """Herding with what is stored in the mean chooses the partners; two of three stored have one."""
    splits = splits_of(same_classes=True, train={(0, 0): 6, (1, 0): 4})
    method = method_of(Stamp, splits=splits, budget=3, returning="restyle", mix=mix)
    before = answered(method, client_of(method, 0))
    client = client_of(method, 0, 1, memory=before)
    kept, new = samples(answered(method, client)), method.run.batches.read_raw(client.rows)
    for label in (0, 1):
        old, own = of_class(samples(before), label), of_class(new, label)
        H, X = (embedded(method, after_task(method, 1), batch) for batch in (old, own))
        target = (3 * H.mean(0) + X.sum(0)) / 5
        first = min((0, 1), key=lambda i: np.linalg.norm((H.sum(0) + X[i]) / 4 - target))
        partners = own.inputs[[first, 1 - first]]
        expected = torch.cat([mix_styles(old.inputs[:2], partners, mix), old.inputs[2:]])
        got = of_class(kept, label)
        assert torch.equal(got.inputs, expected)
        assert torch.equal(got.inputs, old.inputs) == (mix == 1)
        assert got.tasks.tolist() == [0, 0, 0]


def test_what_else_a_client_remembers_stays_and_is_used(method_of: Callable, client_of: Callable) -> None:
    """Its own running statistics: with other ones the embeddings are others, and so is what is selected."""
    method = method_of(Stamp, "model.backbone=resnet18", batch_norm="local", budget=1)
    server = after_task(method, 0)
    names = [name for name in server.weights if name.endswith(("running_mean", "running_var"))]
    selected = set()
    for seed in range(6):
        random = torch.Generator().manual_seed(seed)
        statistics = {name: torch.rand(server.weights[name].shape, generator=random).square() for name in names}
        memory = answered(method, client_of(method, 0, memory={"personal": statistics}))
        assert memory["personal"] is statistics
        selected.add(str(rows_of(samples(memory))))
    assert len(selected) > 1


def test_choices_repeat_and_only_random_ones_differ_by_seed(method_of: Callable, client_of: Callable) -> None:
    def kept(selection: str, seed: int = 0) -> list[Any]:
        method = method_of(Stamp, selection=selection, budget=2, seed=seed)
        rng = torch.get_rng_state()
        server = after_task(method_of(Stamp), 0)  # the same model for every seed
        memory = method.store_coreset(client_of(method, 0), method.make_payload(server)).memory
        assert torch.equal(torch.get_rng_state(), rng)
        return rows_of(samples(memory))

    for selection in ("herding", "random"):
        assert kept(selection) == kept(selection)
        draws = {str(kept(selection, seed)) for seed in range(6)}
        assert len(draws) > 2 if selection == "random" else len(draws) == 1


def test_no_sample_leaves_its_client(experiment_of: Callable, splits_of: Callable, tmp_path: Path) -> None:
    """The model travels and nothing else; what is kept is within the budget of each class."""
    splits = splits_of(tasks=4, train=UNEVEN)
    few = ("federation.clients_per_round=2", "methods.stamp.budget=2")
    experiment_of(*few, method="stamp", splits=splits).run(tmp_path / "run")
    ledger = pl.read_parquet(tmp_path / "run" / "ledger.parquet")
    up, down, kept = (ledger.filter(pl.col("direction") == way) for way in ("up", "down", "kept"))
    assert set(up["part"]) == {"update", "weight"}
    assert set(down["part"]) == {"weights"}
    assert set(up["round"]) == {0, 1}
    asked = kept.filter(pl.col("round") < 0)
    assert {(row["task"], row["client"]) for row in asked.iter_rows(named=True)} == UNEVEN.keys()
    for row in asked.iter_rows(named=True):
        had = [n for (task, client), n in UNEVEN.items() if client == row["client"] and task <= row["task"]]
        stored = sum(min(2, -(-n // 2)) + min(2, n // 2) for n in had)
        content = stored * (36 + 4 + 2)
        assert content < row["bytes"] < content + 1500  # the file has a header


def test_texts_are_refused(method_of: Callable, splits_of: Callable[..., Splits]) -> None:
    method = method_of(Stamp)
    texts = copy.copy(splits_of())
    texts.shape = (2, 20)
    with pytest.raises(UserError, match=r"^methods\.stamp mixes styles of images, these samples are texts\. Use er or"):
        Stamp(method.settings, replace(method.run, splits=texts))
