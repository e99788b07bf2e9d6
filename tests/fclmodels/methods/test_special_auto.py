"""`lambda: auto`: the search by itself on curves whose answer is known, and what clients and server make of it."""

import math
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import polars as pl
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.nn.functional import cross_entropy

from fclmodels.federation.engine.replies import Replies
from fclmodels.federation.exchange import TRAIN
from fclmodels.federation.messages import Part, Reply
from fclmodels.methods.fedavg import FedAvg
from fclmodels.methods.parts.anchor import measure_distance
from fclmodels.methods.parts.anchor_radius import Search, share_within
from fclmodels.methods.special import Special
from fclmodels.storage import trees

GUESSING = math.log(10)
AUTO = {"lambda": "auto"}


def searched(losses: list[float], rounds: int, tolerance: float = 0.05) -> Search:
    search = Search()
    for loss in losses:
        search = search.add_round(loss, GUESSING, tolerance, rounds)
    return search


def test_there_is_no_anchor_while_the_loss_falls() -> None:
    """By more than 5 % of what is known a round: 2.3 - 0.4 = 1.9, of which 0.095."""
    search = searched([2.3, 1.5, 0.9, 0.6, 0.4], rounds=10)
    assert search.within is None
    assert search.compute_radius(3.0, last=False) == math.inf
    assert searched([2.3, 1.5, 0.9, 0.6, 0.4, 0.31], rounds=10).within is True


def test_a_slow_fall_over_many_rounds_is_not_taken_for_its_end() -> None:
    """Of 100 rounds ten have to lower the loss by less than 0.05 x (2.3 - 1.1) = 0.06: three do, two do not."""
    falling = [2.3 - 0.02 * r for r in range(60)]
    assert searched(falling, rounds=100).within is None
    assert searched([*falling, *[falling[-1]] * 7], rounds=100).within is None
    assert searched([*falling, *[falling[-1]] * 8], rounds=100).within is True


def test_steps_by_hand() -> None:
    """Within: a step of 0.1 x 1.2 inwards. Not any more: half of that outwards, and on so by 1.2 of it."""
    settled = searched([2.3, 0.3, 0.3], rounds=10)
    assert settled.compute_radius(2.0, last=False) == pytest.approx(2 * math.exp(-0.12))
    assert settled.compute_radius(2.0, last=True) == 2.0
    out = settled.add_round(0.5, GUESSING, 0.05, 10)
    assert (out.within, out.step) == (False, pytest.approx(0.06))
    assert out.compute_radius(1.5, last=True) == pytest.approx(1.5 * math.exp(0.06))
    assert out.add_round(0.5, GUESSING, 0.05, 10).step == pytest.approx(0.072)
    back = out.add_round(0.3, GUESSING, 0.05, 10)
    assert (back.within, back.step) == (True, pytest.approx(0.03))


def test_the_tolerance_is_a_share_of_what_is_known_of_a_label() -> None:
    settled = [2.3, 0.3, 0.3]
    slack = 0.05 * (GUESSING - 0.3)
    assert searched([*settled, 0.3 + 0.99 * slack], rounds=10).within is True
    assert searched([*settled, 0.3 + 1.01 * slack], rounds=10).within is False
    assert searched([*settled, 0.3 + 1.01 * slack], rounds=10, tolerance=0.06).within is True
    # Of a model that knows less than nothing no share can be given up.
    assert searched([3.0, 3.0, 3.0], rounds=10).within is True
    assert searched([3.0, 3.0, 3.0, 3.01], rounds=10).within is False


@given(far=st.floats(0.1, 10), floor=st.floats(0.01, 1), start=st.floats(2.5, 6))
def test_it_finds_the_smallest_drift_that_is_good_enough(far: float, floor: float, start: float) -> None:
    """On a bowl, L(d) = floor + (start - floor) (1 - d / far)^2, whose bottom is four rounds away without an anchor."""
    drift, search, rounds = 0.0, Search(), 40
    for _ in range(rounds):
        search = search.add_round(floor + (start - floor) * (1 - drift / far) ** 2, GUESSING, 0.05, rounds)
        drift = min(search.compute_radius(drift, last=False), drift + far / 4, far)
    best = far * (1 - math.sqrt(0.05 * (GUESSING - floor) / (start - floor)))
    assert drift == pytest.approx(best, rel=0.1)


@given(radius=st.floats(0.01, 10), distance=st.floats(0.01, 10))
def test_the_share_projects_onto_the_ball(radius: float, distance: float) -> None:
    share = share_within(radius, distance)
    assert (1 - share) * distance == pytest.approx(min(radius, distance))
    assert share_within(math.inf, distance) == 0
    assert share_within(0.0, 0.0) == 0


# In a federation.


def loss_by_hand(method: Special, weights: dict[str, Any], task: int, client: int) -> tuple[float, int]:
    splits = method.run.splits
    rows = splits.select_rows(task, "val", client)
    x = (splits.images[torch.from_numpy(rows.samples)].float() / 255 - 0.5) / 0.25
    network = method.networks.load(method.run.make_spec(task + 1), weights).eval()
    with torch.no_grad():
        return float(cross_entropy(network(x), torch.from_numpy(rows.labels), reduction="sum")), len(rows)


def test_a_client_tells_the_val_loss_of_what_it_was_sent(
    method_of: Callable, client_of: Callable, splits_of: Callable, federate: Callable
) -> None:
    """Two numbers, of its own val rows, before any training; and nothing in the first task."""
    method = method_of(Special, "model.dropout=[0.2, 0.5]", splits=splits_of(val=5), **AUTO)
    server = method.start_task(federate(method, 1), 1)
    reply, _ = method.exchanges[TRAIN].reply(client_of(method, 2, 1), method.make_payload(server))
    expected, count = loss_by_hand(method, server.weights, 1, 2)
    told = reply.parts["val"]
    assert (told.kind, told.bytes, told.tensors["samples"].item()) == ("loss", 16, 5)
    assert count == 5
    assert told.tensors["loss"].item() == pytest.approx(expected, rel=1e-5)
    first = method.start_task(method.create_server(), 0)
    assert "val" not in method.exchanges[TRAIN].reply(client_of(method, 2), method.make_payload(first))[0].parts


def test_training_is_fedavgs(method_of: Callable, client_of: Callable, splits_of: Callable, federate: Callable) -> None:
    splits, dropout = splits_of(val=5), "model.dropout=[0.2, 0.5]"
    auto, fedavg = method_of(Special, dropout, splits=splits, **AUTO), method_of(FedAvg, dropout, splits=splits)
    payload = auto.make_payload(auto.start_task(federate(auto, 1), 1))
    ours, theirs = (method.train(client_of(method, 1, 1), payload).tensors for method in (auto, fedavg))
    assert trees.digest(ours["update"]) == trees.digest(theirs["update"])
    assert ours.keys() - theirs.keys() == {"val"}


def replies_of(
    server: Any, loss: float, samples: float, folder: Path, steps: dict[str, Any] | None = None, train: float = 0
) -> Replies:
    """One client that moves every parameter by 0.01, or by these steps, and tells this val loss."""
    update = steps or {name: torch.full_like(w, 0.01) for name, w in server.weights.items()}
    val = {"loss": torch.tensor(loss * samples), "samples": torch.tensor(samples)}
    replies = Replies((0,), folder)
    counts = {"weight": Part("count", {"weight": torch.tensor(1.0)}), "val": Part("count", val)}
    replies.add(0, Reply({"update": Part("update", update), **counts}, train))
    return replies


def test_the_server_reacts_to_val_losses(method_of: Callable, splits_of: Callable, tmp_path: Path) -> None:
    """Free while the loss falls, nearer and nearer while it stays, outwards again when it rises; held without news."""
    method = method_of(Special, "federation.rounds=10", splits=splits_of(val=5), **AUTO)
    server = method.start_task(method.start_task(method.create_server(), 0), 1)
    anchor, drifts, weights = server.knowledge["anchor"], [0.0], []
    for loss in (2.0, 1.0, 0.3, 0.3, 0.3, 0.3, 0.9, 0.9):
        server = method.aggregate(server, replies_of(server, loss, 3.0, tmp_path))
        drifts.append(measure_distance(server.weights, anchor))
        share = method.share(server)
        weights.append(share / (1 - share))
        assert method.find_anchor_weight(server) == 0  # no one lambda, of which a bound of the drift could be told
    assert weights[:3] == [0, 0, 0]
    for before, after, step in zip(drifts[3:6], drifts[4:7], (0.12, 0.144, 0.1728), strict=True):
        assert after == pytest.approx(before * math.exp(-step), rel=1e-5)
    assert 0 < weights[3] < weights[4] < weights[5]
    assert drifts[8] > drifts[7] > drifts[6]
    moved = measure_distance({name: w + 0.01 for name, w in server.weights.items()}, anchor)
    unknown = method.aggregate(server, replies_of(server, 5.0, 0.0, tmp_path))
    assert unknown.knowledge["search"] == server.knowledge["search"]
    assert measure_distance(unknown.weights, anchor) == pytest.approx(moved / (1 + weights[-1]), rel=1e-5)


def test_of_updates_it_reads_nothing_but_how_far_they_go(
    method_of: Callable, splits_of: Callable, tmp_path: Path
) -> None:
    """In another direction, beside other train losses: the same search, and the same share of the anchor."""
    method = method_of(Special, "federation.rounds=10", splits=splits_of(val=5), **AUTO)
    one = other = method.start_task(method.start_task(method.create_server(), 0), 1)
    random = torch.Generator().manual_seed(0)
    signs = {name: torch.randint(0, 2, w.shape, generator=random) * 2 - 1 for name, w in one.weights.items()}
    steps = {name: 0.01 * sign for name, sign in signs.items()}
    for loss in (2.0, 1.0, 0.3, 0.3, 0.3, 0.9, 0.3):
        one = method.aggregate(one, replies_of(one, loss, 3.0, tmp_path))
        other = method.aggregate(other, replies_of(other, loss, 3.0, tmp_path, steps, train=7.0))
        assert other.knowledge["search"] == one.knowledge["search"]
        assert method.share(other) == pytest.approx(method.share(one), abs=1e-5)
    assert 0 < method.share(one) < 1


@pytest.mark.parametrize("silent", [(), (3,)])
def test_the_last_round_tries_nothing_smaller(
    silent: tuple[int, ...], method_of: Callable, splits_of: Callable, tmp_path: Path
) -> None:
    """Also where some round's clients have no val rows."""
    method = method_of(Special, "federation.rounds=10", splits=splits_of(val=5), **AUTO)
    server = method.start_task(method.start_task(method.create_server(), 0), 1)
    drifts = []
    for round in range(10):
        samples = 0.0 if round in silent else 3.0
        server = method.aggregate(server, replies_of(server, 0.3, samples, tmp_path))
        drifts.append(measure_distance(server.weights, server.knowledge["anchor"]))
    assert drifts[7] < drifts[6] < drifts[5]
    assert drifts[9] == pytest.approx(drifts[8], rel=1e-5)


def test_an_older_models_loss_is_not_read(tmp_path: Path) -> None:
    replies = Replies((0, 1), tmp_path)
    for client, weight in ((0, 1.0), (1, 0.7)):
        val = Part("loss", {"loss": torch.tensor(6.0), "samples": torch.tensor(3.0)})
        replies.add(client, Reply({"val": val}), weight)
    assert {name: float(total) for name, total in replies.sum("val").items()} == {"loss": 6, "samples": 3}


@pytest.mark.parametrize(
    ("overrides", "head", "classes"),
    [((), "growing", 4), (("model.loss_over=task",), "growing", 2), ((), "per-task", 2)],
)
def test_guessing_is_among_the_classes_of_the_loss(
    overrides: tuple[str, ...], head: str, classes: int, method_of: Callable, splits_of: Callable
) -> None:
    method = method_of(Special, *overrides, splits=splits_of(val=2, head=head), **AUTO)
    assert method.compute_guessing_loss(method.run.make_spec(2), 1) == pytest.approx(math.log(classes))


def test_each_task_is_searched_anew_and_ends_nearer_the_anchor_than_fedavg(
    method_of: Callable, splits_of: Callable, after_each_task: Callable
) -> None:
    splits, longer = splits_of(tasks=3, val=4, train=16, same_classes=True), "federation.rounds=12"
    auto = after_each_task(method_of(Special, longer, splits=splits, **AUTO))
    fedavg = after_each_task(method_of(Special, longer, splits=splits, **{"lambda": 0.0}))
    assert "search" not in auto[0].knowledge
    for ours, theirs in zip(auto[1:], fedavg[1:], strict=True):
        assert len(ours.knowledge["search"]["losses"]) == 12
        assert ours.knowledge["search"].keys() == asdict(Search()).keys()
        anchored = (measure_distance(server.weights, server.knowledge["anchor"]) for server in (ours, theirs))
        assert next(anchored) < 0.9 * next(anchored)


ALONE = ("federation.privacy.noise_multiplier=1e-9", "federation.privacy.covers=knowledge")


def test_with_hardly_any_noise_on_val_losses_the_search_is_that_without(
    method_of: Callable, splits_of: Callable, after_each_task: Callable
) -> None:
    """Clients have as many val rows each, so that the mean over clients is that over rows."""
    plain, noisy = (
        after_each_task(method_of(Special, "federation.rounds=6", *noise, splits=splits_of(val=4), **AUTO))
        for noise in ((), ALONE)
    )
    losses = plain[1].knowledge["search"]["losses"]
    assert noisy[1].knowledge["search"]["losses"] == pytest.approx(losses, rel=1e-4)


def test_under_noise_no_client_tells_more_than_its_bound(
    method_of: Callable, client_of: Callable, splits_of: Callable
) -> None:
    """Of a model that is sure of what is wrong: the loss is cut at twice what guessing costs."""
    method = method_of(Special, *ALONE, splits=splits_of(val=4), **AUTO)
    payload = method.make_payload(method.start_task(method.start_task(method.create_server(), 0), 1))
    wrong = {name: 1e4 * tensor for name, tensor in payload["weights"].tensors.items()}
    told = method.measure_val_loss(client_of(method, 0, 1), {"weights": Part("weights", wrong)})
    assert (told["loss"].item(), told["samples"].item()) == (1, 1)
    assert method.make_update_form(1, 0)["val"].bound == pytest.approx(2**0.5)


def test_stopped_and_resumed_it_is_the_same(experiment_of: Callable, splits_of: Callable, tmp_path: Path) -> None:
    """The search is part of what is committed."""
    settings = ("methods.special.lambda=auto", "federation.rounds=4", "federation.checkpoint_seconds=0")
    splits = splits_of(val=4)
    whole = experiment_of(*settings, method="special", splits=splits).run(tmp_path / "whole")

    stopped = experiment_of(*settings, method="special", splits=splits, home=tmp_path / "home")
    aggregate, calls = stopped.method.aggregate, []

    def until_the_seventh(*arguments: Any) -> Any:
        calls.append(1)
        if len(calls) == 7:
            raise KeyboardInterrupt
        return aggregate(*arguments)

    stopped.method.aggregate = until_the_seventh
    with pytest.raises(KeyboardInterrupt):
        stopped.run(tmp_path / "stopped")
    resumed = experiment_of(*settings, method="special", splits=splits, home=tmp_path / "home").run(
        tmp_path / "resumed"
    )
    assert resumed["digests"]["model"] == whole["digests"]["model"]
    rounds = pl.read_parquet(tmp_path / "resumed" / "rounds.parquet")
    assert rounds.height == 8


def test_without_val_rows_it_reads_train_rows(method_of: Callable, splits_of: Callable, client_of: Callable) -> None:
    """All of a client's, by the model before its training; it is the default."""
    method = method_of(Special, splits=splits_of(val=0))
    assert method.settings.lam == "auto"
    server = method.start_task(method.start_task(method.create_server(), 0), 1)
    client = client_of(method, 2, 1)
    sent = method.measure_val_loss(client, method.make_payload(server))
    x = method.run.batches.prepare_inputs(method.run.batches.read_raw(client.rows))
    with torch.no_grad():
        network = method.networks.load(method.run.make_spec(2), server.weights).eval()
        expected = cross_entropy(network(x.inputs), x.labels, reduction="sum")
    assert sent["samples"] == len(client.rows)
    assert sent["loss"].item() == pytest.approx(float(expected), rel=1e-5)


def test_advice_tells_when_the_anchor_begins(method_of: Callable, splits_of: Callable) -> None:
    (line,) = method_of(Special, splits=splits_of(val=5), **AUTO).list_advice()
    assert line.startswith("lambda auto: no anchor until ")


def test_a_tolerance_that_nothing_reads_is_refused() -> None:
    with pytest.raises(ValueError, match="tolerance needs lambda: auto"):
        Special.Settings(**{"lambda": 0.1, "tolerance": 0.2})
    assert Special.Settings(**{"lambda": "auto", "tolerance": 0.2}).tolerance == 0.2


def test_losses_of_other_clients_each_round_are_smoothed(
    method_of: Callable, splits_of: Callable, tmp_path: Path
) -> None:
    """One client of four a round: a quarter of each sum is the round's; with all clients a loss is as it comes."""
    losses, samples = (2.0, 1.0, 3.0, 0.5), (2.0, 6.0, 2.0, 4.0)
    for chosen in (1, 4):
        overrides = ("federation.rounds=10", f"federation.clients_per_round={chosen}")
        method = method_of(Special, *overrides, splits=splits_of(val=5), **AUTO)
        server = method.start_task(method.start_task(method.create_server(), 0), 1)
        total, count, expected = 0.0, 0.0, []
        for loss, n in zip(losses, samples, strict=True):
            total, count = 0.75 * total + 0.25 * loss * n, 0.75 * count + 0.25 * n
            expected.append(total / count)
            server = method.aggregate(server, replies_of(server, loss, n, tmp_path))
        seen = server.knowledge["search"]["losses"]
        assert seen == pytest.approx(expected if chosen == 1 else losses, rel=1e-6)


def test_a_lucky_round_of_few_clients_starts_no_anchor(
    method_of: Callable, splits_of: Callable, tmp_path: Path
) -> None:
    """Losses that fall with 0.4 of luck either way: with all clients' patience the anchor would begin in the fifth."""
    luck = (0.4, -0.4, 0.4, 0.4, -0.2, 0.4, -0.4, 0.0, 0.4, -0.4)
    losses = [2.3 - 0.1 * r + of for r, of in enumerate(luck)]
    began = {}
    for chosen in (1, 4):
        overrides = ("federation.rounds=10", f"federation.clients_per_round={chosen}")
        method = method_of(Special, *overrides, splits=splits_of(val=5), **AUTO)
        server = method.start_task(method.start_task(method.create_server(), 0), 1)
        shares = []
        for loss in losses:
            server = method.aggregate(server, replies_of(server, loss, 3.0, tmp_path))
            shares.append(server.knowledge["search"]["within"])
        began[chosen] = next((round for round, within in enumerate(shares) if within is not None), None)
    assert began == {1: None, 4: 2}
