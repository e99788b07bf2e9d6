"""SPECIAL: FedAvg at lambda = 0, the closed form of its drift, what it sends, what it advises, how it is set."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import polars as pl
import pytest
import torch

from fclmodels.errors import UserError
from fclmodels.federation.engine.replies import Replies
from fclmodels.federation.messages import Part, Reply
from fclmodels.methods.fedavg import FedAvg
from fclmodels.methods.special import Special, compute_drift, count_useful_rounds, round_down, solve_lambda
from fclmodels.settings import load as reading
from fclmodels.settings.describe import explain
from fclmodels.storage import trees

HARD = ("optimizer.momentum=0.9", "optimizer.weight_decay=0.01", "federation.clients_per_round=3")


def special_of(method_of: Callable, lam: float, *overrides: str, **more: Any) -> Special:
    return method_of(Special, *overrides, **{"lambda": lam}, **more)


@pytest.mark.parametrize(
    ("overrides", "head"),
    [
        ((*HARD, "model.dropout=[0.2, 0.5]"), "growing"),
        ((*HARD, "federation.server_lr=0.7", "federation.server_lr_schedule=1/t"), "per-task"),
        ((*HARD, "model.backbone=resnet18", "federation.rounds=1"), "growing"),
    ],
    ids=["growing", "per-task", "batch-norm"],
)
def test_lambda_zero_is_fedavg_to_the_bit(
    overrides: tuple[str, ...], head: str, method_of: Callable, splits_of: Callable, federate: Callable
) -> None:
    splits = splits_of(head=head)
    fedavg = federate(method_of(FedAvg, *overrides, splits=splits)).weights
    zero, some = (federate(special_of(method_of, lam, *overrides, splits=splits)).weights for lam in (0.0, 0.5))
    assert trees.digest(zero) == trees.digest(fedavg)
    assert trees.digest(some) != trees.digest(fedavg)


def test_a_round_of_a_later_task_is_fedavgs_and_then_eq_6(method_of: Callable, federate: Callable) -> None:
    """Also with a share of the clients and a server's learning rate that falls over tasks."""
    overrides = (*HARD, "federation.rounds=1", "federation.server_lr=0.8", "federation.server_lr_schedule=1/sqrt(t)")
    anchor, averaged = (federate(method_of(FedAvg, *overrides), tasks).weights for tasks in (1, 2))
    found = federate(special_of(method_of, 0.25, *overrides)).weights
    for name, old in anchor.items():
        k = len(old)
        expected = (averaged[name][:k].double() + 0.25 * old.double()) / 1.25
        torch.testing.assert_close(found[name][:k].double(), expected, rtol=0, atol=1e-7)
        assert torch.equal(found[name][k:], averaged[name][k:])


@pytest.mark.parametrize("lam", [0.0, 0.05, 0.4, 3.0])
def test_the_drift_under_a_constant_update_has_the_closed_form(lam: float, method_of: Callable, tmp_path: Path) -> None:
    """And so the shares of the limit that the advice is made of."""
    method = special_of(method_of, lam)
    server = method.start_task(method.start_task(method.create_server(), 0), 1)
    anchor = server.knowledge["anchor"]
    update = {name: torch.full_like(w, 0.01) for name, w in server.weights.items()}
    length = sum(0.01**2 * w.numel() for w in anchor.values()) ** 0.5
    replies = Replies((0,), tmp_path)
    replies.add(0, Reply({"update": Part("update", update), "weight": Part("count", {"weight": torch.tensor(1.0)})}))
    for done in range(1, 31):
        server = method.aggregate(server, replies)
        moved = sum((server.weights[n][: len(a)] - a).double().square().sum().item() for n, a in anchor.items()) ** 0.5
        expected = sum((1 + lam) ** -k for k in range(1, done + 1))
        assert compute_drift(lam, done) == pytest.approx(expected)
        assert moved == pytest.approx(length * expected, rel=1e-4)
    fresh = (
        server.weights["heads.0.weight"][2:]
        - method.start_task(method.create_server(), 1).weights["heads.0.weight"][2:]
    )
    torch.testing.assert_close(fresh, torch.full_like(fresh, 0.3), rtol=0, atol=1e-5)


def test_no_byte_more_is_sent_than_by_fedavg(experiment_of: Callable, tmp_path: Path) -> None:
    for method in ("fedavg", "special"):
        experiment_of("federation.clients_per_round=3", "methods.special.lambda=0.25", method=method).run(
            tmp_path / method
        )
    ours, theirs = (pl.read_parquet(tmp_path / method / "ledger.parquet") for method in ("special", "fedavg"))
    assert ours.equals(theirs)


@pytest.mark.parametrize(("lam", "rounds"), [(0.05, 81), (0.25, 18), (0.4, 12), (1.0, 6), (1e6, 1)])
def test_so_many_rounds_are_useful(lam: float, rounds: int) -> None:
    """The first number after which no more than 2 % of the way is left: 0.25 / 1.25^18 < 0.02 * 0.25."""
    assert count_useful_rounds(lam) == rounds
    assert compute_drift(lam, rounds) >= 0.98 / lam > compute_drift(lam, rounds - 1)


@pytest.mark.parametrize("rounds", [1, 10, 20, 500])
def test_the_fitting_lambda_makes_just_these_rounds_useful(rounds: int) -> None:
    assert count_useful_rounds(1.001 * solve_lambda(rounds)) == rounds
    assert count_useful_rounds(0.99 * solve_lambda(rounds)) > rounds or rounds == 1


def test_advice_tells_how_many_rounds_are_useful(method_of: Callable, splits_of: Callable) -> None:
    splits = splits_of(tasks=3)
    (line,) = special_of(method_of, 0.25, "federation.rounds=[40, 18, 10]", splits=splits).list_advice()
    assert line.startswith("lambda 0.25: ")
    assert "4 times as far" in line
    assert line.endswith("98% of that by round 18")


def test_advice_warns_of_rounds_that_the_anchor_makes_useless(method_of: Callable, splits_of: Callable) -> None:
    splits = splits_of(tasks=3)
    _, warning = special_of(method_of, 0.25, "federation.rounds=[1, 19, 5]", splits=splits).list_advice()
    assert warning.startswith("federation.rounds: 1 of 2 later tasks goes on beyond that, up to round 19,")
    scaled = special_of(method_of, 0.25, "federation.rounds=40", "federation.rounds_scale=0.4", splits=splits)
    assert len(scaled.list_advice()) == 1  # 16 rounds are left of them
    both = special_of(method_of, 1.0, "federation.rounds=20", splits=splits).list_advice()
    assert "2 of 2 later tasks go on beyond that, up to round 20," in both[1]
    assert both[1].endswith(
        "with new classes' rows of the head, which have no anchor, left to move. Take fewer rounds, or a lambda of 0.21"
    )
    domains = splits_of(tasks=3, same_classes=True)
    _, warning = special_of(method_of, 1.0, "federation.rounds=20", splits=domains).list_advice()
    assert "with little left to move." in warning


@pytest.mark.parametrize("rounds", [2, 39, 40, 500])
def test_who_follows_the_advice_is_not_warned_again(rounds: int, method_of: Callable) -> None:
    assert count_useful_rounds(round_down(solve_lambda(rounds))) >= rounds
    assert round_down(solve_lambda(rounds)) > 0.9 * solve_lambda(rounds)


def test_the_least_lambda_has_advice_too(method_of: Callable) -> None:
    (line,) = special_of(method_of, 1e-320).list_advice()
    assert line.startswith("lambda 9.99989e-321: ")


def test_there_is_no_advice_where_nothing_is_anchored(method_of: Callable, splits_of: Callable) -> None:
    assert method_of(FedAvg).list_advice() == []
    assert special_of(method_of, 0.0).list_advice() == []
    assert special_of(method_of, 1.0, "federation.rounds=50", splits=splits_of(tasks=1)).list_advice() == []


@pytest.fixture
def load(tmp_path: Path) -> Callable[..., Any]:
    file = tmp_path / "params.yaml"
    file.write_text("partition: {val: 0.1}\nmethods:\n  special: {lambda: 0.1}\n")
    return lambda *overrides: reading.load_params(file, overrides)


@pytest.mark.parametrize(("written", "value"), [("0.3", 0.3), ("2", 2.0), ("auto", "auto")])
def test_lambda_is_its_name_wherever_it_is_written(load: Callable, written: str, value: float | str) -> None:
    assert reading.load_method_settings(load(), "special").lam == 0.1
    params = load(f"methods.special.lambda={written}")
    assert reading.load_method_settings(params, "special").lam == value
    effective = reading.collect_settings(params, "special")
    assert effective["methods"]["special"]["lambda"] == value
    assert reading.flatten_settings(effective)["methods.special.lambda"] == value
    assert {row.path for row in explain("lambda")} >= {"methods.special.lambda"}


@pytest.mark.parametrize(
    ("override", "problem"),
    [
        ("lam=1", "methods.special.lam is not a setting. Did you mean methods.special.lambda?"),
        ("lamda=1", "methods.special.lamda is not a setting. Did you mean methods.special.lambda?"),
        ("lambda=-1", "methods.special.lambda is -1; it must be a number at least 0 and at most 1e+06, or auto."),
        ("lambda=car", 'methods.special.lambda is "car"; it must be a number at least 0 and at most 1e+06, or auto.'),
    ],
)
def test_a_mistake_in_it_is_told_by_its_name(load: Callable, override: str, problem: str) -> None:
    with pytest.raises(UserError) as caught:
        load(f"methods.special.{override}")
    assert str(caught.value) == f"--set methods.special.{override}: {problem}"


def test_another_lambda_is_another_experiment_and_the_run_folder_says_which(
    experiment_of: Callable, tmp_path: Path
) -> None:
    keys = set()
    for lam in (0.1, 0.2):
        experiment = experiment_of(f"methods.special.lambda={lam}", "federation.rounds=1", method="special")
        keys.add(experiment.step("begin", None, 0).key)
    assert len(keys) == 2
    result = experiment.run(tmp_path / "run")
    assert result["settings"]["methods"]["special"]["lambda"] == 0.2
    again = reading.load_params(tmp_path / "run" / "settings.json", method="special")
    assert reading.collect_settings(again, "special") == reading.collect_settings(experiment.params, "special")
