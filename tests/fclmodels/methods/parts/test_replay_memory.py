"""Memories of samples: what is in them, whose they are, and that nothing of them is on the way."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pytest
import torch
from torch import Tensor

from fclmodels.data.batches import Batch
from fclmodels.data.splits.split_reader import Rows, Splits
from fclmodels.federation.client import Client
from fclmodels.federation.engine.listener import Listener
from fclmodels.federation.exchange import Answer
from fclmodels.federation.messages import Payload
from fclmodels.methods.agem import Agem
from fclmodels.methods.er import Er
from fclmodels.methods.fedavg import FedAvg
from fclmodels.methods.parts.replay_memory import Replay, pack_samples, select_samples, unpack_samples

METHODS = {"er": Er, "agem": Agem}
# Client 0 has a single sample a task, client 1 misses a task, client 2 joins at the third.
UNEVEN = {(0, 0): 1, (1, 0): 1, (2, 0): 1, (0, 1): 9, (2, 1): 5, (2, 2): 7, (3, 2): 4, (1, 3): 6, (0, 3): 3, (3, 0): 1}
HARD = (
    "model.backbone=resnet18",
    "augment.crop_padding=1",
    "augment.flip=true",
    "optimizer.momentum=0.9",
    "federation.clients_per_round=2",
    "federation.checkpoint_seconds=0",
)
PIXELS = 36


class Recording(Er):
    """Keeps what each client remembers after each task."""

    def store_samples(self, client: Client, payload: Payload) -> Answer:
        answer = super().store_samples(client, payload)
        assert not answer.tensors
        self.memories = {**getattr(self, "memories", {}), (client.task, client.index): answer.memory}
        return answer


@pytest.fixture
def uneven(splits_of: Callable[..., Splits]) -> Splits:
    return splits_of(tasks=4, train=UNEVEN)


def samples_of(batch: Batch) -> set[tuple[Any, ...]]:
    columns = (batch.inputs.flatten(1).tolist(), batch.labels.tolist(), batch.tasks.tolist())
    return {(tuple(pixels), label, task) for pixels, label, task in zip(*columns, strict=True)}


@pytest.mark.parametrize("budget", [1, 6, 1000])
def test_a_memory_holds_the_clients_own_samples_of_the_tasks_that_it_had(
    budget: int, method_of: Callable, federate: Callable, uneven: Splits
) -> None:
    method = method_of(Recording, "federation.rounds=1", "federation.clients_per_round=1", splits=uneven, memory=budget)
    federate(method)
    assert method.memories.keys() == UNEVEN.keys()
    for (task, client), memory in method.memories.items():
        had = [t for t in range(task + 1) if (t, client) in UNEVEN]
        own = Batch.concatenate([method.run.batches.read_raw(uneven.select_rows(t, "train", client)) for t in had])
        assert memory["seen"] == len(own.labels) == sum(UNEVEN[t, client] for t in had)
        batch = unpack_samples(memory)
        assert batch is not None
        assert len(samples_of(batch)) == len(batch.labels) == min(budget, memory["seen"])
        assert samples_of(batch) <= samples_of(own)
        assert batch.labels.dtype == batch.tasks.dtype == torch.int64


def test_a_selection_counts_what_is_kept_and_then_what_comes(method_of: Callable, client_of: Callable) -> None:
    method = method_of(Er)
    batches, first, second = method.run.batches, method.select_rows(0, 0), method.select_rows(1, 0)
    client = client_of(method, 0, 1, memory=pack_samples(batches.read_raw(first.take(np.arange(3)))))
    expected = batches.read_raw(Rows.concatenate([first.take(np.array([0, 2])), second.take(np.array([1, 4]))]))
    got = select_samples(client, torch.tensor([0, 2, 4, 7]))
    assert all(torch.equal(getattr(got, name), getattr(expected, name)) for name in ("inputs", "labels", "tasks"))


def test_what_else_a_client_remembers_stays(method_of: Callable, client_of: Callable) -> None:
    method, statistics = method_of(Er), {"mean": torch.ones(2)}
    memory = method.store_samples(client_of(method, 0, memory={"personal": statistics}), {}).memory
    assert memory["personal"] is statistics


def test_old_tasks_stay_in_a_memory_that_is_full(method_of: Callable, federate: Callable) -> None:
    method = method_of(Recording, "federation.rounds=1", memory=6)
    federate(method)
    tasks = torch.cat([method.memories[1, client]["samples"]["tasks"] for client in range(4)])
    assert 4 < int((tasks == 0).sum()) < 20  # of 24, 12 expected, with a spread of 2 (hypergeometric)


def test_memories_differ_by_seed_and_repeat_with_it(method_of: Callable, client_of: Callable) -> None:
    def remembered(seed: int, client: int = 0) -> Batch:
        method = method_of(Er, seed=seed, memory=3)
        batch = unpack_samples(method.store_samples(client_of(method, client), {}).memory)
        assert batch is not None
        return batch

    assert torch.equal(remembered(0).inputs, remembered(0).inputs)
    draws = [tuple(sorted(samples_of(remembered(seed)))) for seed in range(6)]
    assert len(set(draws)) > 3


@pytest.mark.parametrize("kind", METHODS.values(), ids=METHODS)
@pytest.mark.parametrize("head", ["growing", "per-task"])
def test_a_client_that_remembers_nothing_trains_as_in_fedavg(
    kind: type, head: str, method_of: Callable, client_of: Callable, splits_of: Callable
) -> None:
    """To the bit, weight decay included; the old tasks' own heads stay where they are."""
    updates = []
    for cls in (kind, FedAvg):
        method = method_of(cls, "optimizer.weight_decay=0.1", splits=splits_of(head=head))
        server = method.start_task(method.start_task(method.create_server(), 0), 1)
        answer = method.train(client_of(method, 2, 1), method.make_payload(server))
        assert answer.memory == {}
        updates.append(answer.tensors["update"])
    mine, fedavgs = updates
    assert all(torch.equal(mine[name], fedavgs[name]) for name in fedavgs)
    others = mine.keys() - fedavgs.keys()
    assert others == ({"heads.0.weight", "heads.0.bias"} if head == "per-task" else set())
    assert not any(mine[name].any() for name in others)


def replay_of(method: Any, client: Client) -> Replay:
    server = method.start_task(method.create_server(), 0)
    replay = method.prepare_training(client, method.make_payload(server)).find_added(Replay)
    assert replay is not None
    return replay


def test_a_draw_has_a_batchs_size_and_no_sample_twice(method_of: Callable, client_of: Callable) -> None:
    """Each stored sample is drawn as often as another: 8 samples, 400 draws of 4, 200 expected, spread 10."""
    method = method_of(Er, "federation.batch_size=4", memory=8)
    everything = method.run.batches.read_raw(method.select_rows(0, 0))
    replay = replay_of(method, client_of(method, 0, memory=pack_samples(everything)))
    all_ready = method.run.batches.augment_raw(everything, torch.Generator())
    counts = torch.zeros(8)
    for _ in range(400):
        drawn = replay.draw()
        places = [(all_ready.inputs == one).flatten(1).all(1).nonzero().item() for one in drawn.inputs]
        assert len(set(places)) == 4
        assert drawn.labels.tolist() == everything.labels[places].tolist()
        counts[places] += 1
    assert ((counts - 200).abs() < 50).all()


def test_of_fewer_samples_than_a_batch_all_are_drawn(method_of: Callable, client_of: Callable) -> None:
    method = method_of(Er, "federation.batch_size=32", memory=8)
    everything = method.run.batches.read_raw(method.select_rows(0, 0))
    drawn = replay_of(method, client_of(method, 0, memory=pack_samples(everything))).draw()
    assert samples_of(drawn) == samples_of(method.run.batches.augment_raw(everything, torch.Generator()))


def test_draws_are_keyed_by_round_and_client(method_of: Callable, client_of: Callable) -> None:
    method = method_of(Er, "federation.batch_size=3", "augment.brightness=0.5", memory=8)
    memory = pack_samples(method.run.batches.read_raw(method.select_rows(0, 0)))

    def drawn(client: int, round: int) -> Tensor:
        replay = replay_of(method, client_of(method, client, round=round, memory=memory))
        return replay.draw().inputs.sum((1, 2, 3))

    assert torch.equal(drawn(0, 0), drawn(0, 0))
    assert not torch.equal(drawn(0, 0), drawn(0, 1))
    assert not torch.equal(drawn(0, 0), drawn(1, 0))


@pytest.mark.parametrize("method", METHODS)
def test_only_the_model_travels_and_what_is_kept_is_counted(
    method: str, experiment_of: Callable, uneven: Splits, tmp_path: Path
) -> None:
    settings = (f"methods.{method}.memory=8", "federation.clients_per_round=2")
    experiment_of(*settings, method=method, splits=uneven).run(tmp_path / "run")
    ledger = pl.read_parquet(tmp_path / "run" / "ledger.parquet")
    assert set(ledger.filter(pl.col("direction") == "up")["part"]) == {"update", "weight"}
    assert set(ledger.filter(pl.col("direction") == "down")["part"]) == {"weights"}
    assert set(ledger.filter(pl.col("direction") != "kept")["round"]) == {0, 1}
    kept = ledger.filter((pl.col("direction") == "kept") & (pl.col("round") < 0))
    assert {(row["task"], row["client"]) for row in kept.iter_rows(named=True)} == UNEVEN.keys()
    for row in kept.iter_rows(named=True):
        seen = sum(n for (task, client), n in UNEVEN.items() if client == row["client"] and task <= row["task"])
        content = min(8, seen) * (PIXELS + 4 + 2)
        assert content < row["bytes"] < content + 1000  # the file has a header


@pytest.mark.slow
@pytest.mark.parametrize("method", ["er", "agem"])
def test_memories_follow_their_clients_wherever_they_run(
    method: str, experiment_of: Callable, uneven: Splits, remains: Callable, tmp_path: Path
) -> None:
    """Two workers, two clients a round, and statistics that the same memories hold."""
    settings = (*HARD, f"methods.{method}.memory=6", f"methods.{method}.batch_norm=local")
    workers = ("federation.executor=processes", "federation.workers=2")
    for name, where in (("serial", ()), ("workers", workers)):
        experiment_of(*settings, *where, method=method, splits=uneven).run(tmp_path / name)
    assert remains(tmp_path / "serial") == remains(tmp_path / "workers")


class Stop(Listener):
    """Ends a run in the middle of a round."""

    def on_client_done(self, task: int, round: int, done: int, of: int) -> None:
        if (task, round, done) == (2, 1, 1):
            raise KeyboardInterrupt


@pytest.mark.slow
@pytest.mark.parametrize("method", METHODS)
def test_memories_outlive_an_interruption(
    method: str, experiment_of: Callable, uneven: Splits, remains: Callable, tmp_path: Path
) -> None:
    settings = (*HARD, f"methods.{method}.memory=6")
    home = tmp_path / "home"
    with (
        pytest.raises(KeyboardInterrupt),
        experiment_of(*settings, method=method, splits=uneven, home=home, listener=Stop()) as experiment,
    ):
        experiment.run(tmp_path / "resumed")
    experiment_of(*settings, method=method, splits=uneven, home=home).run(tmp_path / "resumed")
    experiment_of(*settings, method=method, splits=uneven).run(tmp_path / "whole")
    assert remains(tmp_path / "resumed") == remains(tmp_path / "whole")


@pytest.mark.parametrize(("kind", "share"), [(Er, 0.6), (Agem, 0.9)])
def test_old_tasks_are_forgotten_less(
    kind: type, share: float, method_of: Callable, federate: Callable, splits_of: Callable[..., Splits]
) -> None:
    """Loss of earlier tasks' train rows at the end, as a share of FedAvg's; 12 samples a client."""
    losses = []
    for cls, settings in ((FedAvg, {}), (kind, {"memory": 12})):
        method = method_of(cls, "federation.rounds=15", splits=splits_of(tasks=3), **settings)
        server = federate(method)
        network = method.networks.load(server.spec, server.weights).eval()
        rows = Rows.concatenate([method.select_rows(task, client) for task in (0, 1) for client in range(4)])
        (batch,) = method.run.batches.iterate_ordered(rows, 1000)
        features = network.backbone(batch.inputs)
        losses.append(method.compute_cross_entropy_by_task(network, features, batch.labels, batch.tasks).item())
    assert losses[1] < share * losses[0]


def test_each_task_adds_samples_of_its_own(method_of: Callable, splits_of: Callable, federate: Callable) -> None:
    """FOT, F.4: one sample a client and task. What is stored stays."""
    method = method_of(Recording, splits=splits_of(tasks=3), memory=2, memory_of="each-task")
    federate(method)
    stored = [unpack_samples(method.memories[task, 1]) for task in range(3)]
    assert [samples.tasks.tolist() for samples in stored] == [[0, 0], [0, 0, 1, 1], [0, 0, 1, 1, 2, 2]]
    assert torch.equal(stored[2].inputs[:4], stored[1].inputs)
