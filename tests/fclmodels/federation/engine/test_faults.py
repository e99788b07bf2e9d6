"""Clients that are missing or late: a schedule worked out by hand, weights by age, repeats, and the same bits again."""

import json
from collections import Counter
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import polars as pl
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fclmodels import plugins
from fclmodels.data.splits.split_reader import Splits
from fclmodels.errors import UserError
from fclmodels.experiment.experiment import Experiment
from fclmodels.federation.engine import faults
from fclmodels.federation.engine.checkpoints import Checkpoints
from fclmodels.federation.engine.faults import MOST_DRAWS
from fclmodels.federation.engine.ledger import make_ledger_table, open_ledger
from fclmodels.federation.engine.listener import Listener
from fclmodels.federation.engine.replies import Replies
from fclmodels.federation.engine.rounds import learn, sample_clients
from fclmodels.federation.executors.client_work import Serial
from fclmodels.federation.messages import Least, Part, Reply
from fclmodels.federation.server import Server
from fclmodels.methods.fedavg import FedAvg
from fclmodels.storage import trees
from fclmodels.tables import ROUNDS

MakeExperiment = Callable[..., Experiment]
Remains = Callable[[Path], dict[str, Any]]
ON = "federation.faults.late=0.5"  # any rate: where the draw is a stub, it decides
MODEL = 4 * (36 * 12 + 12 + 2 * (12 * 12 + 12) + 13 * 2)  # bytes: mlp of 36-12-12-12, a head of 2
FATES: dict[tuple[int, int, int], int | None] = {  # (round, client, draw): of all others the answer is in time
    (0, 1, 0): 2,
    (0, 2, 0): None,
    (2, 0, 0): None,
    (2, 2, 0): 1,
    (4, 1, 0): 1,
}


class Learned(NamedTuple):
    server: Server
    rounds: pl.DataFrame
    ledger: pl.DataFrame
    late: dict[int, faults.Late]
    memories: dict[int, Path]

    def column(self, name: str) -> list[int]:
        return self.rounds[name].to_list()

    def ups(self) -> list[tuple[int, int, int | None]]:
        """(round, client, base round) of each update that was sent."""
        sent = self.ledger.filter((pl.col("direction") == "up") & (pl.col("part") == "update"))
        return sent.select("round", "client", "base_round").sort("round", "client").rows()

    def downs(self) -> list[tuple[int, int]]:
        sent = self.ledger.filter((pl.col("direction") == "down") & (pl.col("part") == "weights"))
        return sent.select("round", "client").sort("round", "client").rows()


@pytest.fixture
def learned(tmp_path: Path) -> Callable[[FedAvg], Learned]:
    """The first task, learned by a method."""

    def learn_first(method: FedAvg) -> Learned:
        checkpoints = Checkpoints(tmp_path / f"task-{len(list(tmp_path.iterdir()))}")
        position = learn(
            method,
            method.create_server(),
            {},
            0,
            Serial(method, 1),
            checkpoints,
            open_ledger(method, checkpoints.ledger),
            Listener(),
        )
        tables = pl.DataFrame(checkpoints.rounds.read_rows(), schema=ROUNDS), make_ledger_table(checkpoints.ledger)
        checkpoints.close()
        return Learned(position.server, *tables, position.late, position.memories)

    return learn_first


@pytest.fixture
def fates(monkeypatch: pytest.MonkeyPatch) -> Callable[[dict[tuple[int, int, int], int | None]], None]:
    """Fates by hand in the place of drawn ones."""
    return lambda known: monkeypatch.setattr(
        faults, "draw_delay", lambda run, task, round, client, draw: known.get((round, client, draw), 0)
    )


@pytest.fixture
def three(method_of: Callable, splits_of: Callable[..., Splits]) -> Callable[..., FedAvg]:
    """FedAvg for three clients of unlike size."""
    splits = splits_of(clients=3, train={(task, client): 4 + 2 * client for task in (0, 1) for client in range(3)})
    return lambda *overrides: method_of(FedAvg, ON, *overrides, splits=splits)


# The schedule


def test_a_schedule_by_hand(
    fates: Callable, three: Callable[..., FedAvg], learned: Callable[[FedAvg], Learned]
) -> None:
    """0: client 1 is late by 2, 2 missing. 2: 1 is heard, 0 missing, 2 late by 1. 3: 2 is heard. 4: 1 is too late."""
    fates(FATES)
    of = learned(three("federation.rounds=5"))
    sampled = [(0, 1, 2), (0, 2), (0, 2), (0, 1), (0, 1, 2)]
    assert of.downs() == [(number, client) for number, clients in enumerate(sampled) for client in clients]
    assert of.ups() == [
        *[(0, 0, None), (1, 0, None), (1, 2, None), (2, 1, 0)],
        *[(3, 0, None), (3, 1, None), (3, 2, 2), (4, 0, None), (4, 2, None)],
    ]
    assert of.column("clients") == [3, 2, 2, 2, 3]
    assert of.column("answers") == [1, 2, 1, 3, 2]
    assert of.column("late") == [0, 0, 1, 1, 0]
    assert of.column("missing") == [1, 0, 1, 0, 0]
    assert of.column("bytes_down") == [clients * MODEL for clients in (3, 2, 2, 2, 3)]
    assert of.column("bytes_up") == [answers * (MODEL + 8) for answers in (1, 2, 1, 3, 2)]
    assert list(of.late) == [1]


def test_what_is_on_its_way_at_the_end_of_a_task_is_not_heard_in_the_next(
    fates: Callable, experiment_of: MakeExperiment, splits_of: Callable[..., Splits], tmp_path: Path
) -> None:
    fates({(1, 2, 0): 1})
    result = experiment_of(ON, splits=splits_of(clients=3)).run(tmp_path / "run")
    rounds = pl.read_parquet(tmp_path / "run" / "rounds.parquet")
    assert rounds.select("clients", "answers", "late", "missing").rows() == [(3, 3, 0, 0), (3, 2, 0, 0)] * 2
    assert result["faults"] == {
        **dict.fromkeys(("missing", "lost", "late", "refused"), 0),
        **{"clients": 12, "answers": 10, "dropped": 2},
    }


def test_fates_are_drawn_at_the_rates_and_delays_uniformly(method_of: Callable) -> None:
    method = method_of(FedAvg, *(f"federation.faults.{of}" for of in ("missing=0.3", "late=0.4", "late_rounds=3")))
    drawn = [faults.draw_delay(method.run, 0, number, client, 0) for number in range(200) for client in range(10)]
    counts, n = Counter(drawn), len(drawn)
    expected = {None: 0.3, 0: 0.7 * 0.6, 1: 0.7 * 0.4 / 3, 2: 0.7 * 0.4 / 3, 3: 0.7 * 0.4 / 3}
    assert set(counts) == set(expected)
    assert all(abs(counts[fate] - n * p) < 5 * (n * p * (1 - p)) ** 0.5 for fate, p in expected.items())
    assert drawn == [
        faults.draw_delay(method.run, 0, number, client, 0) for number in range(200) for client in range(10)
    ]
    others = [(task, number, draw) for task in (0, 1) for number in (0, 1) for draw in (0, 1)]
    assert len({tuple(faults.draw_delay(method.run, t, r, c, d) for c in range(30)) for t, r, d in others}) == len(
        others
    )


def test_clients_that_are_busy_are_not_sampled_and_each_draw_is_another(method_of: Callable) -> None:
    method = method_of(FedAvg, "federation.clients_per_round=2")
    sample = partial(sample_clients, method, method.start_task(method.create_server(), 0), 0)
    draws = [sample(draw) for draw in range(20)]
    assert draws[0] == sample()
    assert len(set(draws)) == 6
    assert {sample(draw, busy={1}) for draw in range(20)} == {(0, 2), (0, 3), (2, 3)}
    assert sample(busy={0, 1, 2}) == (3,)


# What an answer counts


def trained(method: FedAvg, client_of: Callable, server: Server, client: int, round: int) -> dict[str, np.ndarray]:
    """What FedAvg's client sends, n_k (w_k - W) and n_k, in double precision."""
    tensors = method.train(client_of(method, client, 0, round), method.make_payload(server)).tensors
    sent = {**tensors["update"], "n": tensors["weight"]["weight"]}
    return {name: tensor.double().numpy().copy() for name, tensor in sent.items()}


def assert_moved(after: Server, before: Server, terms: list[tuple[float, dict[str, np.ndarray]]]) -> None:
    """after = before + sum_k s_k n_k (w_k - W_k) / sum_k s_k n_k"""
    total = sum(s * term["n"] for s, term in terms)
    for name, weights in before.weights.items():
        expected = weights.double().numpy() + sum(s * term[name] for s, term in terms) / total
        np.testing.assert_allclose(after.weights[name].numpy(), expected, atol=1e-6)


def test_a_late_answer_counts_in_the_mean_by_its_age(
    fates: Callable, three: Callable[..., FedAvg], client_of: Callable, learned: Callable[[FedAvg], Learned]
) -> None:
    """Client 2 answers round 0 in round 2, and is alone with client 0 there: s = 3^-1/2, from round 0's model."""
    fates({(0, 2, 0): 2, (1, 1, 0): None, (2, 1, 0): None})
    of = [learned(three(f"federation.rounds={n}")).server for n in (1, 2, 3)]
    method = three()
    start = method.start_task(method.create_server(), 0)
    assert_moved(of[0], start, [(1, trained(method, client_of, start, k, 0)) for k in (0, 1)])
    assert_moved(of[1], of[0], [(1, trained(method, client_of, of[0], 0, 1))])
    old = trained(method, client_of, start, 2, 0)
    assert_moved(of[2], of[1], [(1, trained(method, client_of, of[1], 0, 2)), (3**-0.5, old)])


def test_a_round_with_late_answers_only_goes_on_with_them(
    fates: Callable, three: Callable[..., FedAvg], client_of: Callable, learned: Callable[[FedAvg], Learned]
) -> None:
    """A mean of one is that one, whatever its weight."""
    fates({(0, 2, 0): 1, (1, 0, 0): None, (1, 1, 0): None})
    of = [learned(three(f"federation.rounds={n}")) for n in (1, 2)]
    method = three()
    start = method.start_task(method.create_server(), 0)
    assert of[1].column("answers") == [2, 1]
    assert_moved(of[1].server, of[0].server, [(1, trained(method, client_of, start, 2, 0))])


def test_a_dropped_answer_costs_its_bytes_and_changes_nothing(
    fates: Callable, three: Callable[..., FedAvg], learned: Callable[[FedAvg], Learned]
) -> None:
    """As if the client were missing and then busy."""
    fates({(0, 2, 0): 1})
    dropped = learned(three("federation.faults.late_weight=drop", "federation.rounds=2"))
    fates({(0, 2, 0): None, (1, 2, 0): None})
    missing = learned(three("federation.rounds=2"))
    assert trees.digest(dropped.server.to_tree()) == trees.digest(missing.server.to_tree())
    assert dropped.ups() == [(0, 0, None), (0, 1, None), (1, 0, None), (1, 1, None), (1, 2, 0)]
    assert [dropped.column(name) for name in ("answers", "late", "missing")] == [[2, 2], [0, 1], [0, 0]]
    assert dropped.rounds["loss"].to_list() == missing.rounds["loss"].to_list()


def test_a_late_client_keeps_what_it_learned_and_its_answer_is_of_its_base_round(
    toys: Path, method_of: Callable, fates: Callable, learned: Callable[[FedAvg], Learned]
) -> None:
    """The diary notes each round at once; its page, needed one by one, arrives as it was sent."""
    fates({(0, 2, 0): 1})
    diary = plugins.find("method", "diary")
    of = learned(method_of(diary, ON, "federation.rounds=2"))
    memories = {client: trees.load(file) for client, file in of.memories.items()}
    assert [memories[client]["last"] for client in range(4)] == [[0, 1], [0, 1], [0, 0], [0, 1]]
    pages = of.server.knowledge["pages"]
    assert sorted(pages) == ["0", "1", "2", "3"]
    assert torch.equal(pages["2"], memories[2]["pages"][0])
    kept = of.ledger.filter((pl.col("direction") == "kept") & (pl.col("client") == 2))
    assert kept.select("round", "base_round").rows() == [(0, None)]


def reply(values: tuple[float, float], weight: float, least: Least) -> Reply:
    parts = {"xw": Part("prototype", {"x": torch.tensor(values, dtype=torch.float64) * weight}, least)}
    return Reply(parts | {"w": Part("count", {"w": torch.tensor(weight, dtype=torch.float64)}, least)}, 0.5, 2)


VALUES = st.tuples(st.floats(-1e3, 1e3), st.floats(-1e3, 1e3), st.floats(0.1, 100))


@given(
    in_time=st.lists(VALUES, max_size=6),
    late=st.lists(st.tuples(VALUES, st.integers(1, 50)), min_size=1, max_size=4),
    least=st.sampled_from(["sum", "each"]),
    data=st.data(),
)
def test_means_that_travel_as_two_sums_stay_means_with_late_ones_behind(
    in_time: list[Any], late: list[Any], least: Least, data: st.DataObject, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """The same bits in every order of arrival, within the values' hull, equal to numpy's weighted average."""
    terms = [*((v, 1.0) for v in in_time), *((v, faults.weigh_late(age)) for v, age in late)]
    orders = [list(range(len(terms))), data.draw(st.permutations(range(len(terms))))]
    sums = []
    for order in orders:
        replies = Replies(range(len(terms)), tmp_path_factory.getbasetemp() / "means")
        for place in order:
            (a, b, w), s = terms[place]
            replies.add(place, reply((a, b), w, least), s)
        sums.append((replies.sum("xw")["x"], replies.sum("w")["w"]))
        assert replies.loss == pytest.approx(0.5)
    assert all(torch.equal(one, other) for one, other in zip(*sums, strict=True))
    mean = (sums[0][0] / sums[0][1]).numpy()
    x, w = np.array([v[:2] for v, _ in terms]), np.array([v[2] * s for v, s in terms])
    np.testing.assert_allclose(mean, np.average(x, axis=0, weights=w), rtol=1e-9, atol=1e-9)
    assert (mean <= x.max(0) + 1e-9).all()
    assert (mean >= x.min(0) - 1e-9).all()


def test_a_late_change_of_a_variance_cannot_make_it_negative(tmp_path: Path, method_of: Callable) -> None:
    """In time: 0.2 -> 0.4, weight 1. Late: a change of -0.9 since a model whose variance was 1, weight (1 + 1)^-1/2."""
    method = method_of(FedAvg)
    server = method.start_task(method.create_server(), 0)
    server.weights["running_var"] = torch.tensor([0.2])
    replies = Replies([0, 1], tmp_path)
    for client, (change, weight) in enumerate([(0.2, 1.0), (-0.9, 2**-0.5)]):
        parts = {
            "update": Part("update", {"heads.0.bias": torch.zeros(2)}),
            "statistics": Part("statistics", {"running_var": torch.tensor([change])}),
            "weight": Part("count", {"weight": torch.tensor(1.0, dtype=torch.float64)}),
        }
        replies.add(client, Reply(parts), weight)
    after = method.aggregate(server, replies).weights["running_var"].item()
    assert after == pytest.approx(0.2 + 0.2 / (1 + 2**-0.5))


# Too few answers


def test_a_round_with_too_few_answers_is_called_off_and_repeated_with_others(
    fates: Callable, method_of: Callable, learned: Callable[[FedAvg], Learned], splits_of: Callable[..., Splits]
) -> None:
    """Two of four clients a round, two answers needed. The first draw of round 1 loses one client to being late."""
    overrides = ("federation.clients_per_round=2", "federation.rounds=2")
    method = method_of(FedAvg, *overrides, "federation.faults.least=2")
    server = method.start_task(method.create_server(), 0)
    first, second = (sample_clients(method, server, 1, draw) for draw in (0, 1))
    assert first != second
    fates({(1, first[0], 0): 1})
    of = learned(method)
    in_round = [client for round, client in of.downs() if round == 1]
    assert in_round == sorted([*first, *second])
    assert [client for round, client, _ in of.ups() if round == 1] == list(second)
    assert [of.column(name) for name in ("clients", "answers", "late", "missing")] == [[2, 4], [2, 2], [0, 0], [0, 2]]
    assert of.late == {}
    assert of.column("bytes_down") == [2 * MODEL, 4 * MODEL]


def test_a_draw_that_is_called_off_leaves_nothing_with_clients(
    toys: Path, fates: Callable, method_of: Callable, learned: Callable[[FedAvg], Learned]
) -> None:
    fates({(0, 0, 0): 1, (0, 1, 0): None, (0, 2, 0): None, (0, 3, 1): None})
    of = learned(method_of(plugins.find("method", "diary"), ON, "federation.rounds=1", "federation.faults.least=2"))
    assert sorted(of.memories) == [0, 1, 2]
    assert all(len(trees.load(file)["pages"]) == 1 for file in of.memories.values())
    assert of.column("missing") == [5]


@pytest.mark.parametrize("rates", [("missing=1",), ("late=1",), ("missing=0.5", "late=1"), ("least=5",)])
def test_clients_that_never_answer_end_the_run_in_one_line(
    rates: tuple[str, ...], experiment_of: MakeExperiment, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Four clients have the task's data; nobody is trained in vain."""
    monkeypatch.setattr(FedAvg, "train", None)
    with pytest.raises(UserError, match=rf"task 0, round 0: in {MOST_DRAWS} draws of up to 4 clients .*Lower") as error:
        experiment_of(*(f"federation.faults.{rate}" for rate in rates)).run(tmp_path / "run")
    assert "\n" not in str(error.value)


def test_more_answers_than_clients_are_refused_before_a_run(params_of: Callable) -> None:
    with pytest.raises(UserError, match=r"federation\.faults\.least is 3, but no more than 2 clients are sampled"):
        params_of("federation.clients_per_round=2", "federation.faults.least=3")
    for wrong in ("missing=1.5", "late=-0.1", "late_rounds=0", "least=0", "late_weight=young", "missed=0.1"):
        with pytest.raises(UserError, match=rf"federation\.faults\.{wrong.partition('=')[0]} is "):
            params_of(f"federation.faults.{wrong}")


# Clients that are lost on the way


@pytest.fixture
def losses(monkeypatch: pytest.MonkeyPatch) -> Callable[[dict[tuple[int, int, int], str]], None]:
    """Losses by hand in the place of drawn ones."""
    return lambda known: monkeypatch.setattr(
        faults, "draw_cause", lambda run, task, round, client, draw: known.get((round, client, draw))
    )


@pytest.mark.parametrize("why", ["crash", "out of memory"])
def test_a_lost_client_is_a_missing_one_that_the_ledger_names(
    why: str,
    toys: Path,
    fates: Callable,
    losses: Callable,
    method_of: Callable,
    learned: Callable[[FedAvg], Learned],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """One that crashes has trained; what it wrote in its diary then is not there in the next round."""
    diary = plugins.find("method", "diary")
    trained = []
    train = diary.train
    monkeypatch.setattr(diary, "train", lambda self, c, p: trained.append((c.round, c.index)) or train(self, c, p))
    settings = (ON, "federation.rounds=2")
    fates({})
    losses({(0, 2, 0): why})
    lost = learned(method_of(diary, *settings))
    assert ((0, 2) in trained) == (why == "crash")
    fates({(0, 2, 0): None})
    losses({})
    missing = learned(method_of(diary, *settings))
    assert trees.digest(lost.server.to_tree()) == trees.digest(missing.server.to_tree())
    remembered = [{str(client): trees.load(file) for client, file in of.memories.items()} for of in (lost, missing)]
    assert trees.digest(remembered[0]) == trees.digest(remembered[1])
    assert len(remembered[0]["2"]["pages"]) == 1
    assert [lost.column(name) for name in ("answers", "missing", "lost")] == [[3, 4], [0, 0], [1, 0]]
    assert lost.ledger.filter(pl.col("direction") == "lost").select("round", "client", "part").rows() == [(0, 2, why)]
    assert lost.ledger.filter(pl.col("direction") != "lost").rows() == missing.ledger.rows()


def test_losses_are_drawn_at_the_rates_and_only_of_those_that_are_there(
    method_of: Callable, experiment_of: MakeExperiment, tmp_path: Path
) -> None:
    rates = ("federation.faults.crash=0.3", "federation.faults.out_of_memory=0.2")
    run = method_of(FedAvg, *rates).run
    drawn = Counter(faults.draw_cause(run, 0, number, client, 0) for number in range(200) for client in range(10))
    expected = {"out of memory": 0.2, "crash": 0.8 * 0.3, None: 0.8 * 0.7}
    assert all(abs(drawn[fate] - 2000 * p) < 5 * (2000 * p * (1 - p)) ** 0.5 for fate, p in expected.items())
    settings = (*rates, "federation.faults.missing=0.3", "federation.rounds=10", "federation.faults.least=2")
    happened = experiment_of(*settings).run(tmp_path / "run")["faults"]
    assert happened["lost"] > 0
    assert happened["clients"] == happened["answers"] + happened["missing"] + happened["lost"]
    assert pl.read_parquet(tmp_path / "run" / "rounds.parquet")["answers"].min() == 2


@pytest.mark.parametrize(
    "problem", [MemoryError(), RuntimeError("DefaultCPUAllocator: can't allocate memory: 9 bytes")]
)
def test_a_machine_without_memory_loses_the_client_and_not_the_run(
    problem: Exception, experiment_of: MakeExperiment, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    train = FedAvg.train

    def starving(self: FedAvg, client: Any, payload: Any) -> Any:
        if (client.round, client.index) == (0, 2):
            raise problem
        return train(self, client, payload)

    monkeypatch.setattr(FedAvg, "train", starving)
    result = experiment_of().run(tmp_path / "run")
    assert (result["faults"]["lost"], result["faults"]["answers"]) == (2, 14)
    monkeypatch.setattr(FedAvg, "train", train)
    monkeypatch.setattr(
        faults, "draw_delay", lambda run, task, round, client, draw: None if (round, client) == (0, 2) else 0
    )
    missing = experiment_of(ON).run(tmp_path / "missing")
    assert result["digests"]["model"] == missing["digests"]["model"]


def test_too_few_that_had_memory_end_the_run_in_one_line(
    experiment_of: MakeExperiment, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def starving(self: FedAvg, client: Any, payload: Any) -> Any:
        return torch.empty(2**60)

    monkeypatch.setattr(FedAvg, "train", starving)
    with pytest.raises(
        UserError, match=r"task 0, round 0: there was no memory to train 4 of 4 clients .* Lower"
    ) as error:
        experiment_of().run(tmp_path / "run")
    assert "\n" not in str(error.value)


def test_other_problems_of_a_client_still_end_the_run(
    experiment_of: MakeExperiment, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(FedAvg, "train", lambda *_: torch.zeros(2) @ torch.zeros(3))
    with pytest.raises(RuntimeError, match="size"):
        experiment_of().run(tmp_path / "run")


# The same bits again

HARD = (
    "model.backbone=noisy",
    "methods.diary.batch_norm=local",
    "augment.crop_padding=1",
    "federation.rounds=6",
    "federation.faults.missing=0.2",
    "federation.faults.crash=0.1",
    "federation.faults.out_of_memory=0.1",
    "federation.faults.late=0.4",
    "federation.faults.late_rounds=3",
    "federation.faults.least=2",
)


@pytest.fixture(scope="module")
def five(splits_of: Callable[..., Splits], toys: Path) -> Splits:
    return splits_of(clients=5, train={(task, client): 2 + client for task in (0, 1) for client in range(5)})


@pytest.fixture(scope="module")
def undisturbed(
    five: Splits, params_of: Callable, remains: Remains, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("undisturbed")
    result = Experiment(params_of(*HARD), "diary", 0, five, folder / "home").run(folder / "run")
    happened = result["faults"]
    assert min(happened[name] for name in ("missing", "lost", "late", "dropped")) > 0
    return remains(folder / "run")


class Dies(Listener):
    """Interrupted when the nth client answers or the nth round is over, whichever is counted."""

    def __init__(self, moment: str, nth: int) -> None:
        self.moment, self.left = moment, nth

    def happened(self, moment: str) -> None:
        self.left -= moment == self.moment
        if self.left == 0:
            raise KeyboardInterrupt

    def on_client_done(self, task: int, round: int, done: int, of: int) -> None:
        self.happened("client")

    def on_round_done(self, row: dict[str, Any]) -> None:
        self.happened("round")


@pytest.mark.parametrize(("moment", "every"), [("round", 1), ("client", 1), ("round", 3)])
def test_an_interrupted_run_hears_its_late_clients_all_the_same(
    moment: str,
    every: int,
    five: Splits,
    undisturbed: dict[str, Any],
    experiment_of: MakeExperiment,
    remains: Remains,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Interrupted again and again, each time a little later, with a commit after every `every`th round only."""
    rounds = iter(range(1, 10**6))
    monkeypatch.setattr(Checkpoints, "age", property(lambda checkpoints: 9.0 if next(rounds) % every == 0 else 0.0))
    for nth in range(2, 100):
        one = experiment_of(*HARD, method="diary", splits=five, home=tmp_path / "home", listener=Dies(moment, nth))
        try:
            one.run(tmp_path / "run")
            break
        except KeyboardInterrupt:
            continue
    assert nth > 3
    assert remains(tmp_path / "run") == undisturbed


@pytest.mark.slow
def test_workers_change_nothing(
    five: Splits, undisturbed: dict[str, Any], experiment_of: MakeExperiment, remains: Remains, tmp_path: Path
) -> None:
    workers = ("federation.executor=processes", "federation.workers=2")
    with experiment_of(*HARD, *workers, method="diary", splits=five) as experiment:
        experiment.run(tmp_path / "run")
    assert remains(tmp_path / "run") == undisturbed


def test_a_commit_names_what_is_on_its_way_and_drops_the_rest(
    fates: Callable, three: Callable[..., FedAvg], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fates(FATES)
    seen = []
    commit = Checkpoints.commit

    def noted(checkpoints: Checkpoints, position: Any) -> None:
        commit(checkpoints, position)
        named = json.loads((tmp_path / "commit.json").read_text())["late"]
        seen.append({client: tuple(when) for client, (_, *when) in named.items()})
        assert {tmp_path / file for file, *_ in named.values()} == set((tmp_path / "late").iterdir())

    monkeypatch.setattr(Checkpoints, "commit", noted)
    method = three("federation.rounds=5", "federation.checkpoint_seconds=0")
    checkpoints = Checkpoints(tmp_path)
    ledger = open_ledger(method, checkpoints.ledger)
    learn(method, method.create_server(), {}, 0, Serial(method, 1), checkpoints, ledger, Listener())
    assert seen == [{"1": (0, 2)}, {"1": (0, 2)}, {"2": (2, 3)}, {}, {"1": (4, 5)}]


# Where nobody fails


def test_without_faults_no_fate_is_drawn_and_no_setting_matters(
    experiment_of: MakeExperiment, tmp_path: Path, remains: Remains, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(faults, "draw_delay", None)
    settings = ("federation.faults.late_rounds=5", "federation.faults.late_weight=drop")
    results = [
        experiment_of(*some, "federation.clients_per_round=3").run(tmp_path / name)
        for name, some in (("plain", ()), ("set", settings))
    ]
    plain, other = (remains(tmp_path / name) for name in ("plain", "set"))
    assert plain | {"digests": None} == other | {"digests": None}
    assert plain["digests"]["model"] == other["digests"]["model"]
    assert "faults" not in results[0]
    rounds = pl.read_parquet(tmp_path / "plain" / "rounds.parquet")
    assert rounds.select("clients", "answers", "late", "missing").unique().rows() == [(3, 3, 0, 0)]


def test_training_in_one_place_waits_for_nobody(experiment_of: MakeExperiment, tmp_path: Path) -> None:
    failing = ("federation.faults.missing=1", "federation.faults.least=2")
    results = [experiment_of(*some, method="joint").run(tmp_path / f"{len(some)}") for some in ((), failing)]
    assert results[0]["digests"]["model"] == results[1]["digests"]["model"]


DAILY = ("fedavg", "fedprotip", "fot", "icarl", "joint", "pip-dualp", "special", "stamp")
EACH = [
    pytest.param(name, marks=() if name in DAILY else pytest.mark.slow) for name in sorted(plugins.load_all("method"))
]


@pytest.mark.parametrize("name", EACH)
def test_every_method_goes_on_with_those_that_answer(
    name: str, experiment_of: MakeExperiment, splits_of: Callable[..., Splits], tmp_path: Path
) -> None:
    faulty = ("missing=0.2", "late=0.5", "late_rounds=2")
    settings = ("federation.rounds=4", *(f"federation.faults.{of}" for of in faulty))
    # Rounds are of two kinds, or what clients send is weighed within one.
    if name in ("lorm", "pilora", "fedweit", "fedl2p-meta"):
        with pytest.raises(UserError, match=rf"federation\.faults\.late: {name} .* Use 0"):
            experiment_of(*settings, method=name)
        return
    experiment = experiment_of(*settings, method=name, splits=splits_of(clients=3, val=2))
    result = experiment.run(tmp_path / "run")
    assert name == "joint" or result["faults"]["late"] > 0
    weights = experiment.store.get(result["digests"]["state"])["server"]["weights"]
    assert all(tensor.isfinite().all() for tensor in weights.values())
