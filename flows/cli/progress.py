"""Progress of a run on standard error: bars on a terminal, plain lines elsewhere, or nothing."""

import time
from collections.abc import Sequence
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn
from rich.table import Column

from fclmodels.federation.engine.listener import Listener

LINE_EVERY = 10.0  # seconds between plain lines within a task
READING = "task_agnostic"
Summary = dict[str, dict[str, float | None]]


class SilentProgress(Listener):
    """A listener of the engine and of the flow that prints nothing.

    rounds: the number of rounds of each task.
    """

    def __init__(self, label: str, rounds: Sequence[int]) -> None:
        self.label = label
        self.rounds = rounds

    def __enter__(self) -> "SilentProgress":
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def on_task_learned(self, task: int, summary: Summary, cached: bool) -> None:
        """Show that a task is learned and evaluated; cached: its training was in the store."""

    def remark(self, text: str) -> None:
        """Show a method's remark on a task."""

    def on_refusal(self, task: int, round: int, client: int, why: str) -> None:
        when = f"round {round + 1}" if round >= 0 else "its end"
        self.remark(f"task {task + 1}, {when}: the reply of client {client} is refused: {why}")


class LineProgress(SilentProgress):
    """Prints a line after each task, and one every few seconds within it."""

    def __init__(self, label: str, rounds: Sequence[int], console: Console) -> None:
        super().__init__(label, rounds)
        self.console = console
        self.last_line = time.monotonic()

    def on_round_done(self, row: dict[str, Any]) -> None:
        if time.monotonic() - self.last_line >= LINE_EVERY:
            place = (
                f"task {row['task'] + 1} of {len(self.rounds)}, round {row['round'] + 1} of {self.rounds[row['task']]}"
            )
            self.print_line(f"{place}, {format_loss(row)}{format_answers(row)}")

    def on_server_step(self, task: int, work: str, done: int, of: int) -> None:
        if time.monotonic() - self.last_line >= LINE_EVERY:
            self.print_line(f"task {task + 1} of {len(self.rounds)}, the server trains {work}: step {done} of {of}")

    def on_task_learned(self, task: int, summary: Summary, cached: bool) -> None:
        note = " (cached)" if cached else ""
        self.print_line(f"task {task + 1} of {len(self.rounds)} learned, {format_accuracy(summary)}{note}")

    def remark(self, text: str) -> None:
        self.print_line(text)

    def print_line(self, text: str) -> None:
        self.console.print(f"{self.label}: {text}", highlight=False, soft_wrap=True)
        self.last_line = time.monotonic()


class BarProgress(SilentProgress):
    """Shows a bar over all rounds with the remaining time, and one over the clients of the round."""

    def __init__(self, label: str, rounds: Sequence[int], console: Console) -> None:
        super().__init__(label, rounds)
        self.bars = Progress(
            TextColumn("{task.description}"),
            BarColumn(bar_width=None),
            MofNCompleteColumn(table_column=Column(no_wrap=True, min_width=9)),
            TextColumn("{task.fields[note]}"),
            console=console,
        )
        self.over_rounds = self.bars.add_task(label, total=sum(rounds), note="")
        self.over_clients = self.bars.add_task("clients", total=None, visible=False, note="")
        self.notes = {"accuracy": "", "loss": "", "remaining": ""}
        self.measured = (0, 0.0)  # rounds trained here, and their seconds

    def __enter__(self) -> "BarProgress":
        self.bars.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.bars.update(self.over_clients, visible=False)
        self.bars.stop()

    def on_client_done(self, task: int, round: int, done: int, of: int) -> None:
        self.bars.update(self.over_clients, description="clients", completed=done, total=of, visible=True)

    def on_server_step(self, task: int, work: str, done: int, of: int) -> None:
        self.bars.update(self.over_clients, description=f"server, {work}", completed=done, total=of, visible=True)

    def on_round_done(self, row: dict[str, Any]) -> None:
        completed = sum(self.rounds[: row["task"]]) + row["round"] + 1
        self.measured = (self.measured[0] + 1, self.measured[1] + row["seconds"])
        seconds = (sum(self.rounds) - completed) * self.measured[1] / self.measured[0]
        remaining = f"{seconds // 60:.0f}:{seconds % 60:02.0f} left"
        self.update(completed, row["task"], loss=format_loss(row) + format_answers(row), remaining=remaining)

    def on_task_learned(self, task: int, summary: Summary, cached: bool) -> None:
        self.update(sum(self.rounds[: task + 1]), task, accuracy=format_accuracy(summary))

    def remark(self, text: str) -> None:
        self.bars.console.print(f"{self.label}: {text}", highlight=False, soft_wrap=True)

    def update(self, completed: int, task: int, **notes: str) -> None:
        """Set the bar over all rounds; notes stay until they are replaced."""
        self.notes |= notes
        note = ", ".join(filter(None, self.notes.values()))
        name = f"{self.label}: task {task + 1} of {len(self.rounds)}, rounds"
        self.bars.update(self.over_rounds, completed=completed, description=name, note=note)


def create_progress(label: str, rounds: Sequence[int], quiet: bool) -> SilentProgress:
    """Return bars if standard error is a terminal, lines if not, and silence if quiet."""
    console = Console(stderr=True)
    if quiet:
        return SilentProgress(label, rounds)
    return (BarProgress if console.is_terminal else LineProgress)(label, rounds, console)


def format_loss(row: dict[str, Any]) -> str:
    return "no loss reported" if row["loss"] is None else f"loss {row['loss']:.3f}"


def format_answers(row: dict[str, Any]) -> str:
    """Return how many answers a round has, "" if it has one of each client and none is late."""
    if row["answers"] == row["clients"] and not row["late"]:
        return ""
    late = f", {row['late']} late" if row["late"] else ""
    return f", {row['answers']} answers from {row['clients']} clients{late}"


def format_accuracy(summary: Summary) -> str:
    accuracy = summary.get(READING, {}).get("acc")
    return "accuracy unknown" if accuracy is None else f"accuracy {100 * accuracy:.1f} %"
