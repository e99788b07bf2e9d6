"""Progress on standard error: bars with the remaining time on a terminal, a few plain lines elsewhere."""

import io
from typing import Any

import pytest
from rich.console import Console

from flows.cli.progress import BarProgress, LineProgress, SilentProgress, create_progress

SUMMARY = {"task_agnostic": {"acc": 0.345}}


def make_row(task: int, round: int, seconds: float = 2.0, answers: int = 3, late: int = 0) -> dict[str, Any]:
    counts = {"clients": 3, "answers": answers, "late": late, "missing": 3 - answers}
    return {"task": task, "round": round, "loss": 0.5, "seconds": seconds, **counts}


def report_run(progress: SilentProgress, tasks: int, rounds: int) -> None:
    """Report a complete run, as the engine and the flow do."""
    with progress:
        for task in range(tasks):
            progress.on_task_start(task, rounds)
            for round in range(rounds):
                for done in (1, 2, 3):
                    progress.on_client_done(task, round, done, 3)
                progress.on_round_done(make_row(task, round))
            progress.on_task_learned(task, SUMMARY, cached=False)


def test_lines_are_one_a_task_however_many_rounds() -> None:
    console = Console(file=io.StringIO(), force_terminal=False)
    report_run(LineProgress("fedavg-0", [500, 500], console), tasks=2, rounds=500)
    assert console.file.getvalue().splitlines() == [
        "fedavg-0: task 1 of 2 learned, accuracy 34.5 %",
        "fedavg-0: task 2 of 2 learned, accuracy 34.5 %",
    ]


def test_a_long_task_says_now_and_then_where_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter(range(0, 1000, 4))
    monkeypatch.setattr("flows.cli.progress.time.monotonic", lambda: next(clock))
    console = Console(file=io.StringIO(), force_terminal=False)
    lines = LineProgress("fedavg-0", [50], console)
    for round in range(4):
        lines.on_round_done(make_row(0, round))
    assert console.file.getvalue() == "fedavg-0: task 1 of 1, round 3 of 50, loss 0.500\n"


def test_bars_tell_the_time_left_from_the_rounds_done_here() -> None:
    console = Console(file=io.StringIO(), force_terminal=True, width=200)
    bars = BarProgress("fedavg-0", [10, 20], console)
    with bars:
        bars.on_task_learned(0, SUMMARY, cached=True)
        bars.on_round_done(make_row(1, 3, seconds=4.0))
        bars.on_round_done(make_row(1, 4, seconds=2.0))
    (over_rounds,) = [task for task in bars.bars.tasks if task.total == 30]
    assert over_rounds.completed == 15
    assert over_rounds.description == "fedavg-0: task 2 of 2, rounds"
    assert over_rounds.fields["note"] == "accuracy 34.5 %, loss 0.500, 0:45 left"


@pytest.mark.parametrize(
    ("answers", "late", "note"),
    [(3, 0, ""), (2, 0, ", 2 answers from 3 clients"), (3, 1, ", 3 answers from 3 clients, 1 late")],
)
def test_answers_are_told_where_they_are_not_one_of_each_client_in_time(answers: int, late: int, note: str) -> None:
    bars = BarProgress("fedavg-0", [10], Console(file=io.StringIO(), force_terminal=True, width=200))
    with bars:
        bars.on_round_done(make_row(0, 9, answers=answers, late=late))
    (over_rounds,) = [task for task in bars.bars.tasks if task.total == 10]
    assert over_rounds.fields["note"] == f"loss 0.500{note}, 0:00 left"


def test_quiet_says_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    report_run(create_progress("fedavg-0", [3, 3], quiet=True), tasks=2, rounds=3)
    assert capsys.readouterr() == ("", "")


def test_without_a_terminal_there_are_lines(capsys: pytest.CaptureFixture[str]) -> None:
    report_run(create_progress("fedavg-0", [3, 3], quiet=False), tasks=2, rounds=3)
    out, err = capsys.readouterr()
    assert out == ""
    assert err.count("\n") == 2
