"""What `fcl explain` says of a method: its own words, and what a trial's ledger counted."""

import pytest

from fclmodels.experiment.method_card import describe_methods, format_card


@pytest.fixture(scope="module")
def cards() -> dict[str, dict]:
    return {each["name"]: each for each in describe_methods(["fedavg", "fedprotip", "pip-l2p"])}


def test_fedavg_sends_an_update_and_a_weight_that_need_only_sums(cards: dict[str, dict]) -> None:
    traffic = cards["fedavg"]["traffic"]
    assert [(row["part"], row["kind"], row["least"]) for row in traffic["sends in each round"]] == [
        ("update", "update", "sum"),
        ("weight", "count", "sum"),
    ]
    assert traffic["sends in each round"][1]["bytes"] == 8
    assert 0.95 < traffic["receives in each round"][0]["share"] <= 1
    assert not traffic["sends after a task"] + traffic["keeps"]
    assert any("sums over clients alone" in line for line in format_card(cards["fedavg"]))


def test_fedprotip_sends_bases_after_a_task_that_the_server_needs_one_by_one(cards: dict[str, dict]) -> None:
    after = {row["part"]: row for row in cards["fedprotip"]["traffic"]["sends after a task"]}
    assert (after["directions"]["kind"], after["directions"]["least"]) == ("directions", "each")
    assert "it predicts the task of a sample by itself" in format_card(cards["fedprotip"])
    assert "single replies of directions, references" in " ".join(format_card(cards["fedprotip"]))


def test_prompts_travel_and_the_frozen_backbone_does_not(cards: dict[str, dict]) -> None:
    traffic = cards["pip-l2p"]["traffic"]
    assert max(row["share"] for way in traffic.values() for row in way) < 0.1
    assert "prototypes" in [row["part"] for row in traffic["receives in each round"]]


def test_it_takes_ten_lines_at_most_that_begin_with_the_methods_own_words(cards: dict[str, dict]) -> None:
    for name, each in cards.items():
        lines = format_card(each)
        assert 6 <= len(lines) <= 10
        assert lines[0].startswith(f"{name}: ")
        assert lines[-1] == f"settings: fcl params {name}"
