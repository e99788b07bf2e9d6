"""Noise on all that is sent: what leaves a client, how much noise a sum has, and what the accountant is told."""

import itertools
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pytest
import torch
from opacus.accountants import RDPAccountant
from scipy import optimize, stats

from fclmodels import tables
from fclmodels.errors import UserError
from fclmodels.federation.client import Client
from fclmodels.federation.engine.listener import Listener
from fclmodels.federation.messages import Part, Reply
from fclmodels.federation.protection.privacy import add_noise, find_largest_epsilon
from fclmodels.methods.fedavg import FedAvg
from fclmodels.numerics.gaussian_mechanism import compute_epsilon

UNIFORM = "federation.weighting=uniform"
PRIVACY = "federation.privacy"
Z = f"{PRIVACY}.noise_multiplier"


def reply_of(size: int, value: float, bound: float = 3.0, **facts: Any) -> Reply:
    """An update and a sketch of so many numbers each, and the update's weight."""
    numbers = {"v": torch.full((size // 2,), value), "w": torch.full((size - size // 2,), value)}
    weight = {"weight": torch.tensor(1.0, dtype=torch.float64)}
    update, sketch = Part("update", numbers, over="weight"), Part("sketch", numbers, bound=bound)
    return Reply({"update": update, "sketch": sketch, "weight": Part("count", weight)}, **facts)


def sent(reply: Reply, part: str) -> torch.Tensor:
    return torch.cat(list(reply.parts[part].tensors.values())).double()


@pytest.mark.parametrize("length", [0.3, 2.0, 2.1, 1e6, 1e15])
def test_each_part_is_clipped_at_its_own_bound(length: float, method_of: Callable, client_of: Callable) -> None:
    method = method_of(FedAvg, UNIFORM, f"{Z}=1e-9", f"{PRIVACY}.clip=2.0")
    out = add_noise(reply_of(100, length / 10), method, client_of(method, 0), 4)
    assert sent(out, "update").norm().item() == pytest.approx(min(length, 2.0), rel=1e-4)
    assert sent(out, "sketch").norm().item() == pytest.approx(min(length, 3.0), rel=1e-4)
    assert out.parts["weight"].tensors["weight"] == 1


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_what_is_not_finite_counts_as_zero(value: float, method_of: Callable, client_of: Callable) -> None:
    """As no bound would hold of it."""
    method = method_of(FedAvg, UNIFORM, f"{Z}=1")
    bad, nothing = (add_noise(reply_of(9, x), method, client_of(method, 0), 4) for x in (value, 0.0))
    assert torch.equal(sent(bad, "update"), sent(nothing, "update"))


@pytest.mark.parametrize("kind", ["central", "local"])
def test_four_clients_have_the_noise_of_the_sum_together_or_all_of_it_each(
    kind: str, method_of: Callable, client_of: Callable
) -> None:
    """z = 3, two parts, bounds of 0.5 and 2: 3 sqrt(2) of each in the sum of four, or in each; new in each round."""
    method = method_of(FedAvg, UNIFORM, f"{Z}=3", f"{PRIVACY}.clip=0.5", f"{PRIVACY}.kind={kind}")
    replies = [add_noise(reply_of(20_000, 0.0, bound=2.0), method, client_of(method, c), 4) for c in range(4)]
    later = add_noise(reply_of(20_000, 0.0, bound=2.0), method, client_of(method, 0, round=1), 4)
    for part, bound in (("update", 0.5), ("sketch", 2.0)):
        each = 3 * 2**0.5 * bound / (2 if kind == "central" else 1)
        noise = [sent(reply, part) for reply in replies]
        for reply, drawn in zip(replies, noise, strict=True):
            assert reply.parts[part].noise == pytest.approx(each)
            assert drawn.std().item() == pytest.approx(each, rel=0.03)
        assert sum(noise).std().item() == pytest.approx(2 * each, rel=0.03)
        assert (sent(later, part) - noise[0]).std().item() == pytest.approx(2**0.5 * each, rel=0.03)
        for one, other in itertools.combinations(noise, 2):
            assert abs(np.corrcoef(one, other)[0, 1]) < 4.5 / 20_000**0.5
    assert abs(np.corrcoef(sent(replies[0], "update"), sent(replies[0], "sketch"))[0, 1]) < 4.5 / 20_000**0.5


def test_each_client_joins_by_its_own_coin_and_sends_noise_alone_where_it_does_not(
    method_of: Callable, client_of: Callable
) -> None:
    """Poisson sampling: independent over clients and over rounds; a weight is the rate, whoever joins."""
    method = method_of(FedAvg, UNIFORM, f"{Z}=1e-9", f"{PRIVACY}.sample_rate=0.3")
    rows = method.select_rows(0, 0)
    joined = np.zeros((200, 5))
    for client, round in np.ndindex(joined.shape):
        out = add_noise(reply_of(2, 0.5), method, Client(client, 0, round, method.run, rows, {}), 200)
        assert out.parts["weight"].tensors["weight"].item() == pytest.approx(0.3)
        joined[client, round] = sent(out, "update")[0].round(decimals=3)
    assert set(joined.flatten()) == {0.0, 0.5}
    rates = joined / 0.5
    assert rates.mean() == pytest.approx(0.3, abs=4 * (0.21 / 1000) ** 0.5)
    sizes = rates.sum(0)
    assert len(set(sizes)) > 1
    assert ((sizes - 60) ** 2).mean() == pytest.approx(200 * 0.21, rel=1.5)
    for first, second in itertools.combinations(range(5), 2):
        assert abs(np.corrcoef(rates[:, first], rates[:, second])[0, 1]) < 4.5 / 200**0.5
    noisy = method_of(FedAvg, UNIFORM, f"{Z}=1", f"{PRIVACY}.sample_rate=0.3")
    for client, joins in enumerate(rates[:20, 0]):
        one, other = (add_noise(reply_of(8, x), noisy, client_of(noisy, client % 4), 4) for x in (0.1, 0.2))
        if client < 4:
            assert torch.equal(sent(one, "update"), sent(other, "update")) == (not joins)


def test_losses_and_numbers_of_samples_are_not_sent(method_of: Callable, client_of: Callable) -> None:
    method = method_of(FedAvg, UNIFORM, f"{Z}=1")
    out = add_noise(reply_of(4, 0.1, loss=2.5, samples=7, base_round=3), method, client_of(method, 0), 4)
    assert (out.loss, out.samples, out.base_round) == (0.0, 0, 3)


def test_noise_on_knowledge_leaves_updates_as_they_are(method_of: Callable, client_of: Callable) -> None:
    method = method_of(FedAvg, f"{Z}=1", f"{PRIVACY}.covers=knowledge", f"{PRIVACY}.sample_rate=0.5")
    out = add_noise(reply_of(4, 9.0, loss=2.5, samples=7), method, client_of(method, 0), 4)
    assert sent(out, "update").tolist() == [9.0] * 4
    assert (out.loss, out.samples, out.parts["weight"].tensors["weight"].item()) == (2.5, 7, 1.0)
    assert out.parts["sketch"].noise == pytest.approx(3.0 / 2)


# Epsilon.


def exact_epsilon(z: float, releases: int, delta: float) -> float:
    """Of Gaussian mechanisms without sampling, which are one of z / sqrt(releases) (Balle and Wang 2018, theorem 8)."""
    mu = releases**0.5 / z

    def excess(e: float) -> float:
        return stats.norm.cdf(mu / 2 - e / mu) - math.exp(e) * stats.norm.cdf(-mu / 2 - e / mu) - delta

    return optimize.brentq(excess, 0, 200)


def ledger_of(*rows: tuple[int, int, int, str, str, str, int | None]) -> pl.DataFrame:
    """Of (task, round, client, direction, part, kind, base_round)."""
    names = ("task", "round", "client", "direction", "part", "kind", "base_round")
    return pl.DataFrame(
        [dict(zip(names, row, strict=True)) | {"least": "sum", "bytes": 1} for row in rows], tables.LEDGER
    )


LEDGER = ledger_of(
    *((0, r, c, "up", part, "update", None) for r in range(3) for c in (0, 1) for part in ("update", "weight")),
    *((0, -1, c, "up", part, "sketch", None) for c in (0, 1) for part in ("sketch", "share")),
    (1, 0, 1, "up", "update", "update", None),
    (1, 2, 1, "up", "update", "update", 1),  # late: the release of round 1
    (1, 2, 1, "up", "update", "update", None),
    (1, -1, 0, "up", "sketch", "sketch", None),
    *((1, r, 0, "up", "secagg-keys", "protocol", None) for r in range(9)),
    *((1, r, 0, "down", "weights", "weights", None) for r in range(9)),
)


@pytest.mark.parametrize(("kind", "seen"), [("central", 3.0), ("local", 1.5)])
def test_epsilon_is_that_of_the_client_that_released_most(kind: str, seen: float, method_of: Callable) -> None:
    """Client 1: three rounds and a question, then three rounds of which one came late; client 0 has five."""
    settings = (f"{Z}=3", f"{PRIVACY}.kind={kind}", f"{PRIVACY}.delta=1e-4")
    found = find_largest_epsilon(method_of(FedAvg, UNIFORM, *settings), LEDGER)
    accountant = RDPAccountant()
    for _ in range(7):
        accountant.step(noise_multiplier=seen, sample_rate=1.0)
    assert (found["releases"], found["delta"], found["kind"]) == (7, 1e-4, kind)
    assert found["epsilon"] == pytest.approx(accountant.get_epsilon(1e-4), rel=1e-12)
    exact = exact_epsilon(seen, 7, 1e-4)
    assert exact < found["epsilon"] < 1.1 * exact
    for words in ("uniform weights", "no amplification", "Not covered"):
        assert words in found["covers"]


def test_of_knowledge_alone_only_questions_count(method_of: Callable) -> None:
    found = find_largest_epsilon(method_of(FedAvg, f"{Z}=3", f"{PRIVACY}.covers=knowledge"), LEDGER)
    assert found["releases"] == 2
    assert "besides updates, losses and numbers of samples" in found["covers"]


def test_amplification_is_claimed_where_clients_toss_coins(method_of: Callable) -> None:
    settings = (UNIFORM, f"{Z}=3", f"{PRIVACY}.delta=1e-4")
    all_of_them = find_largest_epsilon(method_of(FedAvg, *settings), LEDGER)
    fixed = find_largest_epsilon(method_of(FedAvg, *settings, "federation.clients_per_round=2"), LEDGER)
    coins = find_largest_epsilon(method_of(FedAvg, *settings, f"{PRIVACY}.sample_rate=0.1"), LEDGER)
    assert all_of_them == fixed
    assert coins["epsilon"] < all_of_them["epsilon"] / 5
    assert "probability 0.1 (Poisson)" in coins["covers"]


@pytest.mark.parametrize("rate", [1.0, 0.5])
def test_no_test_of_membership_does_better_than_epsilon_says(
    rate: float, method_of: Callable, client_of: Callable
) -> None:
    """A client whose reply has the length of the bound, or zeros, in the sum of two; 4000 sums of each.

    Whether a sum exceeds t is a test; of a true epsilon P(there) - e^epsilon P(not there) <= delta. The audit has
    power: a third of epsilon does not hold.
    """
    method = method_of(FedAvg, UNIFORM, f"{Z}=1", f"{PRIVACY}.clip=2.0", f"{PRIVACY}.sample_rate={rate}")
    rows, delta, n = method.select_rows(0, 0), 0.01, 4000

    def sums(value: float, first: int) -> np.ndarray:
        found = []
        for round in range(first, first + n):
            total = 0.0
            for client, own in ((0, value), (1, 0.0)):
                update = Part("update", {"w": torch.tensor([own])})
                who = Client(client, 0, round, method.run, rows, {})
                total += add_noise(Reply({"update": update}), method, who, 2).parts["update"].tensors["w"].item()
            found.append(total)
        return np.array(found)

    there, not_there = sums(99.0, 0), sums(0.0, n)

    def advantage(told: float) -> float:
        """The largest, less four standard errors, over tests and both directions."""
        best = -math.inf
        for t in np.linspace(-4, 8, 49):
            for p, q in (((there > t), (not_there > t)), ((not_there <= t), (there <= t))):
                error = math.sqrt((p.var() + math.exp(2 * told) * q.var()) / n)
                best = max(best, p.mean() - math.exp(told) * q.mean() - 4 * error)
        return best

    told = compute_epsilon(1.0, rate, 1, delta)
    assert advantage(told) <= delta
    assert advantage(told / 3) > delta


# Whole runs.

METHODS = {  # with their settings, and the releases of two tasks of two rounds
    "fedavg": ((), 4),
    "fot": ((), 6),
    "special": (("methods.special.lambda=auto",), 4),
    "nearest-prototype": ((), 4),
    "ridge": ((), 2),
    "pip-dualp": ((), 4),
}


@pytest.mark.parametrize("name", METHODS)
def test_a_run_tells_one_epsilon_for_all_that_it_released(
    name: str, experiment_of: Callable, splits_of: Callable, tmp_path: Path
) -> None:
    own, releases = METHODS[name]
    settings = (UNIFORM, f"{Z}=2", f"{PRIVACY}.delta=1e-3", *own)
    result = experiment_of(*settings, method=name, splits=splits_of(val=4)).run(tmp_path / "run")
    assert result["privacy"]["releases"] == releases
    assert result["privacy"]["epsilon"] == compute_epsilon(2.0, 1.0, releases, 1e-3)
    assert pl.read_parquet(tmp_path / "run" / "rounds.parquet")["loss"].null_count() == 4


@pytest.mark.parametrize("name", ["fedavg", "fot"])
def test_under_secure_aggregation_it_is_the_same_noise(name: str, experiment_of: Callable, tmp_path: Path) -> None:
    settings = (UNIFORM, f"{Z}=0.1", f"{PRIVACY}.sample_rate=0.7")
    plain, masked = (
        experiment_of(*settings, *some, method=name).run(tmp_path / f"{len(some)}")
        for some in ((), ("federation.secagg.on=true",))
    )
    told = [run["privacy"].pop("covers") for run in (plain, masked)]
    assert plain["privacy"] == masked["privacy"]
    assert ["Not against the server" in covers for covers in told] == [True, False]
    assert plain["metrics"] == masked["metrics"]
    kinds = pl.read_parquet(tmp_path / "1" / "ledger.parquet").filter(pl.col("direction") == "up")["part"].unique()
    assert "secagg-log" not in kinds


class Interruption(Listener):
    def on_client_done(self, task: int, round: int, done: int, of: int) -> None:
        if (task, round, done) == (1, 1, 2):
            raise KeyboardInterrupt


@pytest.mark.slow
@pytest.mark.parametrize("name", ["fot", "special", "pip-dualp"])
def test_noise_is_the_same_in_workers_and_after_an_interruption(
    name: str, experiment_of: Callable, splits_of: Callable, remains: Callable, tmp_path: Path
) -> None:
    settings = (UNIFORM, f"{Z}=1", f"{PRIVACY}.sample_rate=0.6", "federation.checkpoint_seconds=0", *METHODS[name][0])
    about, home = {"method": name, "splits": splits_of(val=4)}, tmp_path / "home"
    whole = experiment_of(*settings, **about).run(tmp_path / "whole")
    with pytest.raises(KeyboardInterrupt):
        experiment_of(*settings, **about, home=home, listener=Interruption()).run(tmp_path / "resumed")
    resumed = experiment_of(*settings, **about, home=home).run(tmp_path / "resumed")
    workers = ("federation.executor=processes", "federation.workers=2")
    elsewhere = experiment_of(*settings, *workers, **about).run(tmp_path / "workers")
    assert whole["privacy"] == resumed["privacy"] == elsewhere["privacy"]
    assert remains(tmp_path / "whole") == remains(tmp_path / "resumed") == remains(tmp_path / "workers")


@pytest.mark.parametrize(
    ("name", "settings", "told"),
    [
        ("fedavg", (), r"federation\.weighting: samples tells"),
        ("fot", (UNIFORM, "methods.fot.gpse=local"), r"methods\.fot covers sketches by noise under gpse: global"),
        ("fot", (UNIFORM, "methods.fot.profile=release"), r"methods\.fot covers .* gpse: global"),
        ("fedprotip", (UNIFORM,), r"methods\.fedprotip sends bases"),
        ("bic", (UNIFORM,), r"methods\.bic weighs corrections.* Use ss-il or icarl\.$"),
        ("podnet", (UNIFORM,), r"methods\.podnet draws proxies.* Use icarl or fedproto\.$"),
        ("afc", (UNIFORM,), r"methods\.afc draws proxies.* Use icarl or fedproto\.$"),
        ("dde-icarl", (UNIFORM,), r"methods\.dde-icarl needs the direction.* Use icarl\.$"),
        ("pip-dualp", (UNIFORM, "methods.pip-dualp.pooled=omega"), r"weighs prototypes by omega"),
        ("pip-dualp", (UNIFORM, "methods.pip-dualp.omega=participation"), r"weighs clients by participation"),
        ("pip-dualp", (UNIFORM, "methods.pip-dualp.head=own"), r"keeps parts of the model with its clients"),
        ("joint", (UNIFORM,), r"methods\.joint brings all samples to one place"),
        ("fedomg", (UNIFORM,), r"methods\.fedomg aligns single updates.*kind: local"),
        ("fedavg", (UNIFORM, "federation.aggregation=median"), r"median compares single replies.*kind: local"),
        ("fedavg", (UNIFORM, "federation.faults.missing=0.1"), r"takes its share of the noise with it"),
        ("fedavg", (UNIFORM, "federation.faults.crash=0.1"), r"takes its share of the noise with it"),
        ("fedavg", (UNIFORM, "federation.attack.kind=noise"), r"bad clients need not add their share"),
        ("nearest-prototype", (UNIFORM, f"{PRIVACY}.sample_rate=0.5"), r"hears each client once"),
    ],
)
def test_what_is_not_covered_refuses_before_the_run(
    name: str, settings: tuple[str, ...], told: str, experiment_of: Callable
) -> None:
    with pytest.raises(UserError, match=rf"^federation\.privacy: .*{told}"):
        experiment_of(f"{Z}=1", *settings, method=name)


@pytest.mark.parametrize("more", ["federation.aggregation=median", "federation.faults.missing=0.5"])
def test_single_replies_with_all_of_their_noise_may_be_looked_at(
    more: str, experiment_of: Callable, tmp_path: Path
) -> None:
    """And need nobody else's."""
    result = experiment_of(UNIFORM, f"{Z}=1", f"{PRIVACY}.kind=local", more).run(tmp_path / "run")
    assert result["privacy"]["releases"] <= 4


def test_a_part_that_is_not_covered_does_not_leave(method_of: Callable, client_of: Callable) -> None:
    method = method_of(FedAvg, UNIFORM, f"{Z}=1")
    with pytest.raises(UserError, match=r"sketch of methods\.fedavg has no bound"):
        add_noise(Reply({"sketch": Part("sketch", {})}), method, client_of(method, 0), 4)
    with pytest.raises(UserError, match=r"sketch of methods\.fedavg is for single replies"):
        add_noise(Reply({"sketch": Part("sketch", {}, "each", bound=1.0)}), method, client_of(method, 0), 4)
    weight = Part("count", {"weight": torch.tensor(2.0)})
    with pytest.raises(UserError, match=r"methods\.fedavg weighs clients"):
        add_noise(Reply({"weight": weight}), method, client_of(method, 0), 4)
    assert add_noise(Reply({}), method, client_of(method, 0), 4) == Reply({})


def test_running_statistics_are_refused(experiment_of: Callable, splits_of: Callable, tmp_path: Path) -> None:
    """Noise could make a variance negative."""
    settings = (UNIFORM, f"{Z}=1", "model.backbone=resnet18", "federation.rounds=1")
    with pytest.raises(UserError, match=r"statistics of methods\.fedavg has no bound.*batch_norm: batch"):
        experiment_of(*settings).run(tmp_path / "run")


@pytest.mark.parametrize("given", ["clip=2.0", "sample_rate=0.5", "covers=knowledge", "features=3.0"])
def test_settings_without_noise_do_nothing_and_say_so(given: str, params_of: Callable) -> None:
    with pytest.raises(UserError, match=f"{given.partition('=')[0]} does nothing without noise"):
        params_of(f"{PRIVACY}.{given}")


def test_a_single_reply_hides_no_sample(params_of: Callable) -> None:
    with pytest.raises(UserError, match="sample_rate needs kind: central"):
        params_of(f"{Z}=1", f"{PRIVACY}.kind=local", f"{PRIVACY}.sample_rate=0.5")
