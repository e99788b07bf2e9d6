"""What kinds of messages open: every kind has a word, the page has them all, and what nothing can cover is refused."""

from collections.abc import Callable
from pathlib import Path
from typing import get_args

import polars as pl
import pytest
import torch
from torch import Tensor

from fclmodels.errors import UserError
from fclmodels.experiment.experiment import Experiment
from fclmodels.experiment.method_card import describe_methods, format_card
from fclmodels.federation.messages import Kind, Part, Reply, make_outline
from fclmodels.federation.protection.disclosures import DISCLOSURES
from fclmodels.federation.protection.inspection import ReplyDefect, inspect_reply
from fclmodels.federation.protection.reply_checks import PartError, check_class_statistics, check_samples
from fclmodels.numerics.fitted_heads import sum_classes, sum_products


def reason_against(tensors: dict[str, Tensor]) -> str | None:
    """Return why these class statistics are refused; None where they are taken."""
    try:
        check_class_statistics(tensors)
    except PartError as problem:
        return str(problem)
    return None


PAGE = Path(__file__).parents[4] / "docs" / "privacy.md"
KINDS = ("samples", "gradient", "generator", "class-statistics")


def test_every_kind_that_a_method_may_send_has_its_words() -> None:
    assert {*DISCLOSURES} == {*get_args(Kind)} - {"protocol"}


def test_the_page_on_privacy_has_them_all() -> None:
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in PAGE.read_text().splitlines()]
    words = {True: "yes", False: "no"}
    expected = [[kind, d.opens, words[d.has_sum], words[d.takes_noise]] for kind, d in DISCLOSURES.items()]
    start = rows.index(expected[0])
    assert rows[start : start + len(expected)] == expected


def test_the_card_of_a_method_says_what_it_sends_opens(toys: Path) -> None:
    cards = {card["name"]: "\n".join(format_card(card)) for card in describe_methods(["every-kind", "fedavg"])}
    assert all(DISCLOSURES[kind].opens in cards["every-kind"] for kind in KINDS)
    assert f"what it sends opens: update, {DISCLOSURES['update'].opens}; count, numbers of samples\n" in cards["fedavg"]
    assert DISCLOSURES["gradient"].opens not in cards["fedavg"]
    assert "single replies of class-statistics, generator, gradient, samples, else sums" in cards["every-kind"]


def test_what_is_sent_before_a_task_and_by_groups_is_on_the_card(toys: Path) -> None:
    cards = {
        card["name"]: "\n".join(format_card(card)) for card in describe_methods(["first-statistics", "two-groups"])
    }
    assert "before a task counts (count)" in cards["first-statistics"]
    assert "sums over groups of clients of update, weight, else sums" in cards["two-groups"]


# Refusals before a run.

MASKS = "federation.secagg.on=true"
NOISE = ("federation.privacy.noise_multiplier=1", "federation.weighting=uniform")


@pytest.mark.parametrize(
    ("settings", "part"),
    [
        ("{}", "samples"),
        ("{kinds: [gradient]}", "gradient"),
        ("{kinds: [class-statistics, samples], least: sum}", "samples"),
        ("{kinds: [generator], least: sum}", "generator"),
    ],
)
def test_under_secure_aggregation_what_has_no_sum_or_is_needed_by_itself_is_refused_by_name(
    settings: str, part: str, toys: Path, experiment_of: Callable[..., Experiment]
) -> None:
    with pytest.raises(UserError, match=rf"every-kind sends {part} \({part}\), which the server needs by itself"):
        experiment_of(MASKS, f"methods.every-kind={settings}", method="every-kind")


@pytest.mark.parametrize(
    ("settings", "part"),
    [
        ("{least: sum}", "samples"),
        ("{kinds: [gradient, samples], least: sum, bound: 1.0}", "samples"),
        ("{kinds: [gradient], least: sum}", "gradient"),
        ("{kinds: [generator], least: each}", "generator"),
        ("{kinds: [class-statistics], least: sum}", "class-statistics"),
    ],
)
@pytest.mark.parametrize("kind", ["central", "local"])
def test_under_noise_what_it_cannot_cover_is_refused_by_name(
    settings: str, part: str, kind: str, toys: Path, experiment_of: Callable[..., Experiment]
) -> None:
    noise = (*NOISE, f"federation.privacy.kind={kind}")
    with pytest.raises(UserError, match=rf"every-kind sends {part} \({part}\), which noise cannot cover"):
        experiment_of(*noise, f"methods.every-kind={settings}", method="every-kind")


@pytest.mark.parametrize("settings", [NOISE, (MASKS,), (*NOISE, MASKS)], ids=["noise", "masks", "both"])
def test_a_gradient_and_class_statistics_with_a_bound_are_covered(
    settings: tuple[str, ...], toys: Path, experiment_of: Callable[..., Experiment], tmp_path: Path
) -> None:
    own = "methods.every-kind={kinds: [gradient, class-statistics], least: sum, bound: 1.0}"
    experiment = experiment_of(*settings, own, "federation.rounds=1", method="every-kind")
    experiment.run(tmp_path / "run")
    ledger = pl.read_parquet(tmp_path / "run" / "ledger.parquet")
    assert ledger.filter(part="gradient", direction="up")["kind"].unique().to_list() == ["gradient"]


@pytest.mark.parametrize("toy", ["two-groups", "personal-bias", "several-models"])
def test_what_is_evaluated_at_clients_is_refused_under_secure_aggregation(
    toy: str, toys: Path, experiment_of: Callable[..., Experiment]
) -> None:
    with pytest.raises(UserError, match=f"methods.{toy} keeps parts of the model with its clients"):
        experiment_of(MASKS, method=toy)


# Replies that are not what their kinds say.


@pytest.mark.parametrize(
    ("fault", "part", "why"),
    [
        ("label", "samples", "has a label above 1"),
        ("negative label", "samples", "has a negative label"),
        ("labels", "samples", "has not one label for each input"),
        ("gradient", "gradient", "heads.0.weight is not of the model"),
        ("generator", "generator", "is not finite"),
        ("asymmetric", "class-statistics", "has a matrix that is not symmetric"),
        ("variance", "class-statistics", "has a negative variance"),
        ("long", "class-statistics", "times as long as the median"),
    ],
)
def test_a_reply_that_its_kind_does_not_allow_is_refused_and_the_rest_is_used(
    fault: str, part: str, why: str, toys: Path, experiment_of: Callable[..., Experiment], tmp_path: Path
) -> None:
    experiment = experiment_of(f"methods.every-kind.fault={fault}", "federation.rounds=1", method="every-kind")
    refusals: list[tuple[int, int, int, str]] = []
    experiment.listener.on_refusal = lambda *refusal: refusals.append(refusal)
    experiment.run(tmp_path / "run")
    first = refusals[0]
    assert first[:3] == (0, -1, 1)
    assert first[3].startswith(f"{part} ")
    assert why in first[3]


def statistics(**changes: Tensor) -> dict[str, Tensor]:
    A = torch.randn(9, 3, generator=torch.Generator().manual_seed(0))
    return {**sum_classes(A, torch.arange(9) % 2, 2), **changes}


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({}, None),
        ({"weight": torch.tensor([-1.0, 4.0])}, "has a negative count"),
        ({"weight": torch.tensor([0.0, 4.0])}, "has a sum of no samples"),
        ({"sum": torch.zeros(2, 4)}, "has no square matrix for each class"),
        ({"outer": torch.zeros(2, 3, 4)}, "has no square matrix for each class"),
        ({"outer": -torch.eye(3).repeat(2, 1, 1)}, "has a negative sum of squares"),
    ],
)
def test_class_statistics_are_moments_of_samples(changes: dict[str, Tensor], why: str | None) -> None:
    assert reason_against(statistics(**changes)) == why


def test_products_of_features_are_class_statistics_too() -> None:
    sums = sum_products(torch.randn(9, 3, generator=torch.Generator().manual_seed(0)), torch.arange(9) % 2, 2)
    assert reason_against(sums) is None
    assert reason_against({**sums, "gram": sums["gram"] + torch.arange(3)}) == "has a matrix that is not symmetric"
    assert reason_against({**sums, "gram": sums["gram"][:2]}) == "has a matrix that is not square"


@pytest.mark.parametrize("classes", [None, 5])
def test_labels_lie_within_the_classes_that_the_server_has(classes: int | None) -> None:
    reply = Reply({"fakes": Part("samples", {"inputs": torch.zeros(2, 1, 4, 4), "labels": torch.tensor([0, 5])})})
    defect = inspect_reply(reply, {}, classes=classes).defect
    assert defect == (None if classes is None else ReplyDefect("fakes", "has a label above 4"))


def test_samples_need_inputs_and_labels() -> None:
    with pytest.raises(PartError, match="has no inputs and labels"):
        check_samples({"inputs": torch.zeros(2, 3)})


def test_a_gradient_is_compared_with_the_model_that_was_sent() -> None:
    sent = {"weights": make_outline("weights", {"w": (2, 3)})}
    right, wrong = (Reply({"g": Part("gradient", {"w": torch.zeros(shape)})}) for shape in ((2, 3), (3, 2)))
    assert inspect_reply(right, sent).defect is None
    assert inspect_reply(wrong, sent).defect == ReplyDefect("g", "w is not of the model")
