"""Who is sampled, in which order they begin, what they see and what they may keep."""

from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from fclmodels.data.splits.split_reader import Splits
from fclmodels.errors import UserError
from fclmodels.federation.client import Client
from fclmodels.federation.engine.rounds import sample_clients
from fclmodels.federation.exchange import TRAIN, Answer
from fclmodels.federation.executors.auto_choice import measure_seconds_a_batch
from fclmodels.federation.executors.base import Job, sort_largest_first
from fclmodels.federation.executors.client_work import Serial
from fclmodels.federation.messages import Part, Payload
from fclmodels.federation.server import Server
from fclmodels.federation.training.local_training import LocalTraining
from fclmodels.methods.fedavg import FedAvg
from fclmodels.storage import trees

MISSING = {(task, client): 1 + client % 4 for task in (0, 1) for client in range(12) if (client + task) % 3}


@pytest.fixture
def sampling(method_of: Callable, splits_of: Callable[..., Splits]) -> Callable[..., FedAvg]:
    """FedAvg that samples so many of twelve clients, of which eight have data of a task."""
    splits = splits_of(clients=12, train=MISSING)
    return lambda number, seed=0: method_of(FedAvg, f"federation.clients_per_round={number}", splits=splits, seed=seed)


def able(task: int) -> list[int]:
    return sorted(client for t, client in MISSING if t == task)


def sample(method: FedAvg, task: int, round: int) -> tuple[int, ...]:
    return sample_clients(method, Server(method.run.make_spec(task + 1), {}, task), round)


def test_all_that_have_the_tasks_data_take_part_unless_fewer_are_wanted(sampling: Callable[..., FedAvg]) -> None:
    for number in ("null", 8, 12):
        for task in (0, 1):
            assert sorted(sample(sampling(number), task, 3)) == able(task)


def test_some_are_sampled_among_those_without_repeats(sampling: Callable[..., FedAvg]) -> None:
    for task in (0, 1):
        for number in range(50):
            chosen = sample(sampling(5), task, number)
            assert len(set(chosen)) == len(chosen) == 5
            assert set(chosen) <= set(able(task))


def test_the_sample_follows_seed_task_and_round_alone(sampling: Callable[..., FedAvg]) -> None:
    samples = [[sample(sampling(3, seed), t, r) for t in (0, 1) for r in range(20)] for seed in (0, 0, 1)]
    assert samples[0] == samples[1] != samples[2]
    assert samples[0][:20] != samples[0][20:]
    assert len(set(samples[0][:20])) > 10


def test_everyone_is_sampled_equally_often(sampling: Callable[..., FedAvg]) -> None:
    method = sampling(4)
    counts = Counter(client for number in range(1000) for client in sample(method, 0, number))
    assert set(counts) == set(able(0))
    assert all(abs(count - 500) < 5 * 250**0.5 for count in counts.values())


def test_those_with_most_rows_begin_first_and_ties_go_by_id(sampling: Callable[..., FedAvg]) -> None:
    """The order decides the tree along which answers are summed, so it may not depend on how clients were listed."""
    method = sampling(4)
    order = sort_largest_first(method, 0, able(0))
    assert order == sort_largest_first(method, 0, able(0)[::-1])
    sizes = [MISSING[0, client] for client in order]
    assert sizes == sorted(sizes, reverse=True)
    assert order == tuple(sorted(able(0), key=lambda client: (-MISSING[0, client], client)))


class Forgetful(FedAvg):
    """Client 0 keeps nothing, 1 what it had, 2 something new, 3 forgets all."""

    def train(self, client: Client, payload: Payload) -> Answer:
        answer = super().train(client, payload)
        memories = [{}, answer.memory, {**answer.memory, "new": torch.ones(1)}, {}]
        return answer._replace(memory=memories[client.index])


def test_a_memory_is_written_only_where_it_has_changed(method_of: Callable, tmp_path: Path) -> None:
    method = method_of(Forgetful)
    memories = {}
    for client in (1, 2, 3):
        memories[client] = tmp_path / f"old-{client}"
        trees.save({"old": torch.zeros(1)}, memories[client])
    before = {client: file.read_bytes() for client, file in memories.items()}
    job = Job(TRAIN, 0, 0, method.make_payload(method.start_task(method.create_server(), 0)), tmp_path / "scratch")
    answers = {answer.client: answer.memory for answer in Serial(method, 1).run(job, range(4), memories)}
    assert answers[0] is None
    assert answers[1] == memories[1]
    assert set(trees.load(answers[2])) == {"old", "new"}
    assert answers[3] is None
    assert {client: file.read_bytes() for client, file in memories.items()} == before
    assert len(list((tmp_path / "scratch").iterdir())) == 1


def test_a_client_sees_its_own_rows_and_no_others(
    client_of: Callable, method_of: Callable, splits_of: Callable[..., Splits]
) -> None:
    splits = splits_of(val=2)
    client = client_of(method_of(splits=splits), 2, 1)
    assert client.rows.samples.tolist() == splits.select_rows(1, "train", 2).samples.tolist()
    assert client.val.samples.tolist() == splits.select_rows(1, "val", 2).samples.tolist()
    assert set(client.rows.clients) == set(client.val.clients) == {2}


def moved(part: Part, device: torch.device | str) -> Part:
    """As Part.to, but with new numbers: `meta` has none to give back."""
    return replace(
        part, tensors={name: torch.empty_like(tensor, device=device) for name, tensor in part.tensors.items()}
    )


def test_clients_compute_on_the_device_and_answer_on_the_cpu(
    method_of: Callable, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`meta` stands in for a GPU: it too refuses to be mixed with the CPU. Only the batches are left out."""
    meta, plain, seen = torch.device("meta"), method_of(), []
    method = FedAvg(plain.settings, replace(plain.run, device=meta))

    def trained(training: LocalTraining) -> float:
        seen.append({parameter.device for parameter in training.parameters.values()})
        return 0.0

    monkeypatch.setattr(LocalTraining, "run", trained)
    monkeypatch.setattr(Part, "to", moved)
    server = method.start_task(method.create_server(), 0)
    assert {w.device.type for w in server.weights.values()} == {"cpu"}
    (answer,) = Serial(method, 1).run(Job(TRAIN, 0, 0, method.make_payload(server), tmp_path), [0], {})
    assert {tensor.device.type for part in answer.reply.parts.values() for tensor in part.tensors.values()} == {"cpu"}
    measure_seconds_a_batch(method, 0, 1)
    assert seen == [{meta}] * 3


@pytest.mark.parametrize("lr", ["1e30", "1e4"])
def test_training_that_diverges_is_refused_not_published(lr: str, experiment_of: Callable, tmp_path: Path) -> None:
    """A NaN model would answer class 0 to everything, and so forget nothing."""
    with pytest.raises(UserError, match=r"task 0, round \d+: training diverged .*optimizer\.lr") as error:
        experiment_of(f"optimizer.lr={lr}", "federation.rounds=30").run(tmp_path / "run")
    assert "\n" not in str(error.value)
    assert not (tmp_path / "run").exists()
