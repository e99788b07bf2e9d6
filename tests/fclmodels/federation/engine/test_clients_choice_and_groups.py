"""Clients that a method chooses, sums among some of them, payloads of their own, and exchanges before a task."""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import polars as pl
import pytest
import torch

from fclmodels.data.splits.split_reader import Splits
from fclmodels.errors import UserError
from fclmodels.experiment.experiment import Experiment
from fclmodels.federation.client import Client
from fclmodels.federation.engine import replies as replies_module
from fclmodels.federation.engine.checkpoints import Checkpoints
from fclmodels.federation.engine.cohort import Cohort
from fclmodels.federation.engine.ledger import Ledger
from fclmodels.federation.engine.replies import Replies
from fclmodels.federation.engine.rounds import sample_clients
from fclmodels.federation.exchange import Answer, Exchange
from fclmodels.federation.executors.base import Job
from fclmodels.federation.executors.client_work import Serial
from fclmodels.federation.messages import Part, Reply, make_outline
from fclmodels.methods.fedavg import FedAvg
from fclmodels.numerics.robust_means import robust_mean
from fclmodels.plugins import find
from fclmodels.storage import trees

SIZES = {(task, client): 6 + 2 * client for task in range(2) for client in range(4) if (task, client) != (1, 0)}


@pytest.fixture(scope="module")
def splits(splits_of: Callable[..., Splits]) -> Splits:
    return splits_of(train=SIZES)


def run_toy(name: str, experiment: Experiment, folder: Path) -> pl.DataFrame:
    """Run it; its ledger."""
    experiment.run(folder)
    return pl.read_parquet(folder / "ledger.parquet")


# A method's own choice.


def test_clients_take_turns(
    toys: Path, experiment_of: Callable[..., Experiment], splits: Splits, tmp_path: Path
) -> None:
    few = ("federation.clients_per_round=2", "federation.rounds=4")
    ledger = run_toy("rota", experiment_of(*few, method="rota", splits=splits), tmp_path / "run")
    rounds = ledger.filter(direction="up", part="update")
    turns = rounds.filter(task=0).group_by("client").len()
    assert turns["len"].to_list() == [2] * 4
    second = rounds.filter(task=1).group_by("client").len()
    assert sorted(second["client"]) == [1, 2, 3]
    assert second["len"].max() - second["len"].min() <= 1


@pytest.mark.parametrize("clients", [[], [0, 0], [0, 9], [3, 1, 1]])
def test_a_choice_of_nobody_of_strangers_or_of_one_twice_is_a_mistake(
    clients: list[int], method_of: Callable[..., Any]
) -> None:
    class Chooser(FedAvg):
        name = "chooser"

        def choose_clients(self, *_: object) -> list[int]:
            return clients

    method = method_of(Chooser, "federation.clients_per_round=2")
    with pytest.raises(ValueError, match="chooser must choose each client of a round once"):
        sample_clients(method, method.start_task(method.create_server(), 0), 0)


def test_without_a_choice_of_its_own_clients_are_drawn_uniformly(method_of: Callable[..., Any]) -> None:
    method = method_of(FedAvg, "federation.clients_per_round=2")
    server = method.start_task(method.create_server(), 0)
    rounds = [sample_clients(method, server, round) for round in range(300)]
    assert all(len({*clients}) == 2 for clients in rounds)
    share = [sum(client in clients for clients in rounds) / 300 for client in range(4)]
    assert all(abs(of - 0.5) < 0.1 for of in share)
    assert rounds[:5] == [sample_clients(method, server, round) for round in range(5)]


# Sums among clients.


def group_replies(tmp_path: Path, clients: int, rule: Any = None, least: Any = "group") -> tuple[Replies, torch.Tensor]:
    X = torch.randn(clients, 3, generator=torch.Generator().manual_seed(0))
    replies = Replies(range(clients), tmp_path, rule)
    for client in range(clients):
        weight = {"weight": torch.tensor(float(client + 1), dtype=torch.float64)}
        parts = {
            "update": Part("update", {"x": (client + 1) * X[client]}, least, over="weight"),
            "weight": Part("count", weight, least),
        }
        replies.add(client, Reply(parts))
    return replies, X


@pytest.mark.parametrize("clients", [5, 70])
def test_a_sum_among_clients_is_theirs_alone(clients: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where replies and partial sums are in the spool, and with several groups one after another."""
    monkeypatch.setattr(replies_module, "IN_MEMORY", 0)
    replies, X = group_replies(tmp_path, clients)
    groups = [range(0, clients, 2), range(1, clients, 2), [3], range(clients)]
    sums = [replies.sum_among("update", members)["x"] for members in groups]
    for members, total in zip(groups, sums, strict=True):
        expected = sum((client + 1) * X[client] for client in members)
        torch.testing.assert_close(total, expected, rtol=1e-4, atol=1e-4)
        weight = replies.sum_among("weight", members)["weight"].item()
        assert weight == sum(client + 1 for client in members)


def test_all_of_them_are_the_sum_to_the_bit(tmp_path: Path) -> None:
    replies, _ = group_replies(tmp_path, 7)
    assert torch.equal(replies.sum_among("update", range(7))["x"], replies.sum("update")["x"])


def test_nobodys_sum_is_zero_and_who_was_dropped_does_not_count(tmp_path: Path) -> None:
    replies, X = group_replies(tmp_path, 4)
    assert not replies.sum_among("update", [8, 9])["x"].any()
    replies.drop(1)
    torch.testing.assert_close(replies.sum_among("update", [0, 1])["x"], X[0])


def test_a_late_reply_counts_less_in_its_group(tmp_path: Path) -> None:
    replies = Replies([0, 1], tmp_path)
    for client, weight in ((0, 1.0), (1, 0.5)):
        replies.add(client, Reply({"x": Part("update", {"x": torch.ones(2)}, "group")}), weight)
    assert replies.sum_among("x", [0, 1])["x"].tolist() == [1.5, 1.5]


def test_under_a_robust_rule_it_is_the_rules_among_them(tmp_path: Path) -> None:
    replies, X = group_replies(tmp_path, 7, partial(robust_mean, "median", 0.2, 1.0))
    members = [1, 3, 5]
    weights = sum(client + 1 for client in members)
    expected = X[members].median(0).values * weights
    torch.testing.assert_close(replies.sum_among("update", members)["x"], expected, rtol=1e-4, atol=1e-4)


def test_what_is_declared_as_a_sum_over_all_is_not_summed_by_group(tmp_path: Path) -> None:
    replies, _ = group_replies(tmp_path, 3, least="sum")
    with pytest.raises(ValueError, match="update is declared as a sum over all clients"):
        replies.sum_among("update", [0])


# Payloads of single clients.


def test_each_group_is_averaged_apart_and_its_clients_download_their_own_model_once(
    toys: Path, experiment_of: Callable[..., Experiment], splits: Splits, tmp_path: Path
) -> None:
    experiment = experiment_of("federation.clients_per_round=3", method="two-groups", splits=splits)
    ledger = run_toy("two-groups", experiment, tmp_path / "run")
    down = ledger.filter(pl.col("direction") == "down", pl.col("round") >= 0)
    assert down.group_by("task", "round", "client").len()["len"].unique().to_list() == [1]
    assert down["part"].unique().to_list() == ["weights"]
    up = ledger.filter(direction="up")
    assert up["least"].unique().to_list() == ["group"]


def test_a_group_of_which_nobody_answers_stays_as_it_is(
    toys: Path, method_of: Callable[..., Any], client_of: Callable[..., Client], tmp_path: Path
) -> None:
    method = method_of(find("method", "two-groups"))
    server = method.start_task(method.create_server(), 0)
    replies = Replies([0, 2], tmp_path)
    for index in (0, 2):
        payload = {**method.make_payload(server), **method.make_own_payload(server, index)}
        replies.add(index, method.exchanges["train"].reply(client_of(method, index), payload)[0])
    groups = method.aggregate(server, replies).knowledge["groups"]
    before = server.knowledge["groups"]
    assert all(torch.equal(groups["odd"][name], before["odd"][name]) for name in groups["odd"])
    alone = method_of(FedAvg)
    expected = alone.aggregate(server, replies)
    assert all(torch.equal(groups["even"][name], expected.weights[name]) for name in groups["even"])


def test_a_client_is_evaluated_with_what_it_alone_is_sent(
    toys: Path, experiment_of: Callable[..., Experiment], splits: Splits, tmp_path: Path
) -> None:
    """Its group's model; the accuracy table has a row for each client of what that model says of its test rows."""
    experiment = experiment_of(method="two-groups", splits=splits)
    experiment.run(tmp_path / "run")
    groups = trees.load(tmp_path / "run" / "knowledge" / "task-01.safetensors")["groups"]
    accuracy = pl.read_parquet(tmp_path / "run" / "accuracy.parquet").filter(after=2, reading="task_agnostic", task=1)
    method = experiment.method
    for client, name in ((1, "odd"), (2, "even")):
        rows = splits.select_test_rows(1, client)
        network = method.networks.load(method.run.make_spec(2), groups[name]).eval()
        (batch,) = method.run.batches.iterate_ordered(rows, len(rows))
        with torch.inference_mode():
            correct = int((network(batch.inputs).argmax(1) == batch.labels).sum())
        assert accuracy.filter(client=client)["correct"].to_list() == [correct]


class Rows(list):
    """A log in memory."""

    def read_rows(self) -> list[dict[str, Any]]:
        return list(self)


def test_what_replaces_a_common_part_is_counted_in_its_place(tmp_path: Path) -> None:
    common = {"model": Part("weights", {"w": torch.zeros(10)}), "all": Part("count", {"n": torch.zeros(1)})}
    own = {2: {"model": Part("weights", {"w": torch.zeros(3)}), "mine": Part("count", {"n": torch.zeros(2)})}}
    ledger = Ledger(log := Rows())
    ledger.note_payload(Job("train", 0, 0, common, tmp_path, own_payloads=own), [1, 2])
    assert [(row["client"], row["part"], row["bytes"]) for row in log] == [
        ([1], "model", 40),
        ([1, 2], "all", 4),
        ([2], "model", 12),
        ([2], "mine", 8),
    ]
    assert ledger.bytes_down == 40 + 2 * 4 + 12 + 8


def test_those_of_a_draw_that_is_called_off_have_downloaded_their_own_too(
    toys: Path, experiment_of: Callable[..., Experiment], splits: Splits, tmp_path: Path
) -> None:
    faults = ("federation.clients_per_round=2", "federation.faults={missing: 0.5, least: 2}")
    experiment = experiment_of(*faults, method="two-groups", splits=splits)
    ledger = run_toy("two-groups", experiment, tmp_path / "run").filter(pl.col("round") >= 0)
    rounds = pl.read_parquet(tmp_path / "run" / "rounds.parquet")
    downloads = ledger.filter(direction="down").group_by("task", "round").len().sort("task", "round")
    assert downloads["len"].to_list() == rounds["clients"].to_list()
    assert rounds["clients"].max() > 2


@pytest.mark.parametrize("toy", ["two-groups", "first-statistics", "beside-network", "block-distiller"])
def test_an_executor_is_chosen_by_a_training_with_all_that_a_client_is_sent(
    toy: str, toys: Path, experiment_of: Callable[..., Experiment], splits: Splits
) -> None:
    experiment = experiment_of("federation.executor=auto", "federation.threads=auto", method=toy, splits=splits)
    assert experiment.choice.executor in ("serial", "processes")


class Letters(FedAvg):
    """Sends each client a letter of its own after a task, and gets it back."""

    name = "letters"
    paper = "none"

    def __init__(self, settings: FedAvg.Settings, run: Any) -> None:
        super().__init__(settings, run)
        form = {"letter": make_outline("count", {"letter": ()}, torch.float64, "each")}
        self.write = self.declare(Exchange("write", lambda: {}, self.send_back, lambda task, round: form))

    def send_back(self, client: Client, payload: Any) -> Answer:
        return Answer({"letter": payload["letter"].tensors}, client.memory)

    def finish_task(self, server: Any, cohort: Any) -> Any:
        letters = {c: {"letter": Part("count", {"letter": torch.tensor(float(c)).double()})} for c in cohort.clients}
        self.letters = {
            c: t["letter"].item() for c, t in cohort.ask(self.write, own_payloads=letters).yield_each("letter")
        }
        return server


def test_a_question_may_bring_each_client_something_of_its_own(
    method_of: Callable[..., Any], splits: Splits, tmp_path: Path
) -> None:
    method = method_of(Letters, splits=splits)
    checkpoints = Checkpoints(tmp_path / "home" / "checkpoints" / "one")
    executor, ledger = Serial(method, 1), Ledger(checkpoints.ledger)
    cohort = Cohort(executor, 1, method.list_participants(1), {}, ledger, checkpoints)
    method.finish_task(method.create_server(), cohort)
    assert method.letters == {1: 1.0, 2: 2.0, 3: 3.0}
    assert (ledger.bytes_down, ledger.bytes_up) == (24, 24)
    checkpoints.close()


# Exchanges before a task, with everyone.


def test_all_clients_of_the_run_answer_before_each_task_also_those_without_its_data(
    toys: Path, experiment_of: Callable[..., Experiment], splits: Splits, tmp_path: Path
) -> None:
    experiment = experiment_of("federation.clients_per_round=2", method="first-statistics", splits=splits)
    ledger = run_toy("first-statistics", experiment, tmp_path / "run")
    before = ledger.filter(part="counts", direction="up")
    assert before.group_by("task").agg(pl.col("round").unique(), pl.col("client").sort()).sort("task").rows() == [
        (task, [-1001], [0, 1, 2, 3]) for task in range(2)
    ]
    knowledge = trees.load(tmp_path / "run" / "knowledge" / "task-01.safetensors")
    assert knowledge["answers"] == 4
    assert knowledge["counts"].tolist() == [0, 0, 15, 15]


def test_a_client_set_aside_is_not_among_everyone(
    toys: Path, experiment_of: Callable[..., Experiment], splits: Splits, tmp_path: Path
) -> None:
    settings = ("methods.every-kind.fault=generator", "federation.inspection.patience=1", "federation.rounds=1")
    ledger = run_toy("every-kind", experiment_of(*settings, method="every-kind", splits=splits), tmp_path / "run")
    assert ledger.filter(task=1, client=1).is_empty()


def test_weights_depend_on_what_clients_have_just_trained(
    toys: Path, method_of: Callable[..., Any], client_of: Callable[..., Client], tmp_path: Path
) -> None:
    method = method_of(find("method", "first-statistics"))
    server = method.start_task(method.create_server(), 0)
    payload, replies, moves, weights = method.make_payload(server), Replies([0, 1], tmp_path), [], []
    for index in (0, 1):
        training = method.prepare_training(client_of(method, index), payload)
        training.run()
        moves.append(training.measure_movement(training.start))
        weights.append(1 + sum(change.double().square().sum() for change in moves[-1].values()).sqrt())
        replies.add(index, method.exchanges["train"].reply(client_of(method, index), payload)[0])
    assert abs(weights[0] - weights[1]) > 1e-6
    after = method.aggregate(server, replies)
    for name, start in server.weights.items():
        mean = sum(move[name] * w for move, w in zip(moves, weights, strict=True)) / sum(weights)
        torch.testing.assert_close(after.weights[name], (start + mean).float(), rtol=1e-5, atol=1e-6)


def test_a_weight_above_the_largest_that_the_method_names_is_refused(
    toys: Path,
    experiment_of: Callable[..., Experiment],
    splits: Splits,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    kind = find("method", "first-statistics")
    monkeypatch.setattr(kind, "bound_client_weight", lambda self, task: 1.0)
    with pytest.raises(UserError, match="needs one number from 1e-09 to 1 in weight"):
        experiment_of(method="first-statistics", splits=splits).run(tmp_path / "run")
