"""Pruning: a look at val rows beside earlier choices' looks after the same task, of the same seed."""

from typing import Any

import pytest

from flows.study.search import STARTUP, note_look

EARLIER = [{1: 0.9, 2: 0.7, 3: 0.6, 4: 0.5}] * STARTUP


def count_looks(values: list[float], earlier: list[dict[int, float]]) -> int:
    """Return after how many looks a choice is pruned; as many as it has where it is not."""
    own: dict[int, float] = {}
    pruned = (step for step, value in enumerate(values, start=1) if note_look(own, earlier, step, value))
    return next(pruned, len(values))


@pytest.mark.parametrize(
    ("values", "looks"),
    [
        ([0.95, 0.05, 0.03, 0.01], 2),  # learns the first task best, and forgets it
        ([0.3, 0.9, 0.9, 0.9], 1),
        ([0.9, 0.7, 0.6, 0.5], 4),  # the median itself stays
        ([0.95, 0.75, 0.65, 0.1], 4),
    ],
)
def test_a_choice_is_pruned_by_the_look_itself_and_not_by_its_best(values: list[float], looks: int) -> None:
    assert count_looks(values, EARLIER) == looks


def test_the_first_choices_are_never_pruned() -> None:
    assert count_looks([0.0, 0.0], EARLIER[1:]) == 2
    short: list[dict[int, Any]] = [*EARLIER[1:], {1: 0.9}]  # one of which was pruned after its first look
    assert count_looks([0.9, 0.0], short) == 2
