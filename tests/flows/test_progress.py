"""What a person sees: bars with the time left on a terminal, a few plain lines elsewhere."""

import io
from typing import Any

import pytest
from rich.console import Console

from flows.progress import Bars, Lines, Silent, watch

SUMMARY = {"task_agnostic": {"acc": 0.345}}


def row(task: int, round: int, seconds: float = 2.0, answers: int = 3, late: int = 0) -> dict[str, Any]:
    counts = {"clients": 3, "answers": answers, "late": late, "missing": 3 - answers}
    return {"task": task, "round": round, "loss": 0.5, "seconds": seconds, **counts}


def tell(watcher: Silent, tasks: int, rounds: int) -> None:
    """A whole run, as the engine and the flow tell of it."""
    with watcher:
        for task in range(tasks):
            watcher.task_started(task, rounds)
            for round in range(rounds):
                for done in (1, 2, 3):
                    watcher.client_done(task, round, done, 3)
                watcher.round_done(row(task, round))
            watcher.task_learned(task, SUMMARY, again=False)


def test_lines_are_one_a_task_however_many_rounds() -> None:
    console = Console(file=io.StringIO(), force_terminal=False)
    tell(Lines("fedavg-0", [500, 500], console), tasks=2, rounds=500)
    assert console.file.getvalue().splitlines() == [
        "fedavg-0: task 1 of 2 learned, accuracy 34.5 %",
        "fedavg-0: task 2 of 2 learned, accuracy 34.5 %",
    ]


def test_a_long_task_says_now_and_then_where_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter(range(0, 1000, 4))
    monkeypatch.setattr("flows.progress.time.monotonic", lambda: next(clock))
    console = Console(file=io.StringIO(), force_terminal=False)
    lines = Lines("fedavg-0", [50], console)
    for round in range(4):
        lines.round_done(row(0, round))
    assert console.file.getvalue() == "fedavg-0: task 1 of 1, round 3 of 50, loss 0.500\n"


def test_bars_tell_the_time_left_from_the_rounds_done_here() -> None:
    console = Console(file=io.StringIO(), force_terminal=True, width=200)
    bars = Bars("fedavg-0", [10, 20], console)
    with bars:
        bars.task_learned(0, SUMMARY, again=True)
        bars.round_done(row(1, 3, seconds=4.0))
        bars.round_done(row(1, 4, seconds=2.0))
    (over_rounds,) = [task for task in bars.bars.tasks if task.total == 30]
    assert over_rounds.completed == 15
    assert over_rounds.description == "fedavg-0: task 2 of 2, rounds"
    assert over_rounds.fields["note"] == "accuracy 34.5 %, loss 0.500, 0:45 left"


@pytest.mark.parametrize(
    ("answers", "late", "told"),
    [(3, 0, ""), (2, 0, ", 2 answers from 3 clients"), (3, 1, ", 3 answers from 3 clients, 1 late")],
)
def test_answers_are_told_where_they_are_not_one_of_each_client_in_time(answers: int, late: int, told: str) -> None:
    bars = Bars("fedavg-0", [10], Console(file=io.StringIO(), force_terminal=True, width=200))
    with bars:
        bars.round_done(row(0, 9, answers=answers, late=late))
    (over_rounds,) = [task for task in bars.bars.tasks if task.total == 10]
    assert over_rounds.fields["note"] == f"loss 0.500{told}, 0:00 left"


def test_quiet_says_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    tell(watch("fedavg-0", [3, 3], quiet=True), tasks=2, rounds=3)
    assert capsys.readouterr() == ("", "")


def test_without_a_terminal_there_are_lines(capsys: pytest.CaptureFixture[str]) -> None:
    tell(watch("fedavg-0", [3, 3], quiet=False), tasks=2, rounds=3)
    out, err = capsys.readouterr()
    assert out == ""
    assert err.count("\n") == 2
